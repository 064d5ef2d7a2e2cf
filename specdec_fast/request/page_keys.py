"""Keys of the prefixes of a sequence: two sequences have the same key for a page if all tokens up to its end agree."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from itertools import count

_roots = count()


def new_root() -> bytes:
    """Return a root that no other keys of this process have: keys with different roots never agree."""
    return next(_roots).to_bytes(8, "little")


class PageKeys:
    """The keys of a sequence's full pages, made as far as they are asked for.

    A key is a 256-bit BLAKE2b digest of the key before it and the page's tokens, so equal keys mean equal tokens:
    nobody knows two inputs with the same digest.
    """

    def __init__(self, page_size: int, root: bytes) -> None:
        self._page_size = page_size
        self._root = root
        self._keys: list[bytes] = []

    def first(self, token_ids: list[int], num_pages: int) -> list[bytes]:
        """Return the keys of the first ``num_pages`` pages of a text; it only ever grows between two calls."""
        keys = self._keys
        num_known = len(keys)
        if num_known < num_pages:
            size = self._page_size
            tokens = array("q", token_ids[num_known * size : num_pages * size]).tobytes()
            page_bytes = len(tokens) // (num_pages - num_known)
            key = keys[-1] if keys else self._root
            for start in range(0, len(tokens), page_bytes):
                key = blake2b(key + tokens[start : start + page_bytes], digest_size=32).digest()
                keys.append(key)
        return keys if num_known == num_pages else keys[:num_pages]


class ComingPages:
    """The pages that the sequences of one forward will complete, so that others may wait for them.

    Args:
        page_size: positions per page.
    """

    # A sequence waits if it saves so many rows, or half of those that it lacks: for fewer, one more forward may take
    # longer than the rows.
    _ENOUGH_ROWS = 64

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._keys: set[bytes] = set()

    def should_wait(self, keys: PageKeys | None, token_ids: list[int], start: int, stop: int) -> bool:
        """Return whether a sequence that lacks positions ``start`` to ``stop - 1`` should wait for pages of others."""
        if not self._keys or keys is None:
            return False
        size = self._page_size
        num_saved = -(start % size)
        for key in keys.first(token_ids, stop // size)[start // size :]:
            if key not in self._keys:
                break
            num_saved += size
        return num_saved > 0 and num_saved >= min(self._ENOUGH_ROWS, (stop - start) / 2)

    def add(self, keys: PageKeys | None, token_ids: list[int], start: int, stop: int) -> None:
        """Note the pages that a sequence completes with positions ``start`` to ``stop - 1``."""
        if keys is not None:
            size = self._page_size
            self._keys.update(keys.first(token_ids, stop // size)[start // size :])
