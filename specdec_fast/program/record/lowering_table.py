"""A table from ATen operations to the functions that record their instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Its arguments are the tape, the result that PyTorch computed, and the operation's own arguments. It returns what the
# model receives instead of the result; None: the result.
Handler = Callable[..., Any]


class Lowerings(dict[str, Handler]):
    """Handlers by the name of the operation, overload included, as in ``"mul.Tensor"``."""

    def entry(self, *names: str) -> Callable[[Handler], Handler]:
        """Register the decorated function under these names."""

        def enter(handler: Handler) -> Handler:
            self.update(dict.fromkeys(names, handler))
            return handler

        return enter
