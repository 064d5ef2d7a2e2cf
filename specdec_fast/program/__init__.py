"""Forward programs: a model's forward as instructions, which C++ runs in one call and a GPU as few launches.

A Hugging Face forward has about sixty small operations per layer, each of which costs microseconds of Python and
dispatch. For small models and few rows that is most of the time. So the model runs twice, on batches of different size,
while a tracer records every operation on its rows (``record/tracer.py``, on ``record/tape.py``). If both recordings are
the same instructions (``plan/ir.py``), these compute the model's forward for any batch. ``plan/memory.py`` gives their
buffers memory, and an executor builds the program: ``cpp/executor.py`` or ``triton/executor.py``. Wherever something is
noticed that a program cannot express, a NotLowerableError is raised; PyTorch runs the model then.
"""

from __future__ import annotations

from specdec_fast.program.compile import RowFunction, compile_forward, compile_rows
from specdec_fast.program.record.row_views import NotLowerableError

__all__ = ["NotLowerableError", "RowFunction", "compile_forward", "compile_rows"]
