"""A table from ATen operations to what is written down for them."""

from __future__ import annotations

from collections.abc import Callable

# Takes the tape, the result that PyTorch computed, and then the operation's own arguments.
Handler = Callable[..., None]


class Lowerings(dict[str, Handler]):
    """Handlers by the name of the operation, overload included, as in ``"mul.Tensor"``."""

    def entry(self, *names: str) -> Callable[[Handler], Handler]:
        """Enter the decorated function under these names."""

        def enter(handler: Handler) -> Handler:
            self.update(dict.fromkeys(names, handler))
            return handler

        return enter
