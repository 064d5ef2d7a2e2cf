"""One run of a model, recorded as instructions while PyTorch computes it.

The recorder intercepts the calls of ATen operations (``TorchDispatchMode``). It follows every tensor that depends on
the rows of the batch. PyTorch computes all other tensors during the run; they are constants. No code names an
architecture: an operation without an entry in ``LOWERED`` ends the recording with ``NotLowerableError``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_fast.program.record import (
    lower_choices,
    lower_complex,
    lower_loops,
    lower_math,
    lower_sums,
    lower_tables,
    lower_views,
)
from specdec_fast.program.record.in_place import changed_in_place
from specdec_fast.program.record.row_views import NotLowerableError
from specdec_fast.program.record.tape import Tape

_TABLES = (lower_views, lower_math, lower_sums, lower_tables, lower_choices, lower_complex, lower_loops)
LOWERED = {name: handler for table in _TABLES for name, handler in table.LOWERED.items()}
# Operations of which PyTorch has two.
_OTHER_NAMES = {
    "absolute": "abs", "divide": "div", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
    "multiply": "mul", "negative": "neg", "not_equal": "ne", "subtract": "sub", "true_divide": "div",
}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Computes every operation of the model, and records on a tape what it does to the rows."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self._is_paused = False
        # Addresses of storages of constants: those used together with rows, and those from which other constants were
        # computed.
        self.met_rows: set[int] = set()
        self.computed_from: set[int] = set()
        self._rewritten: set[int] = set()  # those that the run fills before it reads them: what they held is irrelevant

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._is_paused:
            return result
        constants = [tensor for tensor in _tensors(args, kwargs) if self.tape.value(tensor) is None]
        read = {_address(tensor) for tensor in constants} - self._rewritten
        if len(constants) == len(list(_tensors(args, kwargs))):
            kept = {_address(each) for each in _tensors((result,), {})}  # a view computes nothing
            self.computed_from.update(address for address in read if kept != {address})
            if str(func) == "aten.copy_.default" and _is_whole(args[0]):
                self._rewritten |= kept - self.computed_from - self.met_rows
            return result
        self.met_rows |= read
        self.computed_from.update(read & {_address(tensor) for tensor in constants if tensor.dim() == 0})
        # The program reads weights in place, so that it sees changes; but it must not see what this run writes.
        args = tuple(self._as_it_is(each) for each in args)
        full_name = str(func).removeprefix("aten.").removeprefix("specdec_fast.")
        name, overload = full_name.split(".")
        in_place = name.endswith("_") and not name.endswith("__") and full_name not in LOWERED
        base = name[:-1] if in_place else name
        handler = LOWERED.get(f"{_OTHER_NAMES.get(base, base)}.{overload}")
        if handler is None or (in_place and self.tape.value(args[0]) is None):
            raise NotLowerableError(f"{func} has no counterpart in a forward program")
        before = self.tape.value(args[0]) if in_place else None
        try:
            instead = handler(self.tape, result, *args, **kwargs)
        except NotLowerableError as error:
            raise NotLowerableError(f"{func}: {error}") from error
        if in_place:  # `result` is the first argument, which has a new value from now on
            changed_in_place(self.tape, args[0], before)
        return result if instead is None else instead

    def _as_it_is(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            is_written = self.tape.value(value) is None and _address(value) in self._rewritten
            return value.clone() if is_written else value
        return [self._as_it_is(item) for item in value] if isinstance(value, (list, tuple)) else value

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Compute without recording."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))
