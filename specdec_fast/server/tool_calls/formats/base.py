"""What every format of calls is: :class:`ToolFormat`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from specdec_fast.server.tool_calls.formats.argument_types import argument_schemas, types_of


@dataclass(frozen=True)
class ToolCall:
    """One call that a model has written."""

    name: str
    arguments: str  # JSON
    id: str | None = None  # if the model writes one


class Taken(NamedTuple):
    """What stands at the beginning of a text."""

    calls: list[ToolCall]
    length: int  # characters that were read
    is_frame: bool = False  # whether they are a mark around calls; without calls, other texts are content


@dataclass(frozen=True)
class Tool:
    """A function that a model may call."""

    name: str
    parameters: Any  # a JSON schema

    @cached_property
    def types(self) -> dict[str, frozenset[str]]:
        """The types of the values that each parameter may have."""
        schemas = argument_schemas(self.parameters)
        return {name: types_of(schema, self.parameters) for name, schema in schemas.items()}


class ToolFormat(ABC):
    """How the models of one family write calls.

    Attributes:
        marks: texts with which calls begin.
        inner_marks: texts with which more calls begin, or end, after the first one.
        begins_text: whether a call is one only if nothing but whitespace stands before it.
        has_special_tokens: whether some of the marks are special tokens, which the text must then keep.
        reads_every_answer: whether answers without calls have parts that are not for the user, too.
    """

    marks: tuple[str, ...]
    inner_marks: tuple[str, ...] = ()
    begins_text: bool = False
    has_special_tokens: bool = False
    reads_every_answer: bool = False

    @abstractmethod
    def take(self, text: str, is_last: bool, tools: Sequence[Tool] = ()) -> Taken | None:
        """Read the calls at the beginning of ``text``, which begins with a mark.

        Args:
            text: of an answer, from a mark on.
            is_last: whether no more text comes.
            tools: what may be called. Formats that write arguments as plain texts take their types from the schemas.

        Returns:
            The calls and how much of the text they are; None if more text is needed. If no call stands there, none, and
            the length of what is content.
        """

    @abstractmethod
    def calls(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        """Return the structural tag's format of one call or more, ``most`` at most (1, or None: any number).

        Raises:
            GrammarError: the arguments of a function cannot be guaranteed in this format.
        """

    def free_text(self, tools: list[Tool], most: int | None) -> dict[str, Any]:
        """Return the structural tag's format of any text, in which calls are as ``calls`` has them."""
        return {
            "type": "triggered_tags",
            "triggers": list(self.marks[:1]),
            "tags": [self._tag(tool) for tool in tools],
            "at_least_one": False,
            "stop_after_first": most == 1,
        }

    def content(self, element: dict[str, Any]) -> dict[str, Any]:
        """Return the structural tag's format of an answer without calls whose content follows ``element``."""
        return element

    def check(self, tool: Tool) -> None:
        """Raise GrammarError unless this format can guarantee the arguments of a function, whose schema is checked."""
        self._tag(tool)

    @abstractmethod
    def _tag(self, tool: Tool) -> dict[str, Any]:
        """Return the tag of one call."""

    def call_id(self, unique: str) -> str:
        """Return the id of a call without one, made of 32 hexadecimal digits."""
        return f"call_{unique[:24]}"
