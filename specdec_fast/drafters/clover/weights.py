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

from torch import Tensor

from specdec_fast.drafters.eagle3.config import LayerConfig, expect_no_windows, layer_config
from specdec_fast.drafters.eagle3.weights import Shapes, expect_shapes, layer_shapes
from specdec_fast.drafters.shared.checkpoints import read_tensors
from specdec_fast.drafters.shared.config_values import MOST_PARTS, positive_integer, read_json
from specdec_fast.errors import ConfigError
from specdec_fast.speculation_length.choice_tree import checked_choices

WEIGHTS_FILE = "model.safetensors"
MODEL_TYPE = "clover"
_BLOCK = "augmenting_block."
_KIND = "a Clover drafter"


@dataclass(frozen=True)
class CloverConfig(LayerConfig):
    """What ``config.json`` says of a drafter; ``layer`` is that of its augmenting block.

    Attributes:
        num_heads: number of heads; head i is for the token i + 1 positions behind the newest one.
        num_blocks: residual blocks of each head.
        choices: the tree, as rank paths; None if the file names none.

    """

    num_heads: int
    num_blocks: int
    choices: tuple[tuple[int, ...], ...] | None


def is_clover(folder: Path) -> bool:
    """Return whether a folder has the ``config.json`` of Clover heads."""
    try:
        return read_json(folder, _KIND).get("model_type") == MODEL_TYPE
    except ConfigError:
        return False


def read_clover(folder: Path) -> tuple[CloverConfig, dict[str, Tensor]]:
    """Read a checkpoint.

    Returns:
        Its configuration, and its weights by name, those of the augmenting block under ``layers.0.``.

    Raises:
        ConfigError: a file is missing or damaged, or a setting or weight is missing, unknown or of another shape.

    """
    found = read_json(folder, _KIND)
    layer = layer_config(folder, found)
    expect_no_windows(folder, found, layer.num_hidden_layers)
    choices = found.get("clover_choices")
    config = CloverConfig(
        folder=folder,
        layer=layer,
        sliding_windows=(None,),
        draft_vocab_size=layer.vocab_size,
        target_hidden_size=layer.hidden_size,
        tap_layers=None,
        verifiers=(),
        num_heads=positive_integer(folder, found, "clover_num_heads", 3, MOST_PARTS),
        num_blocks=positive_integer(folder, found, "clover_num_layers", 1, MOST_PARTS),
        choices=None if choices is None else checked_choices(choices, f"clover_choices of {str(folder)!r}"),
    )
    weights = {
        f"layers.0.{name.removeprefix(_BLOCK)}" if name.startswith(_BLOCK) else name: weight
        for name, weight in read_tensors(folder / WEIGHTS_FILE).items()
    }
    needed, optional = layer_shapes(layer, 0, layer.hidden_size)
    expect_shapes(folder, "Clover", weights, (needed | _head_shapes(config), optional), {})
    return config, weights


def _head_shapes(config: CloverConfig) -> Shapes:
    shapes: Shapes = {}
    hidden = config.layer.hidden_size
    for head in range(config.num_heads):
        shapes[f"heads.{head}.norm.weight"] = (hidden,)
        shapes |= {f"heads.{head}.{name}_proj.weight": (hidden, hidden) for name in "qkv"}
        for block in range(config.num_blocks):
            shapes[f"heads.{head}.blocks.{block}.linear.weight"] = (hidden, hidden)
            shapes[f"heads.{head}.blocks.{block}.linear.bias"] = (hidden,)
    return shapes
