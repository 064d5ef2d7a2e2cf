"""Programs of launches under test: their plans, one program per model in Triton's interpreter, and their kernels."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from tempfile import TemporaryDirectory

import torch

from bench.aot import Resources, measure, table
from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.kv_cache.cache_rules import CacheRules
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import resolve
from specdec_fast.program import compile_forward
from specdec_fast.program.plan.ir import Plan
from specdec_fast.program.triton.executor import TritonProgram, dtypes_of, kernels_of, launch_of
from specdec_fast.program.triton.generated import compiled
from specdec_fast.program.triton.row_kernel import OF_BATCH, RowKernel
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.triton_kernels.variant import TYPE_NAMES, Variant
from support.experts import CONFIGS as EXPERTS
from support.experts import mixture_of, tiny_mixture
from support.hybrid_programs import tiny_hybrid
from support.models import CONFIGS, tiny_model
from support.programs import CPU, NO_LAYERS

WIDE = {  # the sizes of a model of 8 billion parameters; one layer, because the others have the same kernels
    "hidden_size": 4096, "n_embd": 4096, "intermediate_size": 14_336, "head_dim": 128, "num_hidden_layers": 1,
    "n_layer": 1, "num_attention_heads": 32, "n_head": 32, "num_key_value_heads": 8,
}  # fmt: skip


def plan_of(model: torch.nn.Module) -> Plan:
    """Return the plan that the C++ executor and the other one run."""
    ragged = RaggedModel(model, resolve(CPU))
    assert ragged.program is not None, ragged.why_no_program
    return ragged.program._plan


def interpreted(model: torch.nn.Module) -> RaggedModel:
    """Return a model whose forwards are launched in the interpreter, as a GPU would launch them."""
    ragged = RaggedModel(model, resolve(CPU))
    ragged.use_programs(None, TritonProgram(plan_of(model), resolve(CPU, "triton")))
    return ragged


def launched(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of token ids that runs a model without layers, as ``compiled`` does, in the interpreter."""
    plan = compile_forward(model, model, NO_LAYERS, resolve(CPU), CacheRules())
    program = TritonProgram(plan, resolve(CPU, "triton"))

    def run(token_ids: torch.Tensor) -> torch.Tensor:
        pool = PagePool(NO_LAYERS, 256, 16)
        pool.add("a")
        return program(lay_out(pool, [Rows("a", 0, len(token_ids))], token_ids), pool)

    return run


def variant_of(plan: Plan, kernel: RowKernel, name: str) -> Variant:
    """Return the compilation that a launch of the kernel requests."""
    dtypes, signature = dtypes_of(plan), {}
    for i, tensor in enumerate(kernel.tensors):
        if isinstance(tensor, str):
            batch = "*i32" if tensor == "slot_mapping" else "*i64"
            kind = batch if tensor in OF_BATCH else f"*{TYPE_NAMES[plan.dtype]}"
        else:
            kind = f"*{TYPE_NAMES[dtypes[tensor] if isinstance(tensor, int) else tensor.dtype]}"
        signature[f"p{i}"] = kind
    aligned = tuple(f"p{i}" for i, tensor in enumerate(kernel.tensors) if tensor not in list(OF_BATCH))
    variant = launch_of(kernel).variant(name, compiled(kernel.source), signature, aligned)
    return replace(variant, fuses=False)


def compiled_for(size: str, architecture: str, targets: Sequence[str]) -> list[Resources]:
    """Compile every kernel of an architecture, without Triton's cache; ``size`` is one of ``MAKERS``."""
    make, dtype = MAKERS[size]
    plan = plan_of(make(architecture).to(dtype))
    kernels = [launch[1] for launch in kernels_of(plan) if isinstance(launch, tuple)]
    distinct = {kernel.source: kernel for kernel in kernels}.values()
    name = f"{size}_{architecture}"
    variants = [variant_of(plan, kernel, f"{name}_{i}") for i, kernel in enumerate(distinct)]
    with TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        return [measure(variant.name, variant, target, False) for variant in variants for target in targets]


def wide_model(architecture: str) -> torch.nn.Module:
    """Build one layer of an architecture with the sizes of a large model, and zeros for weights."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(CONFIGS[architecture])
    for name, size in WIDE.items():
        if hasattr(config, name):
            setattr(config, name, size)
    with torch.device("cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def many_experts(name: str) -> torch.nn.Module:
    """Build one layer of "qwen3-moe" with the router of Qwen3-30B-A3B, or of "deepseek-v3" with its own."""
    config = EXPERTS[name]()
    sizes = {"hidden_size": 2048, "num_experts_per_tok": 8, "num_hidden_layers": 1}
    if name == "qwen3-moe":
        sizes |= {"num_experts": 128}
    else:
        sizes |= {"n_routed_experts": 256, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 0}
    for key, value in sizes.items():
        setattr(config, key, value)
    return mixture_of(config)


MAKERS = {
    "tiny": (tiny_model, torch.bfloat16),
    "wide": (wide_model, torch.bfloat16),
    "mixture": (tiny_mixture, torch.float32),  # in bf16, rounding alone makes some routers choose other experts
    "experts": (many_experts, torch.bfloat16),
    "hybrid": (tiny_hybrid, torch.bfloat16),
}


def main() -> None:
    """Print the resources of the kernels of some models, ``tiny.llama`` for example, for some targets, as JSON."""
    chosen_targets, *models = sys.argv[1:]
    rows = [row for model in models for row in compiled_for(*model.split(".", 1), chosen_targets.split(","))]
    print(table(rows, chosen_targets.split(",")), file=sys.stderr)
    print(json.dumps([row.row for row in rows]))
