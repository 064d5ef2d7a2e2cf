"""Compile every Triton kernel to machine code, without a GPU, and report the resources that each needs.

    python -m bench.aot [--targets sm_80,sm_90,sm_100,gfx942] [--kernels REGEX] [--jobs N] [--json FILE]

Exits 1 if a kernel does not compile or spills registers on an NVIDIA target. Registers are per thread, shared memory in
bytes per program, spills in bytes per thread; on AMD registers are vector registers, and spilled registers count four
bytes each. The report says nothing about values, bandwidth or time, which need a run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.common.report import names, write_json
from specdec_fast.triton_kernels import kernel_modules
from specdec_fast.triton_kernels.variant import Variant

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Resources:
    """The resources of one compilation of a kernel.

    Attributes:
        kernel: file and variant, ``compact_kv.bf16_page16_entry1024``.
        target: the GPU for which it was compiled.
        registers: registers per thread.
        shared_bytes: shared memory per program.
        spill_bytes: stack and local memory per thread.
        barriers: number of places where the threads of a program wait for each other.
        widest_access: largest number of bytes that one thread loads or stores at once.
        error: the reason why it did not compile, and then the figures are 0; else None.

    """

    kernel: str
    target: str
    registers: int = 0
    shared_bytes: int = 0
    spill_bytes: int = 0
    barriers: int = 0
    widest_access: int = 0
    error: str | None = None

    @property
    def bad(self) -> bool:
        """Whether it makes the run fail. A spill on AMD is only reported, because no file is tuned for AMD."""
        return self.error is not None or (self.spill_bytes > 0 and TARGETS[self.target].backend == "cuda")


def compile_variant(variant: Variant, target: GPUTarget) -> Any:
    """Compile a variant as Triton's just-in-time compiler would for a launch."""
    arguments = variant.kernel.arg_names
    source = ASTSource(
        fn=variant.kernel,
        signature={name: variant.signature.get(name, "constexpr") for name in arguments},
        constexprs=variant.constexprs,
        attrs={(arguments.index(name),): [["tt.divisibility", 16]] for name in variant.divisible},
    )
    options: dict[str, Any] = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    if variant.max_registers is not None and target.backend == "cuda":
        options["maxnreg"] = variant.max_registers
    return triton.compile(source, target=target, options=options)


def measure(kernel: str, variant: Variant, target: str) -> Resources:
    """Compile one variant for one target and read its figures from the machine code."""
    try:
        compiled = compile_variant(variant, TARGETS[target])
    except Exception as error:  # an error of the compiler is this row's result
        return Resources(kernel, target, error=f"{type(error).__name__}: {error}")
    shared = compiled.metadata.shared
    if TARGETS[target].backend == "cuda":
        assembly = compiled.asm["ptx"]
        registers, spilled = _nvidia_figures(compiled.asm["cubin"])
        accesses = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", assembly)
        widest = max((int(count or 1) * int(bits) // 8 for count, bits in accesses), default=0)
        return Resources(kernel, target, registers, shared, spilled, assembly.count("bar.sync"), widest)
    assembly = compiled.asm["amdgcn"]
    registers = _amd_figure(assembly, "vgpr_count")
    spilled = 4 * (_amd_figure(assembly, "vgpr_spill_count") + _amd_figure(assembly, "sgpr_spill_count"))
    accesses = re.findall(r"(?:global|buffer)_(?:load|store)_(?:dword(?:x(\d))?|\w+)", assembly)
    widest = max((4 * int(count or 1) for count in accesses), default=0)
    return Resources(kernel, target, registers, shared, spilled, assembly.count("s_barrier"), widest)


def _nvidia_figures(cubin: bytes) -> tuple[int, int]:
    """Return registers, and bytes of stack and local memory; without arrays in the kernels, all of it is spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    figures = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return figures["REG"], figures["STACK"] + figures["LOCAL"]


def _amd_figure(assembly: str, name: str) -> int:
    """Read one entry of the kernel's metadata."""
    found = re.search(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)
    if found is None:
        raise ValueError(f"the assembly has no .{name}")
    return int(found[1])


def variants_of(modules: list[ModuleType]) -> Iterator[tuple[str, Variant]]:
    """Yield every variant with its name in the report."""
    for module in modules:
        for variant in module.variants():
            yield f"{module.__name__.rpartition('.')[2]}.{variant.name}", variant


def _modules(others: list[str]) -> list[ModuleType]:
    return [importlib.import_module(name) for name in others] if others else kernel_modules()


def _measure_everywhere(others: list[str], targets: list[str], kernel: str) -> list[Resources]:
    """Measure one kernel on all targets. It is found by name, because a kernel cannot be sent to another process."""
    variant = dict(variants_of(_modules(others)))[kernel]
    return [measure(kernel, variant, target) for target in targets]


def measure_all(others: list[str], targets: list[str], jobs: int, chosen: str = "") -> list[Resources]:
    """Compile the variants that match ``chosen`` for all targets in ``jobs`` processes, without Triton's cache."""
    kernels = [kernel for kernel, _ in variants_of(_modules(others))]
    if len(kernels) != len(set(kernels)):
        raise ValueError(f"two variants share a name: {sorted(kernels)}")
    kernels = [kernel for kernel in kernels if re.match(chosen, kernel)]
    one = partial(_measure_everywhere, others, targets)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # workers inherit it
        if jobs == 1:
            rows = list(map(one, kernels))
        else:
            with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
                rows = list(pool.map(one, kernels))
    return [resources for row in rows for resources in row]


def table(rows: list[Resources], targets: list[str]) -> str:
    """Return one line per kernel, and per target: registers, shared bytes, spilled bytes."""
    by_kernel: dict[str, dict[str, Resources]] = {}
    for row in rows:
        by_kernel.setdefault(row.kernel, {})[row.target] = row
    width = max(map(len, by_kernel), default=0)
    lines = [f"{'registers / shared / spilled':{width}}" + "".join(f"{target:>17}" for target in targets)]
    for kernel, cells in by_kernel.items():
        lines.append(f"{kernel:{width}}" + "".join(f"{_cell(cells[target]):>17}" for target in targets))
    return "\n".join(lines)


def _cell(row: Resources) -> str:
    return "failed" if row.error else f"{row.registers} / {row.shared_bytes} / {row.spill_bytes}"


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels without a GPU; report their resources.")
    parser.add_argument("--targets", type=names, default=list(TARGETS), help=f"of {','.join(TARGETS)} (default: all)")
    parser.add_argument("--kernels", default="", metavar="REGEX", help="only variants whose names begin like this")
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
    rows = measure_all(args.modules, args.targets, args.jobs, args.kernels)
    print(table(rows, args.targets))
    for row in rows:
        if row.error:
            print(f"\n{row.kernel} for {row.target} does not compile: {row.error}", file=sys.stderr)
    bad = sum(row.bad for row in rows)
    result = {
        "bench": "aot",
        "triton": triton.__version__,
        "seconds": round(perf_counter() - began, 1),
        "targets": args.targets,
        "failures": bad,
        "kernels": [asdict(row) for row in rows],
    }
    write_json(result, args.json)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
