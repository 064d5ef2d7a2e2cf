"""Ops: declared once, implemented per backend; see :mod:`specdec_fast.ops.registry`."""

from specdec_fast.ops.registry import AUTO, BACKENDS, Case, Op, Ops, all_ops, availability, resolve

__all__ = ["AUTO", "BACKENDS", "Case", "Op", "Ops", "all_ops", "availability", "resolve"]
