"""The limit of a step's rows after memory has run out: which errors set it, what it admits, when it is gone."""

from __future__ import annotations

import pytest

import specdec_fast as sd
from specdec_fast.engine.row_limit import RowLimit
from specdec_fast.freed_memory import is_out_of_memory
from specdec_fast.request.sequence import Sequence
from support.memory_errors import ERRORS


@pytest.mark.parametrize("name", ERRORS)
def test_a_lack_of_memory_is_recognised(name):
    assert is_out_of_memory(ERRORS[name])


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("out of memory"), sd.KVCacheAllocationError("out of memory")]
)
def test_other_errors_are_not(error):
    assert not is_out_of_memory(error)


def test_the_limit_is_doubled_until_it_is_gone(monkeypatch):
    monkeypatch.setattr("specdec_fast.engine.row_limit._STEPS", 3)
    limit, sequence = RowLimit(), Sequence(0, [1], 1, 9, sd.SamplingParams(), frozenset())

    def fails(num_rows):
        limit.num_rows = num_rows
        assert limit.recover(ERRORS["gpu"], [sequence]) == (num_rows > 1)

    fails(40)
    fails(20)
    found = []
    for _ in range(7):
        found.append(limit.most)
        limit.passed()
    assert found == [10, 10, 10, 20, 20, 20, None]
    fails(1)
    assert limit.most is None
    with pytest.raises(ZeroDivisionError):
        limit.recover(ZeroDivisionError(), [sequence])


def test_a_limited_step_has_the_oldest_sequences():
    limit = RowLimit()
    batch = [Sequence(i, [1], 1, 9, sd.SamplingParams(), frozenset(), request_id=i) for i in (3, 1, 2)]
    assert limit.fit(batch, [5, 4, 0]) == (batch, [5, 4, 0])
    for most, wanted in ((1, {1: 0}), (4, {1: 3}), (5, {1: 4}), (6, {1: 4, 2: 0}), (8, {1: 4, 2: 0, 3: 1})):
        limit.most = most
        kept, limits = limit.fit(batch, [5, 4, 0])
        assert dict(zip([s.request_id for s in kept], limits, strict=True)) == wanted
