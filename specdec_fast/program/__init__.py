"""Forward programs: a model's forward as a list of steps that C++ runs in one call.

A Hugging Face forward has about sixty small operations per layer, each of which costs microseconds of Python and
dispatch. For small models and few rows that is most of the time. So the model runs twice, on batches of different size,
while a tracer records every operation on its rows (``tracer.py``, on a ``tape.py``). If both recordings are the same
instructions, these compute the model's forward for any batch. ``memory_plan.py`` gives their buffers memory, and an
executor builds the program.
"""

from __future__ import annotations

from specdec_fast.program.compile import RowFunction, compile_forward, compile_rows
from specdec_fast.program.row_views import NotLowerableError

__all__ = ["NotLowerableError", "RowFunction", "compile_forward", "compile_rows"]
