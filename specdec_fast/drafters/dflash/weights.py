"""The weights of a DFlash or DSpark checkpoint: their names and shapes."""

from __future__ import annotations

from torch import Tensor

from specdec_fast.drafters.dflash.config import DFlashConfig
from specdec_fast.drafters.eagle3.weights import Shapes, expect_shapes, layer_shapes

_NORMS = ("q_norm", "k_norm")


def check_weights(config: DFlashConfig, num_taps: int, weights: dict[str, Tensor]) -> None:
    """Check names and shapes.

    Args:
        config: the checkpoint's configuration.
        num_taps: number of taps that ``fc`` takes side by side.
        weights: from ``read_weights``.

    Raises:
        ConfigError: a weight is missing, has another shape, or belongs to something that is not served.

    """
    kind = "DSpark" if config.markov_rank else "DFlash"
    hint = {"fc.weight": f" ({num_taps} taps of {config.target_hidden_size})"}
    expect_shapes(config.folder, kind, weights, _shapes(config, num_taps), hint)


def _shapes(config: DFlashConfig, num_taps: int) -> tuple[Shapes, Shapes]:
    """Return the shapes of the weights that must exist, and of those that may."""
    layer, hidden, vocab_size = config.layer, config.layer.hidden_size, config.layer.vocab_size
    needed: Shapes = {
        "fc.weight": (hidden, num_taps * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        **_heads(config),
    }
    optional: Shapes = {"embed_tokens.weight": (vocab_size, hidden), "t2d": (vocab_size,)}
    of_vocabulary: Shapes = {"lm_head.weight": (config.draft_vocab_size, hidden), "d2t": (config.draft_vocab_size,)}
    if config.draft_vocab_size == vocab_size:
        optional |= of_vocabulary
    else:  # the target's output layer has other rows
        needed |= of_vocabulary
    for i in range(layer.num_hidden_layers):
        own, allowed = layer_shapes(layer, i, hidden)
        needed |= own | {f"layers.{i}.self_attn.{name}.weight": (layer.head_dim,) for name in _NORMS}
        optional |= {name: shape for name, shape in allowed.items() if name not in needed}
    if config.confidence_with_markov is not None:
        optional["confidence_head.proj.bias"] = (1,)
    return needed, optional


def _heads(config: DFlashConfig) -> Shapes:
    """Return the shapes of the Markov head and the confidence head."""
    hidden, rank = config.layer.hidden_size, config.markov_rank
    shapes: Shapes = {}
    if rank:
        shapes["markov_head.markov_w1.weight"] = (config.layer.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
        inputs = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, hidden + 2 * rank)}
        if config.markov_head_type in inputs:
            name, size, width = inputs[config.markov_head_type]
            shapes |= {f"markov_head.{name}.weight": (size, width), f"markov_head.{name}.bias": (size,)}
    if config.confidence_with_markov is not None:
        shapes["confidence_head.proj.weight"] = (1, hidden + (rank if config.confidence_with_markov else 0))
    return shapes
