"""Tokenizers at the two ends: prompts in, text out."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specdec_fast.errors import ConfigError, DetokenizationError, RequestError
from specdec_fast.request.token_decoders import rule_of

INCOMPLETE = "\ufffd"  # what a decoder puts where a character's bytes have not all arrived
_MOST_INCOMPLETE = 3  # bytes that may wait for the rest of their character, and so marks that stand for them
_LONGEST_WINDOW, _KEPT_WINDOW = 32, 8  # tokens decoded again with those that follow; how many of them are kept then
_LEAST_CONTEXT = 4  # characters before what is not certain, by when bytes have found the next character's beginning
_CANNOT_DECODE = "the tokenizer cannot decode token_ids, which are kept (decode them otherwise, or mend tokenizer=...)"
# The end of a text that `clean_up_tokenization` may change when more text follows. All that it removes are spaces, up
# to two in a row, of patterns that begin with a space and go on with these letters.
_UNCLEAN_END = re.compile(r" {1,3}(?:['nvr][ 'nvr]*)?\Z")


@contextmanager
def tokenizer_failures(kind: type[RequestError], what: str) -> Iterator[None]:
    """Turn whatever a tokenizer raises into an error of the one request that it was called for.

    Args:
        kind: of that error.
        what: the beginning of its message.

    Raises:
        RequestError: of that kind.

    """
    try:
        yield
    except BaseException as error:
        if not is_failure(error):
            raise
        raise kind(f"{what}: {type(error).__name__}: {error}") from error


def is_failure(error: BaseException) -> bool:
    """Tell failures from what ends a program or a task, such as KeyboardInterrupt.

    A panic of code written in Rust (``tokenizers``, ``tiktoken``) is a failure, although PyO3 does not derive its
    exception from ``Exception``; every extension module has a class of its own.
    """
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def load_tokenizer(name: str | None) -> Any | None:
    """Load the tokenizer that stands beside a model; None if there is none (a model built in memory, say).

    Raises:
        ConfigError: it needs code of its own, which this library does not run unasked.

    """
    if not name:
        return None
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except BaseException as error:  # every kind of file has a reader with errors of its own
        if not is_failure(error):
            raise
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"the tokenizer of {name!r} needs code of its own, which is not run unasked; load it yourself "
                "(AutoTokenizer.from_pretrained(..., trust_remote_code=True)) and pass tokenizer=..."
            ) from error
        if any(Path(name).glob("tokenizer*")):
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            warnings.warn(f"the tokenizer of {name!r} cannot be read ({reason}); pass tokenizer=...", stacklevel=2)
        return None


def expect_tokenizer(tokenizer: Any) -> None:
    """Refuse what cannot decode; one that only decodes serves prompts of token ids.

    Raises:
        ConfigError: it is not None, and has no ``decode``.

    """
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise ConfigError(
            f"tokenizer is a {type(tokenizer).__name__}; expected a loaded tokenizer (AutoTokenizer.from_pretrained), "
            "or None for the one beside the target."
        )


def same_vocabulary(first: Any, second: Any) -> bool | None:
    """Tell whether two tokenizers mean the same words by the same ids, special and added tokens left aside.

    Returns:
        None if one of them does not say what its words are, as an object of the caller's own need not.

    """
    words = [_words(first), _words(second)]
    return None if None in words else words[0] == words[1]


def _words(tokenizer: Any) -> dict[str, int] | None:
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return None
    added = set(tokenizer.added_tokens_decoder)
    return {word: token for word, token in tokenizer.get_vocab().items() if token not in added}


class Detokenizer:
    """Turns a growing list of token ids into text, piece by piece.

    A piece ends where the text is certain, which is where no further token can change it: bytes of a character that is
    not complete, runs of byte tokens and spaces that may have to go are held back (``DecodingRule``). All pieces and
    the rest add up to what ``decode`` makes of all tokens. Only the last tokens are decoded again when more come, so
    a long text costs no more per token than a short one.

    Where ``decode`` raises, nothing more is certain before the last token: what it cannot make of some tokens it may
    make of all.

    Attributes:
        error: what the tokenizer raised, if the text is not whole for that reason; None otherwise.

    """

    def __init__(self, tokenizer: Any) -> None:
        self.error: DetokenizationError | None = None
        self._tokenizer = tokenizer
        self._rule = rule_of(tokenizer)
        self._waits = self._rule.waits
        # The tokens before the window are done with. Some in it are, too: they are decoded with what follows because a
        # tokenizer may join words differently at a beginning.
        self._window: list[int] = []
        self._longest_window = _LONGEST_WINDOW
        self._num_bytes = 0  # byte tokens at the window's end
        self._num_taken = 0  # characters of the window's text that are certain
        self._decoded: str | None = ""  # the window's text, if known
        self._unclean = ""  # certain but for the spaces in it

    def add(self, token_ids: list[int], last: bool = False) -> str:
        """Take new tokens; return the text that became certain (all that is left if they are the ``last``)."""
        piece = self._add(self._rule.visible(token_ids))
        return piece + self.rest() if last else piece

    def rest(self) -> str:
        """Return the text that is not certain yet, as it is if no further token comes; look at ``error`` then."""
        if self._decoded is None:
            try:
                self._decoded = self._decode(self._window)
            except DetokenizationError as error:
                self.error = error
                return self._cleaned(self._unclean)
        self.error = None
        return self._cleaned(self._unclean + self._decoded[self._num_taken :])

    def _add(self, token_ids: list[int]) -> str:
        before = len(self._window)
        self._window += token_ids
        if token_ids:
            self._decoded = None
        if self._waits:
            return ""
        try:
            return self._take(token_ids)
        except DetokenizationError as error:
            if len(token_ids) > 1:  # so that what is certain does not depend on the blocks that tokens come in
                del self._window[before:]
                return "".join(self._add([token]) for token in token_ids)
            self.error, self._waits = error, True
            return ""

    def _take(self, token_ids: list[int]) -> str:
        num_bytes = 0
        for token in reversed(token_ids):
            if token not in self._rule.byte_ids:
                break
            num_bytes += 1
        else:  # one run of bytes goes on
            self._num_bytes += num_bytes
            return ""
        text = self._decode(self._window[: len(self._window) - num_bytes])
        self._num_bytes = num_bytes
        self._decoded = None if num_bytes else text
        num_incomplete = min(_MOST_INCOMPLETE, len(text) - len(text.rstrip(INCOMPLETE)))
        num_taken = max(self._num_taken, len(text) - num_incomplete)
        self._unclean += text[self._num_taken : num_taken]
        self._num_taken = num_taken
        if len(self._window) > self._longest_window:
            self._shorten(text)
        end = _UNCLEAN_END.search(self._unclean) if self._rule.cleans else None
        certain = self._unclean[: end.start()] if end else self._unclean
        self._unclean = self._unclean[len(certain) :]
        return self._cleaned(certain)

    def _shorten(self, text: str) -> None:
        """Drop tokens from the window's beginning; ``text`` is that of the window without the bytes at its end."""
        stop = len(self._window) - self._num_bytes
        start = stop - _KEPT_WINDOW
        while start > 0 and self._window[start] in self._rule.byte_ids:  # inside a run
            start -= 1
        shorter = self._decode(self._window[start:stop])
        num_taken = len(shorter) - (len(text) - self._num_taken)
        if start <= 0 or num_taken < _LEAST_CONTEXT:
            self._longest_window = 2 * len(self._window)
            return
        self._window, self._num_taken = self._window[start:], num_taken
        self._longest_window = max(_LONGEST_WINDOW, 2 * len(self._window))
        self._decoded = None if self._num_bytes else shorter

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        # Spaces are cleaned up later, where they are certain.
        options = {"clean_up_tokenization_spaces": False} if self._rule.cleans else {}
        with tokenizer_failures(DetokenizationError, _CANNOT_DECODE):
            text = self._tokenizer.decode(token_ids, skip_special_tokens=True, **options)
            if not isinstance(text, str):
                raise TypeError(f"decode returned a {type(text).__name__}; expected a string")
        return text

    def _cleaned(self, text: str) -> str:
        return self._tokenizer.clean_up_tokenization(text) if self._rule.cleans else text
