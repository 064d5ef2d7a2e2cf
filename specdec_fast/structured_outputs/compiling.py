"""Makes matchers of what requests ask for: compiled once, in a process that is killed when it takes too long."""

from __future__ import annotations

import atexit
import json
import pickle
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import BoundedSemaphore, Lock, Timer
from typing import Any

from specdec_fast.errors import GrammarError
from specdec_fast.structured_outputs.matcher import GrammarMask
from specdec_fast.structured_outputs.parameters import StructuredOutputs
from specdec_fast.structured_outputs.token_texts import TokenTexts

COMPILE_SECONDS = 30.0
_START_SECONDS = 300.0  # that the process may take to import xgrammar
_MOST_CACHED_BYTES = 256 << 20  # of compiled grammars; one that is larger is refused
MOST_PROCESSES = 2  # that compile at once
_START = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[2]); runpy.run_path(sys.argv[1], run_name='__main__')"
)
_PROBE = '{"name": "Tom", "age": 12}'
_OBJECT = '{"type": "object"}'
_Job = tuple[str, str, bool, str | None]  # kind, text, whether any whitespace may be, what may stand before the text
_Key = tuple[_Job, bool]  # and whether special tokens have no text
# Keywords whose grammars in xgrammar let characters through that JSON escapes.
_LOOSE_KEYWORDS = re.compile(r'"(pattern|format|minLength|maxLength|patternProperties|propertyNames)":')
_MISSING = "structured_outputs: the package xgrammar is not installed ({}); pip install 'specdec-fast[grammar]'."


class NotCompiledError(Exception):
    """A grammar would have to be compiled, which may take seconds, and the caller cannot wait for that."""


class Grammars:
    """The compiled grammars of one tokenizer; any thread may call.

    Args:
        tokenizer: the target's; None if none is known.
        vocab_size: number of the target's ids.
        eos_ids: the target's EOS ids.
        seconds: that compiling one grammar may take.
    """

    def __init__(
        self, tokenizer: Any | None, vocab_size: int, eos_ids: Collection[int], seconds: float = COMPILE_SECONDS
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._seconds = seconds
        self._lock = Lock()  # guards what follows
        self._vocabularies: dict[bool, tuple[Any, str]] = {}  # and as JSON; True: without special tokens
        self._token_texts: dict[bool, TokenTexts] = {}  # by the same keys
        self._compiled: OrderedDict[_Key, Any] = OrderedDict()  # the latest used one last
        self._num_bytes = 0

    def prepare(self) -> None:
        """Start a process and let it have the vocabulary, so that the first request does not wait for that.

        Where there is no xgrammar, or no vocabulary that it can read, do nothing: the request will be refused.
        """
        with suppress(GrammarError):
            self._grammar(_ANY_JSON, skips_special=True)

    def masks(
        self,
        asked: StructuredOutputs,
        stop_ids: Collection[int],
        skips_special: bool = True,
        before: str | None = None,
        may_compile: bool = True,
    ) -> list[GrammarMask]:
        """Return new matchers of a request; a token must be allowed by all of them.

        Args:
            asked: what the text must follow.
            stop_ids: ids that end the request; one of them is allowed where the text is complete.
            skips_special: whether special tokens are no part of the text. Then they are not allowed.
            before: what may stand before the text, from ``Reasoning.grammar``; None: nothing.
            may_compile: whether the caller can wait until a grammar has been compiled.

        Raises:
            NotCompiledError: it cannot, and a grammar has not been.
            GrammarError: xgrammar is not installed, there is no tokenizer that it can read, no id ends the request, or
                no grammar can be compiled within the limits.
        """
        ends = sorted(token for token in stop_ids if 0 <= token < self._vocab_size)
        if not ends:
            raise GrammarError(
                "structured_outputs: no token ends the request, so its text could never be complete; leave out "
                "ignore_eos, or give stop_token_ids."
            )
        both = [asked, _with_any_json(asked)]
        found = [self._grammar(each, skips_special, before, may_compile) for each in both if each is not None]
        masks = [GrammarMask(grammar, ends, self._vocab_size, self.encode) for grammar in found]
        if not masks[0].allows_any():
            raise GrammarError(f"structured_outputs: the {asked.kind} {asked.text!r:.80} allows no text.")
        return masks

    def token_texts(self, skips_special: bool = True, may_compile: bool = True) -> TokenTexts:
        """Return the bytes of all tokens, as grammars see them; the arguments and errors are those of ``masks``.

        To read the vocabulary takes about as long as to compile a small grammar.
        """
        with self._lock:
            if skips_special not in self._token_texts:
                if not may_compile:
                    raise NotCompiledError
                vocabulary, _ = self._vocabulary(skips_special)
                self._token_texts[skips_special] = TokenTexts(vocabulary.decoded_vocab)
            return self._token_texts[skips_special]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        tokenizer = self._tokenizer
        assert tokenizer is not None
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    def _grammar(
        self, asked: StructuredOutputs, skips_special: bool, before: str | None = None, may_compile: bool = True
    ) -> Any:
        job = _job_of(asked, before)
        key = (job, skips_special)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
            if not may_compile:
                raise NotCompiledError
            vocabulary, as_json = self._vocabulary(skips_special)
        import xgrammar

        text, reason = _processes.answer(as_json, job, self._seconds)
        if text is None:
            raise _refusal(asked, reason)
        compiled = xgrammar.CompiledGrammar.deserialize_json(text, vocabulary)
        size = compiled.memory_size_bytes
        if size > _MOST_CACHED_BYTES:
            raise _refusal(asked, f"it takes {size >> 20} MiB once compiled; make it smaller")
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = compiled
                self._num_bytes += size
            while self._num_bytes > _MOST_CACHED_BYTES:
                _, oldest = self._compiled.popitem(last=False)
                self._num_bytes -= oldest.memory_size_bytes
        return compiled

    def _vocabulary(self, skips_special: bool) -> tuple[Any, str]:
        if skips_special not in self._vocabularies:
            read = self._read_vocabulary(skips_special)
            self._vocabularies[skips_special] = (read, str(read.serialize_json()))
        return self._vocabularies[skips_special]

    def _read_vocabulary(self, skips_special: bool) -> Any:
        try:
            import xgrammar
        except ImportError as error:
            raise GrammarError(_MISSING.format(error)) from None
        if self._tokenizer is None:
            raise GrammarError("structured_outputs: no tokenizer is known for this target; pass tokenizer=...")
        stops = self._eos_ids or None
        try:
            found = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=stops
            )
        except Exception as error:  # whatever a tokenizer of the caller's own raises
            kind = type(self._tokenizer).__name__
            raise GrammarError(
                f"structured_outputs: xgrammar cannot read the vocabulary of the tokenizer, a {kind}: {error}"
            ) from error
        words = list(found.decoded_vocab)
        for token in special_ids(self._tokenizer) if skips_special else ():
            if token < len(words):
                words[token] = b""  # a token without text is allowed nowhere
        self._expect_same_texts(words, skips_special)
        if not skips_special:
            return found
        return xgrammar.TokenizerInfo(
            words, vocab_size=self._vocab_size, stop_token_ids=stops, add_prefix_space=found.add_prefix_space
        )

    def _expect_same_texts(self, words: list[bytes], skips_special: bool) -> None:
        """Raise GrammarError if xgrammar reads a text of tokens that is not what the tokenizer decodes them to.

        Decoders of WordPiece put spaces between words, for example, of which xgrammar knows nothing.
        """
        tokenizer = self._tokenizer
        assert tokenizer is not None
        try:
            tokens = [token for token in tokenizer(_PROBE, add_special_tokens=False).input_ids if token < len(words)]
            decoded = str(tokenizer.decode(tokens, skip_special_tokens=skips_special))
        except Exception:  # a caller's own tokenizer may raise anything; then nothing can be compared
            return
        read = b"".join(words[token] for token in tokens).decode(errors="replace")
        if read.removeprefix(" ") != decoded.removeprefix(" "):
            raise GrammarError(
                f"structured_outputs: xgrammar reads tokens of the tokenizer, a {type(tokenizer).__name__}, as "
                f"{read!r:.80}, which it decodes to {decoded!r:.80}, so a text could differ from what is asked for; "
                "use a target whose tokenizer is over bytes, or of SentencePiece's kind with bytes."
            )


def _job_of(asked: StructuredOutputs, before: str | None) -> _Job:
    kind, text = ("json", _OBJECT) if asked.kind == "json_object" else (asked.kind, asked.text)
    return kind, text, not asked.disable_any_whitespace, before


def _with_any_json(asked: StructuredOutputs) -> StructuredOutputs | None:
    """Return the same with any JSON value in place of the schemas; None if the grammars of these are JSON already."""
    if asked.kind == "json":
        return _ANY_JSON if _LOOSE_KEYWORDS.search(asked.text) else None
    if asked.kind != "structural_tag":
        return None
    tag = json.loads(asked.text)
    wider = _without_schemas(tag)
    return None if wider == tag else StructuredOutputs(structural_tag=wider)


def _without_schemas(part: Any) -> Any:
    """Return a part of a structural tag in which schemas with loose keywords are those of any JSON value."""
    if isinstance(part, list):
        return [_without_schemas(each) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema" and part.get("style", "json") == "json":
        is_loose = _LOOSE_KEYWORDS.search(json.dumps(part.get("json_schema")))
        return part | {"json_schema": {}} if is_loose else part
    return {name: _without_schemas(each) for name, each in part.items()}


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of a tokenizer's special tokens, of those that were added, too."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(token for token, word in added.items() if word.special)}


def _refusal(asked: StructuredOutputs, reason: str) -> GrammarError:
    return GrammarError(f"structured_outputs: no grammar can be made of the {asked.kind} {asked.text!r:.80}: {reason}.")


class _Process:
    """One process of ``compile_process.py``; one thread at a time."""

    def __init__(self) -> None:
        script = str(Path(__file__).with_name("compile_process.py"))
        command = [sys.executable, "-c", _START, script, json.dumps(sys.path)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._has: set[int] = set()  # hashes of the vocabularies that it has got
        with self._limited(_START_SECONDS):
            self._read()  # its first answer says that it is ready

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def answer(self, info: str, job: _Job, seconds: float) -> tuple[str | None, str]:
        """Return the compiled grammar, or None and the reason; the process is dead after it took too long."""
        key = hash(info)
        try:
            with self._limited(seconds) as timer:
                assert self._process.stdin is not None
                pickle.dump((key, None if key in self._has else info, *job), self._process.stdin)
                self._process.stdin.flush()
                self._has.add(key)
                text, reason = self._read()
                return text, _readable(reason)
        except (EOFError, OSError, pickle.UnpicklingError):
            ended = "the process has ended" if timer.is_alive() else f"compiling takes more than {seconds:g} s"
            self.kill()
            return None, f"{ended}; make it smaller, with fewer or shorter repetitions"
        except BaseException:  # an interrupt: the answer would be read as that of the next job
            self.kill()
            raise

    def kill(self) -> None:
        """End the process, whatever it does, and close its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what was written last has no reader
                pipe.close()  # type: ignore[union-attr]

    @contextmanager
    def _limited(self, seconds: float) -> Iterator[Timer]:
        """Kill the process unless the block has ended in time."""
        timer = Timer(seconds, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            yield timer
        finally:
            timer.cancel()

    def _read(self) -> tuple[str | None, str]:
        assert self._process.stdout is not None
        answer: tuple[str | None, str] = pickle.load(self._process.stdout)  # our own process wrote it
        return answer


class _Processes:
    """A few processes, started when they are needed and kept."""

    def __init__(self) -> None:
        self._permits = BoundedSemaphore(MOST_PROCESSES)
        self._idle: list[_Process] = []
        self._lock = Lock()
        atexit.register(self._end)

    def answer(self, info: str, job: _Job, seconds: float) -> tuple[str | None, str]:
        """Let one of them compile."""
        try:
            with self._permits, self._one() as process:
                return process.answer(info, job, seconds)
        except (EOFError, OSError, pickle.UnpicklingError):  # a new one has ended before its first answer
            return None, "the process that compiles grammars could not be started"

    @contextmanager
    def _one(self) -> Iterator[_Process]:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is not None and not process.is_alive:
            process.kill()
            process = None
        process = process or _Process()
        try:
            yield process
        finally:
            with self._lock:
                if process.is_alive:
                    self._idle.append(process)

    def _end(self) -> None:
        with self._lock, suppress(Exception):
            for process in self._idle:
                process.kill()


def _readable(reason: str) -> str:
    """Return what xgrammar says, without the time and the place in its sources."""
    found = re.sub(r"\[\d\d:\d\d:\d\d\] \S+\.(cc|h):\d+: ", "", reason)
    found = re.sub(r"^\w+Error: ", "", found)
    return " ".join(found.split()).rstrip(".")


_ANY_JSON = StructuredOutputs(json={})
_processes = _Processes()
