"""One tokenizer's tokens as bytes: texts encoded behind other texts, and where a list of tokens may be cut."""

from __future__ import annotations

import copy
from typing import Any

from specdec_fast.request.detokenizer import is_failure
from specdec_fast.request.token_bytes import bytes_of_tokens

_LEAST_TAIL = 12  # bytes of text before new text, with which it is encoded
_MOST_TAIL = 24  # tokens of it at most
# Behind which a text is encoded so that no space is put before it. Few tokenizers join a line's end with a letter, or a
# letter with something else.
_ANCHORS = "\na"


class TextTokens:
    """Encodes pieces of text by one tokenizer, and knows the bytes of its tokens.

    Args:
        tokenizer: a fast tokenizer of transformers.
        backend: a copy of its ``tokenizers.Tokenizer``: other threads may change the settings of the caller's.
        bytes_by_id: from ``bytes_of_tokens``.
        num_ids: number of ids of its model. A tokenizer may have more: those that were added to it alone are left out.

    Attributes:
        bytes_by_id: the bytes of every token that stands for text, in the order of ids.
        added: ids of special and added tokens, by their content, in the order of ids.
        roles: ids of the tokens that begin and end a text, by ``"bos"`` and ``"eos"``, as far as there are any.
        first: ids that the tokenizer puts before a text.
        adds_space: whether it puts a space before a text.
    """

    def __init__(self, tokenizer: Any, backend: Any, bytes_by_id: dict[int, bytes], num_ids: int) -> None:
        self.bytes_by_id = {token: text for token, text in bytes_by_id.items() if token < num_ids}
        self._num_ids = num_ids
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # a text that spells out a special token has no such token
        added = sorted(self._backend.get_added_tokens_decoder().items())
        self.added = {each.content: token for token, each in added if token < num_ids}
        ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
        self.roles = {role: token for role, token in ids.items() if token is not None and token < num_ids}
        plain = self._raw("a")
        whole = self._known(tokenizer("a").input_ids)
        starts = [i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain]
        self.first: list[int] = whole[: starts[0]] if starts else []
        self.adds_space = self.bytes_of(plain).startswith(b" ")

    @classmethod
    def of(cls, tokenizer: Any, num_ids: int) -> TextTokens | None:
        """Return that of a tokenizer, whose model has ``num_ids`` ids; None if its kind is not known."""
        bytes_by_id = bytes_of_tokens(tokenizer)
        if bytes_by_id is None:
            return None
        try:
            backend = copy.deepcopy(tokenizer.backend_tokenizer)
        except Exception:  # a step of it is written in Python
            return None
        return cls(tokenizer, backend, bytes_by_id, num_ids)

    def bytes_of(self, token_ids: list[int]) -> bytes:
        """Return the bytes of tokens; special ones have none."""
        of = self.bytes_by_id
        return b"".join(of.get(token, b"") for token in token_ids)

    def tail(self, token_ids: list[int], first: int = 0) -> int:
        """Return where the last tokens begin behind which new text is encoded: at a space if there is one nearby.

        They are tokens of text from index ``first`` on, and at most 24.
        """
        of = self.bytes_by_id
        length = 0
        found = len(token_ids)
        for i in range(len(token_ids) - 1, max(first, len(token_ids) - _MOST_TAIL) - 1, -1):
            piece = of.get(token_ids[i])
            if piece is None:
                return i + 1
            length += len(piece)
            if piece[0] & 0xC0 != 0x80:  # not inside a character
                found = i
                if length >= _LEAST_TAIL and piece[0] in b" \n":
                    break
        return found

    def encode(self, text: bytes) -> list[int] | None:
        """Return tokens whose bytes are exactly those of a text of whole characters; None if none are found."""
        words = text.decode(errors="replace")
        tried = [anchor + words for anchor in _ANCHORS]
        if not self.adds_space:
            tried.insert(0, words)
        elif words[:1] == " ":
            tried.insert(0, words[1:])
        return next((found for each in tried if (found := self._aligned(each, text)) is not None), None)

    def encode_behind(self, before: bytes, text: bytes) -> list[int] | None:
        """Return the tokens of a text of whole characters as they are behind another text.

        If a token would begin in the text before, those of the text alone are returned; None if none are found.
        """
        words = (before + text).decode(errors="replace")
        found = self._aligned(words[1:] if self.adds_space and words[0] == " " else words, text)
        return self.encode(text) if found is None else found

    def encode_beginning(self, text: str) -> list[int]:
        """Return the tokens of a text, whatever its normalisation changes; without ``first``."""
        return self._raw(text)

    def _aligned(self, words: str, text: bytes) -> list[int] | None:
        """Return the last tokens of an encoded text whose bytes are ``text``; None if no token begins there."""
        token_ids = self._raw(words)
        missing = len(text)
        start = len(token_ids)
        while missing > 0 and start > 0:
            start -= 1
            piece = self.bytes_by_id.get(token_ids[start])
            if piece is None:
                return None
            missing -= len(piece)
        found = token_ids[start:]
        return found if missing == 0 and self.bytes_of(found) == text else None

    def _raw(self, words: str) -> list[int]:
        try:
            return self._known(self._backend.encode(words, add_special_tokens=False).ids)
        except BaseException as error:  # some texts make some tokenizers panic: they have no tokens, and no step fails
            if not is_failure(error):
                raise
            return []

    def _known(self, token_ids: list[int]) -> list[int]:
        return [token for token in token_ids if token < self._num_ids]
