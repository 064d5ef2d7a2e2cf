"""Which tokens of a vocabulary write a given text: :class:`TokenTexts`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


class TokenTexts:
    """The bytes of the tokens of a vocabulary.

    Args:
        texts: of every token, by id; empty: the token stands for no text.

    Attributes:
        texts: as passed.
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        self._by_first: dict[int, list[int]] = defaultdict(list)  # ids by the first byte
        for token, text in enumerate(texts):
            if text:
                self._by_first[text[0]].append(token)

    def writing(self, text: bytes) -> list[int]:
        """Return the tokens that write the beginning of a text, or all of it and more; of a text that is not empty."""
        texts = self.texts
        return [
            token
            for token in self._by_first.get(text[0], ())
            if text.startswith(texts[token]) or texts[token].startswith(text)
        ]

    def continuing_character(self, most: int) -> list[int]:
        """Return the tokens that are at most so many bytes, each of which continues a character of UTF-8."""
        found = (token for first in range(0x80, 0xC0) for token in self._by_first.get(first, ()))
        return [t for t in found if len(self.texts[t]) <= most and all(0x80 <= byte < 0xC0 for byte in self.texts[t])]
