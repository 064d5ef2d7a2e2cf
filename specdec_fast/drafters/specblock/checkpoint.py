"""The checkpoint of a SpecBlock drafter (Shi et al., arXiv 2605.07243)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specdec_fast.drafters.shared.checkpoint.settings import MOST_PARTS, LayerConfig, Settings
from specdec_fast.drafters.shared.checkpoint.weights import WeightTable
from specdec_fast.errors import ConfigError
from specdec_fast.trees.static import MOST_NODES

_KIND = "a SpecBlock drafter"
_SLOTS = "diffspec_draft_token_num"  # the name that published configurations have
NUM_CLASSES = 4  # of the rank head
NUM_FEATURES = 20  # ids whose logits it reads
RANK_FEATURES = 15  # beside the hidden state: ten log-probabilities, three gaps, the top probability, the entropy
RANK_HIDDEN = 256
_DEFAULT_SLOTS = 4
_DEFAULT_NODES = 16


@dataclass(frozen=True)
class SpecBlockConfig(LayerConfig):
    """What ``config.json`` says of a drafter; layers, vocabulary and taps as for EAGLE-3."""

    num_slots: int  # number of tokens that a block drafts
    tree_nodes: int  # the largest number of nodes of a tree


def is_specblock(folder: Path) -> bool:
    """Return whether a folder has the ``config.json`` of a SpecBlock drafter.

    Raises:
        ConfigError: ``architectures`` is no list of names.
    """
    settings = Settings.read_if_any(folder)
    return settings.is_named("specblock") or _SLOTS in settings


def read_config(folder: Path) -> SpecBlockConfig:
    """Read a checkpoint's ``config.json``.

    Raises:
        ConfigError: there is none, or it has settings that are not served.
    """
    settings = Settings.read(folder, _KIND)
    layer = settings.layer(num_layers=2)
    settings.expect_no_windows(layer.num_hidden_layers)
    tree_nodes = settings.positive_integer("tree_nodes", _DEFAULT_NODES)
    if tree_nodes > MOST_NODES:
        raise ConfigError(f"{settings.where}: tree_nodes is {tree_nodes}; expected at most {MOST_NODES}.")
    draft_vocab_size = settings.positive_integer("draft_vocab_size", layer.vocab_size)
    num_classes = settings.positive_integer("rank_classes", NUM_CLASSES)
    if num_classes != NUM_CLASSES or draft_vocab_size < NUM_FEATURES:
        raise ConfigError(
            f"{settings.where} has a rank head of {num_classes} classes over {draft_vocab_size} ids; expected "
            f"{NUM_CLASSES} classes, and {NUM_FEATURES} ids or more."
        )
    return SpecBlockConfig(
        folder=folder,
        layer=layer,
        sliding_windows=(None,) * layer.num_hidden_layers,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=settings.positive_integer("target_hidden_size", layer.hidden_size),
        tap_layers=settings.layer_ids("tap_layers"),
        num_slots=settings.positive_integer(_SLOTS, _DEFAULT_SLOTS, MOST_PARTS),
        tree_nodes=tree_nodes,
    )


def weight_table(config: SpecBlockConfig, num_taps: int) -> WeightTable:
    """Return names and shapes of the weights of a drafter with ``num_taps`` taps."""
    layer = config.layer
    hidden = layer.hidden_size
    table = WeightTable("SpecBlock")
    table.needed = {
        "input_layer.condition_norm.weight": (hidden,),
        "input_layer.token_norm.weight": (hidden,),
        "input_layer.position_queries.weight": (config.num_slots, hidden),
        "input_layer.query_norm.weight": (hidden,),
        "input_layer.fuse.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "rank_head.0.weight": (RANK_HIDDEN, hidden + RANK_FEATURES),
        "rank_head.2.weight": (NUM_CLASSES, RANK_HIDDEN),
    }
    table.optional = {"input_layer.embed_tokens.weight": (layer.vocab_size, hidden)}
    table.add_taps("input_layer.condition_proj.weight", num_taps, config)
    table.add_id_maps(config)
    for i in range(layer.num_hidden_layers):
        table.add_layer(layer, i, hidden, is_plain=True)
        if i > 0:
            table.needed[f"shift_proj.{i - 1}.weight"] = (hidden, 2 * hidden)
    return table
