"""Tokenizers: loading and checking them, and turning tokens into text."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specdec_fast.errors import ConfigError, DetokenizationError, RequestError
from specdec_fast.request.token_decoders import rule_of
from specdec_fast.sampling_params import SamplingParams

INCOMPLETE = "\ufffd"  # a decoder's mark for a character whose bytes are incomplete
_MOST_INCOMPLETE = 3  # bytes, and so marks, of an incomplete character at most
_LONGEST_WINDOW = 32  # most tokens that are decoded again with new ones
_KEPT_WINDOW = 8  # tokens kept when there are more
_LEAST_CONTEXT = 4  # characters after which bytes are at the beginning of a character again
_CANNOT_DECODE = (
    "the tokenizer cannot decode token_ids, which are kept (decode them otherwise, or correct tokenizer=...)"
)
# The end of a text that `clean_up_tokenization` may change when more text follows. It removes spaces only, up to two in
# a row, in patterns that begin with a space and continue with these letters.
_UNCLEAN_END = re.compile(r" {1,3}(?:['nvr][ 'nvr]*)?\Z")

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@contextmanager
def tokenizer_failures(kind: type[RequestError], what: str) -> Iterator[None]:
    """Turn every failure of a tokenizer into a RequestError of class ``kind``, whose message begins with ``what``."""
    try:
        yield
    except BaseException as error:
        if not is_failure(error):
            raise
        raise kind(f"{what}: {type(error).__name__}: {error}") from error


def lone_surrogate(text: str) -> str | None:
    """Return a clause about the first half of a surrogate pair in a text; None if it has none.

    JSON may hold them. Some tokenizers encode them; fast ones raise.
    """
    lone = _LONE_SURROGATE.search(text)
    return lone and (
        f"whose character {lone.start()}, {lone[0]!r}, is half of a surrogate pair; remove it, for example by "
        "text.encode(errors='replace').decode()"
    )


def is_failure(error: BaseException) -> bool:
    """Return whether an exception is a failure; KeyboardInterrupt, for example, ends a program and is none.

    A panic of code written in Rust (``tokenizers``, ``tiktoken``) is a failure, although PyO3 does not derive its
    exception from ``Exception``. Every extension module has a class of its own for it.
    """
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def is_gguf(name: str) -> bool:
    """Return whether a model's name is the path of a GGUF file, which has a model and its tokenizer."""
    return name.lower().endswith(".gguf")


def load_tokenizer(name: str | None) -> Any | None:
    """Load the tokenizer in a model's folder or GGUF file; None if there is none, or it cannot be read.

    Raises ConfigError if it needs code of its own.
    """
    if not name:
        return None
    try:
        if is_gguf(name):
            path = Path(name)
            # AutoTokenizer would read the whole header by the package gguf first, which takes 10 s for 150,000 tokens.
            return PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except BaseException as error:  # every reader of a file raises errors of its own
        if not is_failure(error):
            raise
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"the tokenizer of {name!r} needs code of its own, which is not run without permission; load it "
                "yourself (AutoTokenizer.from_pretrained(..., trust_remote_code=True)) and pass tokenizer=..."
            ) from error
        if (is_gguf(name) and "no_vocab" not in str(error)) or any(Path(name).glob("tokenizer*")):
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            warnings.warn(f"the tokenizer of {name!r} cannot be read ({reason}); pass tokenizer=...", stacklevel=2)
        return None


def expect_tokenizers(**tokenizers: Any) -> None:
    """Raise ConfigError for an object other than None without ``decode``, which suffices for prompts of token ids.

    They are given by the names of their arguments.
    """
    for name, tokenizer in tokenizers.items():
        if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
            raise ConfigError(
                f"{name} is a {type(tokenizer).__name__}; expected a loaded tokenizer (AutoTokenizer.from_pretrained), "
                "or None for the one in the model's folder."
            )


def same_vocabulary(first: Any, second: Any) -> bool | None:
    """Return whether two tokenizers have the same words for the same ids, without special and added tokens.

    None if one of them does not list its words; an object of the caller's own need not.
    """
    words = [_words(first), _words(second)]
    return None if None in words else words[0] == words[1]


def _words(tokenizer: Any) -> dict[str, int] | None:
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return None
    added = set(tokenizer.added_tokens_decoder)
    return {word: token for word, token in tokenizer.get_vocab().items() if token not in added}


def detokenizer_of(tokenizer: Any, params: SamplingParams, stop_ids: Collection[int]) -> Detokenizer:
    """Return that of a request which ends with ``stop_ids``.

    They are no part of a text that follows a grammar, although a tokenizer may have added an EOS as an ordinary token.
    """
    hides = params.structured_outputs is not None and params.skip_special_tokens
    return Detokenizer(tokenizer, params.skip_special_tokens, stop_ids if hides else ())


class Detokenizer:
    """Turns a growing list of token ids into text, piece by piece.

    Text is certain if no further token can change it. A piece ends where the certain text ends: the detokenizer holds
    back the bytes of an incomplete character, runs of byte tokens, and spaces that may be removed (``DecodingRule``).
    All pieces and the rest concatenate to what ``decode`` returns for all tokens. When tokens are added, only the last
    ones are decoded again, so a long text costs no more per token than a short one.

    If ``decode`` raises, no more text is certain until the last token, because ``decode`` may succeed on all tokens.
    """

    def __init__(
        self, tokenizer: Any, skip_special_tokens: bool = True, hidden_ids: Collection[int] = frozenset()
    ) -> None:
        # the error of the tokenizer, if the text is incomplete because of it; None otherwise
        self.error: DetokenizationError | None = None
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._hidden_ids = hidden_ids
        self._rule = rule_of(tokenizer)
        if not skip_special_tokens:
            self._rule = replace(self._rule, special_ids=frozenset())
        self._waits = self._rule.waits
        # The text of tokens before the window is certain. That of some tokens in the window is certain, too: they are
        # decoded with the tokens after them, because a tokenizer may join words differently at a beginning.
        self._window: list[int] = []
        self._longest_window = _LONGEST_WINDOW
        self._num_bytes = 0  # number of byte tokens at the window's end
        self._num_taken = 0  # number of certain characters of the window's text
        self._decoded: str | None = ""  # the window's text; None if not known
        self._unclean = ""  # text that is certain except for its spaces

    def add(self, token_ids: list[int], last: bool = False) -> str:
        """Add tokens; return the text that became certain, or all remaining text if they are the ``last`` tokens."""
        if self._hidden_ids:
            token_ids = [token for token in token_ids if token not in self._hidden_ids]
        piece = self._add(self._rule.visible(token_ids))
        return piece + self.rest() if last else piece

    def rest(self) -> str:
        """Return the text that is not certain yet, as it is without further tokens, and set ``error``."""
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
            if len(token_ids) > 1:  # so that the certain text does not depend on how many tokens are added at a time
                del self._window[before:]
                return "".join(self._add([token]) for token in token_ids)
            self.error = error
            self._waits = True
            return ""

    def _take(self, token_ids: list[int]) -> str:
        num_bytes = 0
        for token in reversed(token_ids):
            if token not in self._rule.byte_ids:
                break
            num_bytes += 1
        else:  # a run of bytes continues
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
        """Drop tokens at the window's beginning; ``text`` is the window's text without the bytes at its end."""
        stop = len(self._window) - self._num_bytes
        start = stop - _KEPT_WINDOW
        while start > 0 and self._window[start] in self._rule.byte_ids:  # not inside a run of bytes
            start -= 1
        shorter = self._decode(self._window[start:stop])
        num_taken = len(shorter) - (len(text) - self._num_taken)
        if start <= 0 or num_taken < _LEAST_CONTEXT:
            self._longest_window = 2 * len(self._window)
            return
        self._window = self._window[start:]
        self._num_taken = num_taken
        self._longest_window = max(_LONGEST_WINDOW, 2 * len(self._window))
        self._decoded = None if self._num_bytes else shorter

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        # Spaces are cleaned up later, when they are certain.
        options = {"clean_up_tokenization_spaces": False} if self._rule.cleans else {}
        with tokenizer_failures(DetokenizationError, _CANNOT_DECODE):
            text = self._tokenizer.decode(token_ids, skip_special_tokens=self._skips, **options)
            if not isinstance(text, str):
                raise TypeError(f"decode returned a {type(text).__name__}; expected a string")
        return text

    def _cleaned(self, text: str) -> str:
        return self._tokenizer.clean_up_tokenization(text) if self._rule.cleans else text
