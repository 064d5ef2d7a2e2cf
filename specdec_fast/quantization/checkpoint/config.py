"""From ``quantization_config`` of a config.json to the format of each linear."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specdec_fast.quantization.checkpoint import awq, compressed_tensors, float8, gptq, mxfp4
from specdec_fast.quantization.checkpoint.fields import Fields, pattern
from specdec_fast.quantization.checkpoint.linear import LinearFormat

PATH = "quantization_config"


@dataclass(frozen=True)
class CheckpointQuantization:
    """What a checkpoint says about its codes.

    Attributes:
        method: ``quant_method``.
        format_of: returns the format of the linear of a name; None if it has no codes.
        markers: suffixes of tensors that only quantised modules have.
        may_be_plain: whether a linear that has a format may have plain weights all the same; its tensors decide.
    """

    method: str
    format_of: Callable[[str], LinearFormat | None] = field(repr=False)
    markers: frozenset[str]
    may_be_plain: bool


def read_quantization_config(config: Any) -> CheckpointQuantization:
    """Read ``quantization_config``.

    Raises ConfigError, which names the field, if the method is unknown, a field is absent, unknown or has a value that
    cannot be read.
    """
    fields = Fields(config, PATH)
    method = fields.raw("quant_method")
    if method not in READABLE:  # a tuple: what came need not be hashable
        raise fields.fault("quant_method", " or ".join(repr(each) for each in READABLE))
    return _READERS[method](fields)


def _read_compressed_tensors(fields: Fields) -> CheckpointQuantization:
    groups, ignored = compressed_tensors.read_fields(fields)

    def format_of(name: str) -> LinearFormat | None:
        if ignored.rank(name, "Linear") is not None:
            return None
        ranks = [(targets.rank(name, "Linear"), each) for targets, each in groups]
        matching = [(rank, each) for rank, each in ranks if rank is not None]
        return min(matching, key=lambda pair: pair[0])[1] if matching else None

    markers = frozenset(each.marker for _, each in groups)
    return CheckpointQuantization("compressed-tensors", format_of, markers, may_be_plain=False)


def _read_gptq(fields: Fields) -> CheckpointQuantization:
    everywhere, others = gptq.read_fields(fields)
    patterns = [(pattern(expression, f"{PATH}.dynamic"), each) for expression, each in others.items()]

    def format_of(name: str) -> LinearFormat | None:
        return next((each for expression, each in patterns if expression.match(name)), everywhere)

    return CheckpointQuantization("gptq", format_of, frozenset({everywhere.marker}), may_be_plain=True)


def _read_awq(fields: Fields) -> CheckpointQuantization:
    each, skipped = awq.read_fields(fields)
    return CheckpointQuantization("awq", _all_but(skipped, each), frozenset({each.marker}), may_be_plain=True)


def _read_float8(fields: Fields) -> CheckpointQuantization:
    each, skipped = float8.read_fields(fields)
    return CheckpointQuantization("fp8", _all_but(skipped, each), frozenset({each.marker}), may_be_plain=True)


def _read_mxfp4(fields: Fields) -> CheckpointQuantization:
    mxfp4.read_fields(fields)
    return CheckpointQuantization(mxfp4.METHOD, lambda name: None, mxfp4.MARKERS, may_be_plain=True)


def _all_but(skipped: tuple[str, ...], each: LinearFormat) -> Callable[[str], LinearFormat | None]:
    """Return one format for all linears but some: those below a name, with it as last part, or matching it."""
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    expressions = []
    for name in skipped:
        pattern(name, f"{PATH}.modules_to_not_convert")
        expressions.append(re.compile(f"(?:{name}){boundary}"))

    def format_of(name: str) -> LinearFormat | None:
        is_skipped = any(expression.match(name) for expression in expressions) or name.endswith(skipped)
        return None if is_skipped else each

    return format_of


_READERS: dict[str, Callable[[Fields], CheckpointQuantization]] = {
    "compressed-tensors": _read_compressed_tensors,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "fp8": _read_float8,
    mxfp4.METHOD: _read_mxfp4,
}
READABLE = tuple(_READERS)
