"""Where a step's tokens are cut (I5), for every small case.

The engine and the reference decoders share ``cut_emission``, so comparing their outputs cannot show a fault in it.
Here the expected results follow from the definition: a request ends with the first token that is a stop id or the
last one allowed, and a token that is both ends it by ``"stop"``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations, product

import pytest

from specdec_fast.request.stopping import cut_emission

WORDS = (0, 1, 2)
STOP_SETS = [frozenset(ids) for n in range(4) for ids in combinations(WORDS, n)]
LONGEST = 4


def emissions() -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(product(WORDS, repeat=length) for length in range(LONGEST + 1))


def expected_cut(tokens, stop_ids, max_tokens):
    ends = [position for position, token in enumerate(tokens, 1) if token in stop_ids or position == max_tokens]
    if not ends:
        return list(tokens), None
    kept = list(tokens[: min(ends)])
    return kept, "stop" if kept[-1] in stop_ids else "length"


@pytest.mark.parametrize("stop_ids", STOP_SETS, ids=lambda ids: f"stops={sorted(ids)}")
def test_every_small_emission_is_cut_as_defined(stop_ids):
    for tokens, max_tokens in product(emissions(), range(1, LONGEST + 3)):
        expected = expected_cut(tokens, stop_ids, max_tokens)
        assert cut_emission(tokens, stop_ids, max_tokens) == expected, (tokens, max_tokens)
        assert cut_emission(list(tokens), set(stop_ids), max_tokens) == expected


def in_blocks(tokens, lengths, stop_ids, max_tokens):
    """Emit a text in steps of the given lengths, as the engine does; return what is committed, and why it ends."""
    committed, start = [], 0
    for length in lengths:
        block, reason = cut_emission(tokens[start : start + length], stop_ids, max_tokens - len(committed))
        committed += block
        start += length
        if reason is not None:
            return committed, reason
    return committed, None


def divisions(length: int) -> Iterator[list[int]]:
    """Every way to divide a text into steps of one token or more."""
    for cuts in product((False, True), repeat=length - 1):
        ends = [i for i, cut in enumerate(cuts, 1) if cut] + [length]
        yield [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def test_steps_do_not_matter():
    """A text ends at the same token, for the same reason, however it is divided into steps."""
    for tokens in product(WORDS, repeat=LONGEST):
        for stop_ids, max_tokens in product(STOP_SETS, range(1, LONGEST + 2)):
            results = [in_blocks(tokens, lengths, stop_ids, max_tokens) for lengths in divisions(LONGEST)]
            assert results == [expected_cut(tokens, stop_ids, max_tokens)] * 2 ** (LONGEST - 1)


@pytest.mark.parametrize(
    ("tokens", "stop_ids", "max_tokens", "kept", "reason"),
    [
        ([5, 6, 7], {6}, 9, [5, 6], "stop"),  # the stop id is committed, nothing after it
        ([5, 6, 7], {7, 6}, 9, [5, 6], "stop"),
        ([5, 6, 7], {6}, 2, [5, 6], "stop"),  # a stop id as the last allowed token
        ([5, 6, 7], {6}, 1, [5], "length"),  # a stop id beyond the allowed tokens
        ([5, 6, 7], (), 3, [5, 6, 7], "length"),
        ([5, 6, 7], (), 4, [5, 6, 7], None),
    ],
)
def test_by_hand(tokens, stop_ids, max_tokens, kept, reason):
    given = list(tokens)
    assert cut_emission(given, stop_ids, max_tokens) == (kept, reason)
    assert given == tokens, "the list of the step is not changed"
