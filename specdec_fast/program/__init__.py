"""Forward programs: a model's forward as a list of steps that C++ runs in one call.

A Hugging Face forward is some sixty small operations a layer, each of which costs microseconds of Python and dispatch:
for small models and few rows that is most of the time. So a model is run twice on batches of different size while
every operation on its rows is written down (``tracer.py``, on a ``tape.py``); if both runs boil down to the same
instructions, these are the model's forward for any batch, and are laid out in memory (``memory_plan.py``) and built.
"""

from __future__ import annotations

from specdec_fast.program.compile import compile_forward
from specdec_fast.program.row_views import NotLowerableError

__all__ = ["NotLowerableError", "compile_forward"]
