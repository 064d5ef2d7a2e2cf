"""The forward program of a published shape, without its weights' values and without most of its layers.

All layers of these shapes are alike, so two are recorded: everything between the first and the second attention is one
layer. Widths are the real ones. Weights are memory that is reserved and not written; no value is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from bench.common.packed_formats import FORMATS, FP8, unwritten
from bench.common.pairs import ModelShape, config_of
from specdec_fast.errors import ConfigError
from specdec_fast.models.rounded_models import replace_weights, weights_to_round
from specdec_fast.ops import resolve
from specdec_fast.program import compile_forward
from specdec_fast.program.plan.ir import Attend, Instruction, Plan
from specdec_fast.quantization.rounding import ROUNDINGS
from specdec_fast.runner.hf_model import HFModel

_RECORDED_LAYERS = 2
_PROBE_TOKENS = 8
WEIGHTS = tuple(FORMATS)


@dataclass(frozen=True)
class Recorded:
    """A forward program of few layers, and the number of layers of the model.

    Attributes:
        plan: the program.
        num_recorded: layers of the program.
        num_layers: layers of the model.

    """

    plan: Plan
    num_recorded: int
    num_layers: int


@torch.inference_mode()
def record(shape: ModelShape, vocab_size: int, dtype: torch.dtype, weights: str | None = None) -> Recorded:
    """Record the forward program of a model of this shape.

    Args:
        shape, vocab_size, dtype: of the model.
        weights: a name of ``WEIGHTS``; None: all weights have ``dtype``.

    Raises:
        ConfigError: the name is unknown.
        NotLowerableError: the model does something that a program cannot express.

    """
    few = replace(shape, num_hidden_layers=min(_RECORDED_LAYERS, shape.num_hidden_layers))
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config_of(few, vocab_size), dtype=dtype).eval()
    if weights is not None:
        _quantize(model, weights)
    ops = resolve(torch.device("cpu"))
    hf = HFModel(model, ops, torch.arange(_PROBE_TOKENS) % vocab_size)
    with hf.hooked():
        plan = compile_forward(model, hf.call, hf.layout, ops, hf.rules)
    return Recorded(plan, few.num_hidden_layers, shape.num_hidden_layers)


def _quantize(model: PreTrainedModel, name: str) -> None:
    """Replace linears by quantised ones of the same shapes, as an engine does, or as a checkpoint in fp8 has them."""
    if name not in WEIGHTS:
        raise ConfigError(f"quantised weights {name!r} are unknown; known are {', '.join(WEIGHTS)}.")
    if name == FP8:
        output_layer = model.get_output_embeddings()
        chosen = [each for each in weights_to_round(model, "int8") if each.module is not output_layer]
        formats = [FORMATS[FP8]] * len(chosen)
    else:
        chosen = weights_to_round(model, name)  # the output layer may have a format of its own
        formats = [next(FORMATS[n] for n, known in ROUNDINGS.items() if known == each.rounding) for each in chosen]
    packed = {
        each.name: unwritten(each.module.in_features, each.module.out_features, like)
        for each, like in zip(chosen, formats, strict=True)
    }
    replace_weights(model, name, chosen, packed)


def layer_of(instructions: Sequence[Instruction]) -> tuple[int, int]:
    """Return begin and end of one whole layer: from the first attention to the second.

    In a program of a single layer both are the index of its attention.
    """
    found = [index for index, instruction in enumerate(instructions) if isinstance(instruction, Attend)]
    return found[0], found[-1]
