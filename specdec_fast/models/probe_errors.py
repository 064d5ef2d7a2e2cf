"""What a model's own code raises while it is probed, as one typed error that says where."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from specdec_fast.errors import SpecDecError, UnsupportedModelError


@contextmanager
def named_failures(model: nn.Module) -> Iterator[None]:
    """Turn whatever is raised, but for this library's own errors, into one that names the submodule and the cause.

    Args:
        model: a model that is probed inside.

    Raises:
        UnsupportedModelError: something was raised.

    """
    try:
        yield
    except SpecDecError:
        raise
    except Exception as error:
        where = _innermost(model, error)
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot run on a paged KV cache: {f'in {where}: ' if where else ''}"
            f"{type(error).__name__}: {error}"
        ) from error


def _innermost(model: nn.Module, error: Exception) -> str:
    """Return the name of the deepest submodule whose method was running; empty if none was."""
    names = {id(module): name for name, module in model.named_modules()}
    found, step = "", error.__traceback__
    while step is not None:
        found = names.get(id(step.tb_frame.f_locals.get("self")), "") or found
        step = step.tb_next
    return found
