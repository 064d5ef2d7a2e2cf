"""The progress bar of a call: requests done, tokens so far."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm.auto import tqdm

from specdec_fast.errors import ConfigError


class Progress:
    """A tqdm bar over requests, with tokens per second beside it; it shows nothing if ``show`` is False.

    Args:
        num_requests: length of the bar.
        show: None shows the bar if stderr is a terminal.

    Raises:
        ConfigError: ``show`` is neither a bool nor None.

    Attributes:
        is_shown: whether the bar is shown.

    """

    def __init__(self, num_requests: int, show: bool | None) -> None:
        if not isinstance(show, bool) and show is not None:
            raise ConfigError(f"progress={show!r}: expected True, False or None.")
        stderr = sys.stderr  # None in a process without a console; or the caller's own, which may have `write` only
        is_open = stderr is not None and not getattr(stderr, "closed", False)
        is_terminal = is_open and hasattr(stderr, "isatty") and stderr.isatty()
        shown = is_terminal if show is None else is_open and show
        self.is_shown = bool(shown)
        self._bar = tqdm(total=num_requests, desc="generate", unit="request", disable=not shown)
        self._num_tokens = 0

    def update(self, num_tokens: int, finished: bool) -> None:
        """Count the tokens that one sequence emitted, and the sequence itself when it has ended."""
        self._num_tokens += num_tokens
        if finished and not self._bar.disable:
            elapsed = self._bar.format_dict["elapsed"]
            self._bar.set_postfix_str(f"{self._num_tokens / max(elapsed, 1e-9):.0f} tokens/s", refresh=False)
            self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
