"""Compile every Triton kernel to machine code, without a GPU, and report the resources that each needs.

    python -m bench.aot [--targets sm_80,sm_90,sm_100,gfx942] [--kernels REGEX] [--jobs N] [--json FILE]
        [--instructions REGEX] [--baseline FILE]

Exits 1 if a kernel does not compile or spills registers on an NVIDIA target. With a baseline, the result of an earlier
run with the same Triton, it also exits 1 if a kernel got worse: more registers, shared memory or spills, narrower or
fewer 16-byte loads, fewer products on tensor cores, more accesses to a thread's own memory. Registers and spilled bytes
are per thread, shared memory is per program. The report says nothing about values, bandwidth or time, which need a run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.aot_.machine_code import Figures, figures_of, worse
from bench.common.report import names, write_json
from specdec_fast.errors import ConfigError
from specdec_fast.triton_kernels import kernel_modules, quantized_linear
from specdec_fast.triton_kernels.overlap import FIRST_ARCH
from specdec_fast.triton_kernels.variant import Variant

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_HEADER = "registers / shared bytes / spilled bytes / 16-byte loads / tensor-core products / accesses to local memory"
_CELL = 38  # characters of a figure's column


@dataclass(frozen=True)
class Resources:
    """One compilation of a kernel.

    Attributes:
        kernel: file and variant, ``compact_kv.bf16_page16_entry1024``.
        target: the GPU for which it was compiled.
        figures: what its machine code needs.
        error: the reason why it did not compile, and then the figures are 0; else None.
        got_worse: figures that are worse than those of the baseline.

    """

    kernel: str
    target: str
    figures: Figures = field(default_factory=Figures)
    error: str | None = None
    got_worse: tuple[str, ...] = ()

    @property
    def bad(self) -> bool:
        """Whether it makes the run fail. A spill on AMD is only reported, because no file is tuned for AMD."""
        spills = self.figures.spill_bytes > 0 and TARGETS[self.target].backend == "cuda"
        return self.error is not None or spills or bool(self.got_worse)

    @property
    def row(self) -> dict[str, Any]:
        """The row of the report."""
        return {"kernel": self.kernel, "target": self.target, **asdict(self.figures), "error": self.error}


def compile_variant(variant: Variant, target: GPUTarget) -> Any:
    """Compile a variant as Triton's just-in-time compiler would for a launch."""
    if variant.elsewhere is not None and target != TARGETS["sm_90"]:
        variant = variant.elsewhere
    arguments = variant.kernel.arg_names
    source = ASTSource(
        fn=variant.kernel,
        signature={name: variant.signature.get(name, "constexpr") for name in arguments},
        constexprs=_constexprs(variant, target),
        attrs={(arguments.index(name),): [["tt.divisibility", 16]] for name in variant.divisible},
    )
    options: dict[str, Any] = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    if not variant.fuses:
        options["enable_fp_fusion"] = False
    if variant.max_registers is not None and target.backend == "cuda":
        options["maxnreg"] = variant.max_registers
    if variant.instruction_side is not None and target.backend == "hip":
        options["matrix_instr_nonkdim"] = variant.instruction_side
    return triton.compile(source, target=target, options=options)


def _constexprs(variant: Variant, target: GPUTarget) -> dict[str, Any]:
    """Return the compile-time arguments, with those that a launch takes from the device.

    Kernels overlap where the target can do it, as ``overlap.overlaps`` says.
    """
    overlaps = target.backend == "cuda" and target.arch >= FIRST_ARCH
    is_nvidia = target.backend == "cuda"
    of_device = {"OVERLAPS": overlaps, "HAS_PERMUTE": is_nvidia}
    if not is_nvidia:
        of_device["STAGES"] = quantized_linear.STAGES_OF_AMD
    return variant.constexprs | {name: value for name, value in of_device.items() if name in variant.constexprs}


def measure(kernel: str, variant: Variant, target: str, has_instructions: bool) -> Resources:
    """Compile one variant for one target and read its figures from the machine code."""
    try:
        compiled = compile_variant(variant, TARGETS[target])
    except Exception as error:  # an error of the compiler is this row's result
        return Resources(kernel, target, error=f"{type(error).__name__}: {error}")
    return Resources(kernel, target, figures_of(compiled, TARGETS[target].backend, has_instructions))


def variants_of(modules: list[ModuleType]) -> Iterator[tuple[str, Variant]]:
    """Yield every variant with its name in the report."""
    for module in modules:
        for variant in module.variants():
            yield f"{module.__name__.rpartition('.')[2]}.{variant.name}", variant


def modules_named(others: Sequence[str] = ()) -> list[ModuleType]:
    """Return modules with ``variants()``: the package's, unless others are named."""
    return [importlib.import_module(name) for name in others] if others else kernel_modules()


def _measure_everywhere(others: list[str], targets: list[str], instructions: str, kernel: str) -> list[Resources]:
    """Measure one kernel on all targets. It is found by name, because a kernel cannot be sent to another process."""
    variant = dict(variants_of(modules_named(others)))[kernel]
    has_instructions = re.match(instructions, kernel) is not None
    return [measure(kernel, variant, target, has_instructions) for target in targets]


def measure_all(args: argparse.Namespace) -> list[Resources]:
    """Compile the chosen variants for the chosen targets in several processes, without Triton's cache."""
    kernels = [kernel for kernel, _ in variants_of(modules_named(args.modules))]
    if len(kernels) != len(set(kernels)):
        raise ValueError(f"two variants share a name: {sorted(kernels)}")
    kernels = [kernel for kernel in kernels if re.match(args.kernels, kernel)]
    one = partial(_measure_everywhere, args.modules, args.targets, args.instructions)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # workers inherit it
        if args.jobs == 1:
            rows = list(map(one, kernels))
        else:
            with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
                rows = list(pool.map(one, kernels))
    return [resources for row in rows for resources in row]


def compared(rows: list[Resources], baseline: dict[str, Any]) -> list[Resources]:
    """Return the rows with what got worse than in an earlier report; kernels that it lacks are as they are.

    Raises:
        ConfigError: the report is of another Triton, whose compiler makes other code.

    """
    if baseline["triton"] != triton.__version__:
        raise ConfigError(f"the baseline is of Triton {baseline['triton']}; this is {triton.__version__}.")
    before = {(row["kernel"], row["target"]): row for row in baseline["kernels"]}
    return [replace(row, got_worse=tuple(worse(row.figures, before.get((row.kernel, row.target), {})))) for row in rows]


def table(rows: list[Resources], targets: list[str]) -> str:
    """Return one line per kernel, and per target its figures: those of ``_cell``."""
    by_kernel: dict[str, dict[str, Resources]] = {}
    for row in rows:
        by_kernel.setdefault(row.kernel, {})[row.target] = row
    width = max(map(len, by_kernel), default=0)
    lines = [_HEADER, f"{'':{width}}" + "".join(f"{target:>{_CELL}}" for target in targets)]
    for kernel, cells in by_kernel.items():
        lines.append(f"{kernel:{width}}" + "".join(f"{_cell(cells[target]):>{_CELL}}" for target in targets))
    return "\n".join(lines)


def _cell(row: Resources) -> str:
    f = row.figures
    counts = "" if f.wide_loads is None else f" / {f.wide_loads} / {f.tensor_instructions} / {f.local_accesses}"
    return "failed" if row.error else f"{f.registers} / {f.shared_bytes} / {f.spill_bytes}{counts}"


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels without a GPU; report their resources.")
    parser.add_argument("--targets", type=names, default=list(TARGETS), help=f"of {','.join(TARGETS)} (default: all)")
    parser.add_argument("--kernels", default="", metavar="REGEX", help="only variants whose names begin like this")
    parser.add_argument("--instructions", default="", metavar="REGEX", help="count the instructions of these variants")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="a result; a kernel that got worse fails")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--modules", type=names, default=[], help="modules with variants() instead of the package's")
    args = parser.parse_args()
    unknown = [target for target in args.targets if target not in TARGETS]
    if unknown:
        parser.error(f"unknown target {', '.join(unknown)}; known are {', '.join(TARGETS)}")
    return args


def main() -> int:
    """Compile, print the table, end with one JSON line."""
    args = _parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET=1 replaces the compiler by an interpreter; unset it.")
    began = perf_counter()
    rows = measure_all(args)
    if args.baseline:
        rows = compared(rows, json.loads(args.baseline.read_text()))
    print(table(rows, args.targets))
    for row in rows:
        if row.error:
            print(f"\n{row.kernel} for {row.target} does not compile: {row.error}", file=sys.stderr)
        if row.got_worse:
            print(f"\n{row.kernel} for {row.target} got worse: {', '.join(row.got_worse)}", file=sys.stderr)
    bad = sum(row.bad for row in rows)
    result = {
        "bench": "aot",
        "triton": triton.__version__,
        "seconds": round(perf_counter() - began, 1),
        "targets": args.targets,
        "failures": bad,
        "got_worse": {f"{row.kernel} for {row.target}": row.got_worse for row in rows if row.got_worse},
        "kernels": [row.row for row in rows],
    }
    write_json(result, args.json)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
