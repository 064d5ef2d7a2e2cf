"""Result files: one JSON object for every line of an input file, written when it is there, and completed later."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from specdec_fast.commands.only_writer import only_writer
from specdec_fast.commands.prompt_files import BadLineError, parse_json
from specdec_fast.errors import ConfigError, OutputError


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """Add --output, --resume and --overwrite."""
    parser.add_argument("--output", required=True, type=Path, metavar="FILE.jsonl", help="one result per input line")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="keep the results in --output and add the others")
    existing.add_argument("--overwrite", action="store_true", help="replace the content of --output")


@contextmanager
def reserved_output(args: argparse.Namespace, source: Path) -> Iterator[None]:
    """Check --output before the models are loaded, and keep other commands from writing it while the block runs.

    Raises ConfigError if it is the input file, by whatever name; if another command writes it; if it has content, and
    neither --resume nor --overwrite says what to do with it; or if it cannot be written.
    """
    output: Path = args.output
    if output.is_file() and output.samefile(source):
        raise ConfigError(f"--output {output} is the input file {source}; choose another file.")
    with only_writer(output):
        if output.is_file() and output.stat().st_size and not (args.resume or args.overwrite):
            raise ConfigError(
                f"--output {output} has content; pass --resume to keep its results and add the others, or --overwrite."
            )
        yield


def report_interrupt(command: str, output: Path, num_done: int, num_lines: int) -> int:
    """Say what an interrupted command has left; return its exit status, as a shell has it."""
    counts = f"{num_done} of {num_lines} results are in {output}"
    print(f"specdec-fast {command}: interrupted; {counts}, and --resume adds the others.", file=sys.stderr)
    return 130


class ResultFile:
    """The results of the lines of an input file, for a ``with`` block.

    A result is appended when it is there, so a process that is killed loses none. When the block ends without an
    exception, the file is put in the order of the input, with the last result of every line; a pipe is not.

    Args:
        path: of the file.
        resume: whether to keep what it has; a ConfigError if that is other than results of the input.
        number_of: returns the number of the input line of which a kept object is the result, or None if that line is to
            be repeated; it raises BadLineError for an object that is no result of the input.
        beginning: with which every result begins, so that a line cut short is not taken for one of another file.
    """

    def __init__(self, path: Path, resume: bool, number_of: Callable[[Any], int | None], beginning: bytes) -> None:
        self._path = path
        self._beginning = beginning
        self._places: dict[int, tuple[int, int]] = {}  # by input line: where its last result begins, and its bytes
        self._end = 0  # bytes of whole lines
        self._lacks_newline = False
        if resume and path.is_file():
            self._read(number_of)

    @property
    def done(self) -> set[int]:
        """The numbers of the input lines that have a result."""
        return set(self._places)

    def add(self, number: int, record: dict[str, Any]) -> None:
        """Write the result of an input line. Raises OutputError if it cannot be written, as when the disk is full."""
        line = _as_line(record)
        with self._named_failures():
            self._file.write(line)
            self._file.flush()
        self._places[number] = self._end, len(line)
        self._end += len(line)

    def __enter__(self) -> ResultFile:
        """Open the file; what a killed process wrote of its last result is removed."""
        is_kept = self._end > 0
        self._file = self._path.open("r+b" if is_kept else "wb")
        if is_kept:
            self._file.truncate(self._end)
            self._file.seek(self._end)
            if self._lacks_newline:
                with self._named_failures():
                    self._end += self._file.write(b"\n")
                    self._file.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; put it in order if all is well. Raises OutputError if it cannot; it has all results then."""
        if kind is not None:
            with suppress(OSError):  # close() writes again what could not be written before
                self._file.close()
            return
        with self._named_failures():
            self._file.close()
            if self._path.is_file():
                self._put_in_order()

    @contextmanager
    def _named_failures(self) -> Iterator[None]:
        """Let an error of the operating system say which file it concerns and what to do."""
        try:
            yield
        except BrokenPipeError:  # what reads the results has left
            raise
        except OSError as error:
            raise OutputError(
                f"cannot write {str(self._path)!r}: {error.strerror or error}. If its disk is full, free space; then "
                f"run the command again with --resume, which adds the others to the {len(self.done)} results in it."
            ) from error

    def _read(self, number_of: Callable[[Any], int | None]) -> None:
        with self._path.open("rb") as lines:
            for count, line in enumerate(lines, start=1):
                try:
                    number = number_of(parse_json(line)) if line.strip() else None
                except BadLineError as error:
                    if self._is_cut_short(line):
                        return
                    raise ConfigError(
                        f"{self._path}, line {count}: {error}; --resume needs results of the same input (--overwrite "
                        "replaces the file)."
                    ) from None
                if number is not None:
                    self._places[number] = self._end, len(line)
                self._end += len(line)
                self._lacks_newline = not line.endswith(b"\n")

    def _is_cut_short(self, line: bytes) -> bool:
        """Return whether a process was killed while it wrote this line: no other file may lose its content."""
        if line.endswith(b"\n") or not line.startswith(self._beginning[: len(line)]):
            return False
        try:
            parse_json(line)
        except BadLineError:
            return True
        return False

    def _put_in_order(self) -> None:
        places = [self._places[number] for number in sorted(self._places)]
        ends = [start + size for start, size in places]
        if [start for start, _ in places] == [0, *ends[:-1]] and ends[-1] == self._end:
            return
        path = self._path.resolve()  # so that a link still leads to the file
        with (
            self._path.open("rb") as source,
            tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=f".{path.name}.", delete=False) as ordered,
        ):
            try:
                for start, size in places:
                    source.seek(start)
                    ordered.write(source.read(size).rstrip(b"\n") + b"\n")
                ordered.flush()
                os.fsync(ordered.fileno())
                shutil.copymode(path, ordered.name)
                os.replace(ordered.name, path)
            except BaseException:
                os.unlink(ordered.name)
                raise


def _as_line(record: dict[str, Any]) -> bytes:
    try:
        return (json.dumps(record, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half of a surrogate pair, in a copied id or in an error
        return (json.dumps(record) + "\n").encode()
