"""The compilations that launchers request, as values, so that they can also be made ahead of time, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

# torch's element types, as written in a signature of Triton.
TYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel that a launcher may request."""

    name: str  # the name in the resource report; unique within its file
    kernel: Any  # the function decorated with triton.jit
    signature: dict[str, str]  # run-time argument to Triton type, such as "*bf16", "i32" or "i64"
    constexprs: dict[str, Any] = field(default_factory=dict)  # compile-time argument to value
    num_warps: int = 4  # warps per program
    num_stages: int = 2  # depth of the software pipeline
    # run-time arguments specialised as multiples of 16 (addresses of tensors, most strides), as Triton's just-in-time
    # compiler does
    divisible: tuple[str, ...] = ()
    # registers per thread on NVIDIA; None leaves the number to the assembler, which may spill for more occupancy
    max_registers: int | None = None
    # rows and columns of what an instruction of AMD multiplies; None: the compiler chooses
    instruction_side: int | None = None
    elsewhere: Variant | None = None  # what is compiled on devices other than Hopper, if that differs
    fuses: bool = True  # whether a product and a sum may become one operation, which rounds once


@dataclass(frozen=True)
class Launch:
    """The compile-time choices of one launch. A launcher and ``variants()`` use the same function to make them."""

    constexprs: dict[str, Any]  # compile-time argument to value
    num_warps: int = 4  # warps per program
    num_stages: int = 2  # depth of the software pipeline
    # registers per thread on NVIDIA; None leaves the number to the assembler, which may spill for more occupancy
    max_registers: int | None = None
    # rows and columns of what an instruction of AMD multiplies; None: the compiler chooses
    instruction_side: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of a launch, ``kernel[grid](..., **options)``."""
        options = {**self.constexprs, "num_warps": self.num_warps, "num_stages": self.num_stages}
        is_amd = torch.version.hip is not None
        if self.max_registers is not None and not is_amd:
            options["maxnreg"] = self.max_registers
        if self.instruction_side is not None and is_amd:
            options["matrix_instr_nonkdim"] = self.instruction_side
        if self.constexprs.get("OVERLAPS"):
            options["launch_pdl"] = True
        return options

    def variant(self, name: str, kernel: Any, signature: dict[str, str], divisible: tuple[str, ...]) -> Variant:
        """Return the compilation that this launch requests."""
        shape = (self.num_warps, self.num_stages)
        limits = (self.max_registers, self.instruction_side)
        return Variant(name, kernel, signature, self.constexprs, *shape, divisible, *limits)
