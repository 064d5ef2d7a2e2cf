"""The configuration of a SpecBlock checkpoint (Shi et al., arXiv 2605.07243)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specdec_fast.drafters.eagle3.config import Eagle3Config, expect_no_windows, layer_config
from specdec_fast.drafters.shared.config_values import MOST_PARTS, names, positive_integer, read_json
from specdec_fast.errors import ConfigError
from specdec_fast.speculation_length.choice_tree import MOST_NODES

_KIND = "a SpecBlock drafter"
_SLOTS = "diffspec_draft_token_num"  # the name that published configurations have
NUM_CLASSES, NUM_FEATURES = 4, 20  # of the rank head; ids whose logits it reads
_DEFAULT_SLOTS, _DEFAULT_NODES = 4, 16


@dataclass(frozen=True)
class SpecBlockConfig(Eagle3Config):
    """What ``config.json`` says of a drafter; layers, vocabulary and taps as for EAGLE-3.

    Attributes:
        num_slots: number of tokens that a block drafts.
        tree_nodes: the largest number of nodes of a tree.

    """

    num_slots: int = _DEFAULT_SLOTS
    tree_nodes: int = _DEFAULT_NODES


def is_specblock(folder: Path) -> bool:
    """Return whether a folder has the ``config.json`` of a SpecBlock drafter.

    Raises:
        ConfigError: ``architectures`` is no list of names.

    """
    try:
        found = read_json(folder, _KIND)
    except ConfigError:
        return False
    return _SLOTS in found or any("specblock" in name.lower() for name in names(folder, found, "architectures"))


def read_config(folder: Path) -> SpecBlockConfig:
    """Read a checkpoint's ``config.json``.

    Raises:
        ConfigError: there is none, or it has settings that are not served.

    """
    found = read_json(folder, _KIND)
    layer = layer_config(folder, {"num_hidden_layers": 2, **found})
    expect_no_windows(folder, found, layer.num_hidden_layers)
    tree_nodes = positive_integer(folder, found, "tree_nodes", _DEFAULT_NODES)
    if tree_nodes > MOST_NODES:
        raise ConfigError(f"{str(folder)!r}: tree_nodes is {tree_nodes}; expected at most {MOST_NODES}.")
    draft_vocab_size = positive_integer(folder, found, "draft_vocab_size", layer.vocab_size)
    taps = found.get("tap_layers")
    if taps is not None and not (isinstance(taps, list) and all(type(tap) is int for tap in taps)):
        raise ConfigError(f"{str(folder)!r}: tap_layers is {taps!r}; expected a list of integers.")
    if positive_integer(folder, found, "rank_classes", NUM_CLASSES) != NUM_CLASSES or draft_vocab_size < NUM_FEATURES:
        raise ConfigError(
            f"{str(folder)!r} has a rank head of {found.get('rank_classes', NUM_CLASSES)} classes over "
            f"{draft_vocab_size} ids; expected {NUM_CLASSES} classes, and {NUM_FEATURES} ids or more."
        )
    return SpecBlockConfig(
        folder=folder,
        layer=layer,
        sliding_windows=(None,) * layer.num_hidden_layers,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=positive_integer(folder, found, "target_hidden_size", layer.hidden_size),
        tap_layers=None if taps is None else tuple(taps),
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        verifiers=(),
        num_slots=positive_integer(folder, found, _SLOTS, _DEFAULT_SLOTS, MOST_PARTS),
        tree_nodes=tree_nodes,
    )
