"""What the machine code of a compiled kernel needs, and which instructions it has."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton

_BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# SASS. 16-byte loads from global memory, into registers, into shared memory, or by the copy engine (TMA); products on
# tensor cores of Ampere (HMMA), Hopper (HGMMA) and Blackwell (UTC..MMA); accesses to a thread's own memory.
_NVIDIA = {
    "wide_loads": r"\bLDG(?:STS)?\.[\w.]*\b128\b|\bUTMALDG\b|\bUBLKCP\b",
    "tensor_instructions": r"\b(?:UTC)?[HIQODG]{1,2}MMA\b",
    "local_accesses": r"\b(?:LDL|STL)\b",
}
_AMD = {
    "wide_loads": r"\b(?:global|buffer)_load_(?:lds_)?dwordx4\b",
    "tensor_instructions": r"\bv_s?mfmac?_\w+",
    "local_accesses": r"\bscratch_(?:load|store)_\w+",
}


@dataclass(frozen=True)
class Figures:
    """The figures of one compilation; None where the instructions were not read.

    Attributes:
        registers: registers per thread (AMD: vector registers).
        shared_bytes: shared memory per program.
        spill_bytes: stack and local memory per thread (AMD: four bytes for each spilled register).
        barriers: places where the threads of a program wait for each other.
        widest_access: largest number of bytes that one thread loads or stores at once.
        wide_loads: instructions that load 16 bytes or more per thread from global memory.
        tensor_instructions: products on tensor cores.
        local_accesses: loads from and stores to a thread's own memory, which are slow.

    """

    registers: int = 0
    shared_bytes: int = 0
    spill_bytes: int = 0
    barriers: int = 0
    widest_access: int = 0
    wide_loads: int | None = None
    tensor_instructions: int | None = None
    local_accesses: int | None = None


# A figure that is larger, or for the others smaller, than before makes a kernel worse.
_SHOULD_NOT_GROW = ("registers", "shared_bytes", "spill_bytes", "local_accesses")
_SHOULD_NOT_SHRINK = ("widest_access", "wide_loads", "tensor_instructions")


def worse(now: Figures, before: dict[str, Any]) -> list[str]:
    """Return what got worse than ``before``, a row of an earlier report, in words.

    Figures that either of them lacks are not compared.
    """
    found = []
    for name, value in asdict(now).items():
        old = before.get(name)
        if value is None or old is None:
            continue
        if (name in _SHOULD_NOT_GROW and value > old) or (name in _SHOULD_NOT_SHRINK and value < old):
            found.append(f"{name} {old} -> {value}")
    return found


def figures_of(compiled: Any, backend: str, has_instructions: bool) -> Figures:
    """Read the figures of a compiled kernel.

    Args:
        compiled: the result of ``triton.compile``.
        backend: ``"cuda"`` or ``"hip"``.
        has_instructions: whether to count instructions; disassembling NVIDIA's code takes half a second.

    """
    shared = compiled.metadata.shared
    if backend == "cuda":
        assembly = compiled.asm["ptx"]
        registers, spilled, sass = _of_cubin(compiled.asm["cubin"], has_instructions)
        accesses = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", assembly)
        widest = max((int(count or 1) * int(bits) // 8 for count, bits in accesses), default=0)
        counts = _counts(_NVIDIA, sass) if has_instructions else {}
        return Figures(registers, shared, spilled, assembly.count("bar.sync"), widest, **counts)
    assembly = compiled.asm["amdgcn"]
    registers = _of_metadata(assembly, "vgpr_count")
    spilled = 4 * (_of_metadata(assembly, "vgpr_spill_count") + _of_metadata(assembly, "sgpr_spill_count"))
    accesses = re.findall(r"(?:global|buffer)_(?:load|store)_(?:dword(?:x(\d))?|\w+)", assembly)
    widest = max((4 * int(count or 1) for count in accesses), default=0)
    counts = _counts(_AMD, assembly) if has_instructions else {}
    return Figures(registers, shared, spilled, assembly.count("s_barrier"), widest, **counts)


def _counts(patterns: dict[str, str], code: str) -> dict[str, int]:
    return {name: len(re.findall(pattern, code)) for name, pattern in patterns.items()}


def _of_cubin(cubin: bytes, has_instructions: bool) -> tuple[int, int, str]:
    """Return registers, bytes of stack and local memory, and the disassembly or ``""``.

    Without arrays in the kernels, all stack and local memory is spills.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output("cuobjdump", "--dump-resource-usage", file.name)
        sass = _output("nvdisasm", "-c", "-ndf", file.name) if has_instructions else ""
    figures = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return figures["REG"], figures["STACK"] + figures["LOCAL"], sass


def _output(binary: str, *options: str) -> str:
    command = [str(_BINARIES / binary), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _of_metadata(assembly: str, name: str) -> int:
    """Read one entry of the kernel's metadata."""
    found = re.search(rf"^\s*\.{name}:\s*(\d+)", assembly, re.MULTILINE)
    if found is None:
        raise ValueError(f"the assembly has no .{name}")
    return int(found[1])
