"""From the worker to event loops: one callback per loop and step, whatever the number of requests."""

from __future__ import annotations

from asyncio import AbstractEventLoop, Future
from collections import deque
from dataclasses import replace
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from specdec_fast.results import GenerationOutput, StreamChunk

Item = StreamChunk | GenerationOutput | Exception
_mailboxes: WeakKeyDictionary[AbstractEventLoop, Mailbox] = WeakKeyDictionary()
_lock = Lock()
_T = TypeVar("_T")


class Mailbox:
    """What the worker has for the receivers of one event loop."""

    def __init__(self) -> None:
        self._items: deque[tuple[Receiver, Item]] = deque()
        self._is_scheduled = False

    def post(self, loop: AbstractEventLoop, items: list[tuple[Receiver, Item]]) -> bool:
        """For other threads: let the loop hand out items, and those that wait; return False if it is closed."""
        self._items.extend(items)
        if self._is_scheduled:
            return True
        self._is_scheduled = True
        try:
            loop.call_soon_threadsafe(self._hand_out)
        except RuntimeError:
            return False
        return True

    def _hand_out(self) -> None:
        self._is_scheduled = False  # before the items: one that comes now may be handed out here or once more
        for _ in range(len(self._items)):
            receiver, item = self._items.popleft()
            receiver.put(item)


def mailbox_of(loop: AbstractEventLoop) -> Mailbox:
    """Return a loop's mailbox; for any thread."""
    with _lock:
        return _mailboxes.setdefault(loop, Mailbox())


class Receiver:
    """Where one request's items arrive, in the thread of its event loop.

    Chunks of a text that have not been read are merged into one, so a slow reader keeps no more than its own tokens.
    """

    def __init__(self, loop: AbstractEventLoop) -> None:
        self.loop = loop
        self.mailbox = mailbox_of(loop)
        self._items: dict[int | None, Item] = {}  # by text, the one that came first before the others; None: an error
        self._waiter: Future[None] | None = None

    def put(self, item: Item) -> None:
        """Keep an item for ``get``."""
        text = None if isinstance(item, Exception) else item.choice
        held = self._items.get(text)
        if isinstance(held, StreamChunk) and isinstance(item, StreamChunk):
            item = merged(held, item)
        self._items[text] = item
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        """Return what has come of one text since it was last returned, or wait; raise it if it is an exception."""
        while not self._items:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._items.pop(next(iter(self._items)))
        if isinstance(item, Exception):
            raise item
        return item


def merged(first: StreamChunk, second: StreamChunk) -> StreamChunk:
    """Return two successive chunks of a request as one."""
    return replace(
        first,  # it has the scores of the prompt
        token_ids=first.token_ids + second.token_ids,
        text=None if first.text is None or second.text is None else first.text + second.text,
        finish_reason=second.finish_reason,
        error=second.error,
        logprobs=_joined(first.logprobs, second.logprobs),
        top_logprobs=_joined(first.top_logprobs, second.top_logprobs),
    )


def _joined(first: list[_T] | None, second: list[_T] | None) -> list[_T] | None:
    return None if first is None or second is None else first + second
