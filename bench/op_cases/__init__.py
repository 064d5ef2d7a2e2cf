"""The arguments on which tests and benchmarks run every op, by its name: one file per op.

They are here, not in tests/, because ``make gpu-check`` compares every case on a GPU, and bench/ imports no tests.
"""

from importlib import import_module

from bench.op_cases.case import Case, OpCases, with_tensors
from specdec_fast.ops import all_ops

__all__ = ["OP_CASES", "Case", "OpCases", "with_tensors"]

OP_CASES: dict[str, OpCases] = {
    name: import_module(f"bench.op_cases.{name.rstrip('_')}").OP_CASES for name in all_ops()
}
