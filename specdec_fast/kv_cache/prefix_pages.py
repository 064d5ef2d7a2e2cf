"""Pages that are kept by what they hold: several owners share one, and it stays when the last of them leaves."""

from __future__ import annotations

from collections.abc import Hashable


class PrefixPages:
    """Which page of a pool holds the entries of which prefix, and how many owners each page has.

    A key stands for all tokens up to the end of a page (``request/page_keys.py``), so the page with this key is one
    whose entries are those of any sequence with these tokens. A page with a key is full and is never written again.

    An owner that has the page of a key has the pages of all shorter prefixes as well. So a page is idle if the pages
    behind it are, and became so no earlier than they: giving up idle pages in the order in which they became idle
    never leaves a page whose shorter prefixes are gone.

    Attributes:
        page_of: the page of each key.
        key_of: the key of each page that has one.
        num_owners: owners of each page, by page.
        idle: the pages that have a key and no owner, least recently used first.
        num_kept: how many of each owner's first pages have keys, or had them before ``forget``.
        num_evicted: how many idle pages have been given up because others were needed.
    """

    def __init__(self, num_pages: int) -> None:
        self.page_of: dict[Hashable, int] = {}
        self.key_of: dict[int, Hashable] = {}
        self.num_owners = [0] * (num_pages + 1)
        self.idle: dict[int, None] = {}
        self.num_kept: dict[Hashable, int] = {}
        self.num_evicted = 0

    def take(self, page: int) -> None:
        """Count an owner more of a page."""
        self.num_owners[page] += 1
        self.idle.pop(page, None)

    def leave(self, page: int) -> bool:
        """Count an owner less; return whether the page is free then, because nobody has it and it has no key."""
        self.num_owners[page] -= 1
        if self.num_owners[page] > 0:
            return False
        if page not in self.key_of:
            return True
        self.idle[page] = None
        return False

    def name(self, page: int, key: Hashable) -> int:
        """Keep a page under a key, unless another page has it; return the page that has it then."""
        known = self.page_of.setdefault(key, page)
        if known == page:
            self.key_of[page] = key
        return known

    def unname(self, page: int) -> None:
        """Let a page have no key; an owner may write it then."""
        key = self.key_of.pop(page, None)
        if key is not None:
            del self.page_of[key]

    def evict(self) -> int:
        """Give up the page that was used least recently, and return it."""
        page = next(iter(self.idle))
        del self.idle[page]
        self.unname(page)
        self.num_evicted += 1
        return page

    def forget(self) -> None:
        """Let no page have a key; the caller counts those that are free then."""
        self.page_of.clear()
        self.key_of.clear()
        self.idle.clear()
