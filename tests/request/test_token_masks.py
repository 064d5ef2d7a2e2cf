"""Masks that follow a request's tokens, and their rows along chains and trees."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_fast.request.restrictions import FixedMask, ForbiddenWords, LeastTokens
from specdec_fast.request.token_masks import ALL_ALLOWED, UNREAD, TokenMasks, forbid, num_words, row_of

VOCAB_SIZE = 70


def rows_for(count: int) -> np.ndarray:
    return np.full((count, num_words(VOCAB_SIZE)), ALL_ALLOWED, np.int32)


def allowed(row: np.ndarray) -> set[int]:
    return {i for i in range(VOCAB_SIZE) if int(row[i // 32]) >> (i % 32) & 1}


class AfterEven:
    """After an even token only odd ones may come, and the other way round; refuses what it forbids."""

    reads_tokens = True

    def __init__(self, last: int) -> None:
        self.path = [last]

    def advance(self, token: int) -> bool:
        if token % 2 == self.path[-1] % 2:
            return False
        self.path.append(token)
        return True

    def rollback(self, count: int) -> None:
        assert 0 < count < len(self.path)
        del self.path[-count:]

    def fill(self, row: np.ndarray) -> None:
        row &= row_of([i for i in range(VOCAB_SIZE) if i % 2 != self.path[-1] % 2], VOCAB_SIZE)


EVEN, ODD = set(range(0, VOCAB_SIZE, 2)), set(range(1, VOCAB_SIZE, 2))


def test_rows_have_the_bits_of_tokens():
    for tokens in ([], [0], [31], [32, 69], range(VOCAB_SIZE)):
        assert allowed(row_of(tokens, VOCAB_SIZE)) == set(tokens)
    row = rows_for(1)[0]
    for token in (0, 31, 63, 69, 1000, -1):
        forbid(row, token)
    assert allowed(row) == set(range(VOCAB_SIZE)) - {0, 31, 63, 69}


def test_a_chain_is_followed_and_taken_back():
    mask = AfterEven(2)
    masks = TokenMasks([mask], VOCAB_SIZE)
    rows = rows_for(4)
    masks.fill_rows([], [3, 4, 5], [-1, 0, 1], rows)
    assert [allowed(row) for row in rows] == [ODD, EVEN, ODD, EVEN]
    rows = rows_for(2)
    masks.fill_rows([3, 4], [7], [-1], rows)  # two tokens were emitted
    assert [allowed(row) for row in rows] == [ODD, EVEN]
    assert mask.path == [2, 3, 4, 7], "the last token is a draft token, where the next step goes on, or not"
    assert allowed(masks.row_behind([3, 4, 5], [])) == EVEN
    assert mask.path == [2, 3, 4, 5]


def test_rows_behind_a_forbidden_draft_token_stay_free():
    rows = rows_for(4)
    TokenMasks([AfterEven(2)], VOCAB_SIZE).fill_rows([], [3, 5, 6], [-1, 0, 1], rows)
    assert [allowed(row) for row in rows] == [ODD, EVEN, ODD | EVEN, ODD | EVEN]


# Nodes in the order of depth, and depth first; branches that leave the path at several heights.
@pytest.mark.parametrize(
    ("drafted", "parents"),
    [
        ([3, 5, 4, 6, 8, 7, 9, 10], [-1, -1, 0, 0, 1, 2, 4, 6]),
        ([3, 4, 7, 6, 5, 8, 9, 2], [-1, 0, 1, 0, -1, 4, 5, 5]),
        ([2, 3, 4, 4, 5], [-1, -1, 0, 1, 3]),
    ],
)
def test_a_tree_is_walked_path_by_path(drafted, parents):
    rows = rows_for(len(drafted) + 1)
    mask = AfterEven(2)
    TokenMasks([mask], VOCAB_SIZE).fill_rows([], drafted, parents, rows)
    for node in range(len(drafted) + 1):
        path, at = [], node
        while at:
            path.insert(0, drafted[at - 1])
            at = parents[at - 1] + 1
        chain = rows_for(len(path) + 1)
        TokenMasks([AfterEven(2)], VOCAB_SIZE).fill_rows([], path, range(-1, len(path) - 1), chain)
        assert allowed(rows[node]) == allowed(chain[-1])


def test_masks_that_refuse_take_the_others_back():
    counted = LeastTokens(2, [1], VOCAB_SIZE)
    rows = rows_for(3)
    TokenMasks([counted, AfterEven(2)], VOCAB_SIZE).fill_rows([], [4, 3], [-1, -1], rows)
    assert [allowed(row) for row in rows] == [ODD - {1}, ODD | EVEN, EVEN]


def test_an_emitted_token_that_a_mask_forbids_is_an_error():
    with pytest.raises(ValueError, match="forbids token 4"):
        TokenMasks([AfterEven(2)], VOCAB_SIZE).fill_rows([4], [], [], rows_for(1))


def test_least_tokens_and_fixed_masks():
    rows = rows_for(4)
    masks = [LeastTokens(3, [5, 60], VOCAB_SIZE), FixedMask(row_of([5, 6, 60], VOCAB_SIZE))]
    together = TokenMasks(masks, VOCAB_SIZE)
    assert not together.reads_tokens
    together.fill_rows([6], [-1, -1, -1], [-1, 0, 1], rows)
    assert [allowed(row) for row in rows] == [{6}, {6}, {5, 6, 60}, {5, 6, 60}]


def test_forbidden_words():
    words = [(4, 5), (4, 6), (3, 4, 7), (9, 9, 9)]
    mask = ForbiddenWords(words, [1, 3], VOCAB_SIZE)
    rows = rows_for(6)
    TokenMasks([mask], VOCAB_SIZE).fill_rows([], [4, 9, 9, 9, 4], [-1, 0, 1, -1, 3], rows)
    forbidden = [set(range(VOCAB_SIZE)) - allowed(row) for row in rows]
    assert forbidden == [set(), {5, 6, 7}, set(), {9}, set(), {5, 6}]
    many = ForbiddenWords([(4, last) for last in range(50)], [4], VOCAB_SIZE)
    row = rows_for(1)
    TokenMasks([many], VOCAB_SIZE).fill_rows([], [], [], row)
    assert allowed(row[0]) == set(range(50, VOCAB_SIZE))
    short = ForbiddenWords([(1, 2, 3, 4)], [3], VOCAB_SIZE)
    row = rows_for(1)
    TokenMasks([short], VOCAB_SIZE).fill_rows([], [], [], row)
    assert allowed(row[0]) == set(range(VOCAB_SIZE))


def test_a_row_for_a_drafter():
    mask = AfterEven(2)
    masks = TokenMasks([mask], VOCAB_SIZE)
    assert allowed(masks.row_behind([3], [])) == EVEN
    assert allowed(masks.row_behind([3], [4, 5])) == EVEN
    assert allowed(masks.row_behind([3], [4, 6])) == EVEN | ODD  # never reached
    assert allowed(masks.row_behind([3], [UNREAD])) == EVEN | ODD
    assert mask.path == [2, 3, 4]
    counted = TokenMasks([LeastTokens(2, [1], VOCAB_SIZE)], VOCAB_SIZE)
    assert [1 in allowed(counted.row_behind([], [UNREAD] * n)) for n in range(4)] == [False, False, True, True]


class Counting(AfterEven):
    """Counts what it is asked."""

    def __init__(self, last: int) -> None:
        super().__init__(last)
        self.counts = {"advance": 0, "fill": 0, "forced": 0}

    def advance(self, token: int) -> bool:
        self.counts["advance"] += 1
        return super().advance(token)

    def fill(self, row: np.ndarray) -> None:
        self.counts["fill"] += 1
        super().fill(row)

    def forced(self, most: int) -> list[int]:
        self.counts["forced"] += 1
        return [3, 4, 5][:most]


def test_a_step_asks_every_mask_once():
    """Drafting asks for the rows of a path one by one, and verification for all of them and one more."""
    mask = Counting(2)
    masks = TokenMasks([mask], VOCAB_SIZE)
    assert [masks.completed([], [], most) for most in (4, 2)] == [[3, 4, 5], [3, 4]]
    for count in range(3):
        masks.row_behind([], [3, 4, 7][:count])
    rows = rows_for(4)
    masks.fill_rows([], [3, 4, 7], [-1, 0, 1], rows)
    assert [allowed(row) for row in rows] == [ODD, EVEN, ODD, EVEN]
    assert mask.counts == {"advance": 3, "fill": 4, "forced": 1}
    masks.fill_rows([3, 4, 9], [8], [-1], rows_for(2))
    assert mask.counts == {"advance": 5, "fill": 6, "forced": 1}, "two of three emitted tokens were followed before"
    assert masks.completed([3, 4, 9], [], 3) == [3, 4, 5]
    assert mask.counts["forced"] == 2


class Broken(AfterEven):
    def fill(self, row: np.ndarray) -> None:
        raise KeyError("broken")


def test_a_mask_that_raises_for_a_drafter_raises_in_the_next_verification():
    masks = TokenMasks([Broken(2)], VOCAB_SIZE)
    assert allowed(masks.row_behind([], [3])) == EVEN | ODD
    with pytest.raises(KeyError, match="broken"):
        masks.fill_rows([], [], [], rows_for(1))
