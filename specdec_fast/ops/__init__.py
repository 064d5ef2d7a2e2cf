"""Ops: declared once, implemented per backend; see :mod:`specdec_fast.ops.registry`."""

from specdec_fast.ops.registry import AUTO, BACKENDS, Op, Ops, all_ops, availability, resolve, resolve_all
from specdec_fast.ops.sampling import INVALID_TOKEN

__all__ = ["AUTO", "BACKENDS", "INVALID_TOKEN", "Op", "Ops", "all_ops", "availability", "resolve", "resolve_all"]
