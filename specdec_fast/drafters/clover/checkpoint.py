"""The checkpoint of Clover heads: ``config.json`` and ``model.safetensors``.

No checkpoint of the paper (Xiao et al., arXiv 2405.00263) was found, so the format is this project's; its names are
near those of Medusa's and EAGLE's files. ``config.json`` has the sizes of the augmenting block, as that of a Llama
model would, and further entries: ``model_type`` is ``"clover"``, ``clover_num_heads``, ``clover_num_layers`` (residual
blocks of each head), and ``clover_choices``, the tree. Weights: those of a Llama layer under ``augmenting_block.``; and
of head i, ``heads.i.norm.weight [H]``, ``heads.i.{q,k,v}_proj.weight [H, H]``, and
``heads.i.blocks.j.linear.weight [H, H]`` with ``.bias [H]``. The output layer is the target's, and is not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specdec_fast.drafters.shared.checkpoint.settings import MOST_PARTS, LayerConfig, Settings
from specdec_fast.drafters.shared.checkpoint.weights import WeightTable
from specdec_fast.trees.static import checked_choices

MODEL_TYPE = "clover"
PREFIXES = {"augmenting_block.": "layers.0."}  # of names in files, and what they are here
_KIND = "a Clover drafter"


@dataclass(frozen=True)
class CloverConfig(LayerConfig):
    """What ``config.json`` says of a drafter; ``layer`` is that of its augmenting block."""

    num_heads: int  # head i is for the token i + 1 positions behind the newest one
    num_blocks: int  # residual blocks of each head
    choices: tuple[tuple[int, ...], ...] | None  # the tree, as rank paths; None if the file names none


def is_clover(folder: Path) -> bool:
    """Return whether a folder has the ``config.json`` of Clover heads."""
    return bool(Settings.read_if_any(folder).get("model_type") == MODEL_TYPE)


def read_config(folder: Path) -> CloverConfig:
    """Read a checkpoint's ``config.json``.

    Raises:
        ConfigError: there is none, or it has settings that are not served.
    """
    settings = Settings.read(folder, _KIND)
    layer = settings.layer()
    settings.expect_no_windows(layer.num_hidden_layers)
    choices = settings.get("clover_choices")
    return CloverConfig(
        folder=folder,
        layer=layer,
        sliding_windows=(None,),
        draft_vocab_size=layer.vocab_size,
        target_hidden_size=layer.hidden_size,
        num_heads=settings.positive_integer("clover_num_heads", 3, MOST_PARTS),
        num_blocks=settings.positive_integer("clover_num_layers", 1, MOST_PARTS),
        choices=None if choices is None else checked_choices(choices, f"clover_choices of {str(folder)!r}"),
    )


def weight_table(config: CloverConfig) -> WeightTable:
    """Return names and shapes of the weights."""
    hidden = config.layer.hidden_size
    table = WeightTable("Clover")
    table.add_layer(config.layer, 0, hidden)
    for head in range(config.num_heads):
        table.needed[f"heads.{head}.norm.weight"] = (hidden,)
        for name in ("q_proj", "k_proj", "v_proj"):
            table.needed[f"heads.{head}.{name}.weight"] = (hidden, hidden)
        for block in range(config.num_blocks):
            table.needed[f"heads.{head}.blocks.{block}.linear.weight"] = (hidden, hidden)
            table.needed[f"heads.{head}.blocks.{block}.linear.bias"] = (hidden,)
    return table
