"""Keys of prefixes: equal exactly where all tokens up to the end of the page are."""

from __future__ import annotations

from itertools import product

import pytest

from specdec_fast.request.page_keys import ComingPages, PageKeys, new_root

ROOT = new_root()


def keys_of(tokens, size=2, root=ROOT):
    return PageKeys(size, root).first(tokens, len(tokens) // size)


def test_keys_are_equal_exactly_where_the_tokens_are():
    texts = [list(text) for length in (2, 4, 5) for text in product((0, 1, -1), repeat=length)]
    first_with: dict[bytes, list[int]] = {}
    for text in texts:
        for i, key in enumerate(keys_of(text)):
            assert first_with.setdefault(key, text[: 2 * i + 2]) == text[: 2 * i + 2]
    assert len(first_with) == 3**2 + 3**4


def test_keys_with_another_root_or_page_size_never_agree():
    text = list(range(12))
    apart = [keys_of(text), keys_of(text, root=new_root()), keys_of(text, size=3)]
    assert len({key for keys in apart for key in keys}) == sum(map(len, apart))


def test_keys_grow_with_the_text():
    text = list(range(4))
    keys = PageKeys(2, ROOT)
    first = keys.first(text, 2)
    text += [7, 8, 9]
    assert keys.first(text, 3) == keys_of(text)[:3]
    assert keys.first(text, 2) == first
    assert keys.first(text, 0) == []


LEADER = list(range(400))


@pytest.mark.parametrize(
    ("text", "start", "waits"),
    [
        (LEADER[:17], 0, True),  # it saves all but one row
        (LEADER[:7] + [-1] * 6, 0, False),  # one page of twelve rows
        (LEADER[:7] + [-1] * 2, 0, True),  # one page of eight rows
        (LEADER[:67] + [-1] * 1000, 0, True),  # 64 rows, of many more
        (LEADER[:63] + [-1] * 1000, 0, False),
        (LEADER[:67] + [-1] * 1000, 8, False),  # it has some of them
        (LEADER[:13], 10, True),  # the rest of a page
        (LEADER[:12], 10, False),  # the last token of the page is always computed
        ([-1] * 40, 0, False),
    ],
)
def test_who_waits(text, start, waits):
    coming = ComingPages(4)
    coming.add(PageKeys(4, ROOT), LEADER, 0, 399)
    keys = PageKeys(4, ROOT)
    assert coming.should_wait(keys, text, start, len(text) - 1) is waits
    assert not coming.should_wait(None, text, start, len(text) - 1)
    assert not ComingPages(4).should_wait(keys, text, start, len(text) - 1)
