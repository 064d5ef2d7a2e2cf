"""The only door to a kernel: ops are declared once and implemented per backend.

An :class:`Op` names its implementations as import paths, so nothing is imported before it is chosen. ``resolve``
chooses once, by device or by an explicit name; no other module compares a backend's name. Tests and benchmarks
sweep ``all_ops()``: an implementation added to a declaration is tested and timed without writing either.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec_fast.errors import BackendError, ConfigError

AUTO = "auto"
_DECLARATIONS = ("append_kv", "paged_attention", "verify_chain", "linear", "grouped_linear", "compact_kv", "realign_kv")
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"  # Triton kernels then run on the CPU, as NumPy
# What "auto" takes, best first; "torch" runs anywhere. FlashAttention refuses too much (fp32, most page sizes) and
# promises too little (in which order it adds) to be taken unasked.
_PREFERENCE = {"cpu": ("cpp", "torch"), "cuda": ("triton", "torch")}


@dataclass(frozen=True)
class Backend:
    """A way to run ops.

    Attributes:
        name: what ``EngineConfig.backend`` and ``specdec-fast doctor`` call it.
        device_types: the ``torch.device`` types it serves.
        why_unavailable: returns None if it can run here, else the reason and the remedy.
        partial: it has some ops only; asked for by name, the others are chosen as by ``"auto"``.
        on_current_device: it launches on the current device, wherever its arguments are.

    """

    name: str
    device_types: tuple[str, ...]
    why_unavailable: Callable[[], str | None]
    partial: bool = False
    on_current_device: bool = False


@dataclass(frozen=True)
class Case:
    """One set of arguments for tests and benchmarks.

    Attributes:
        name: id of the test.
        why: what this case would catch; of a benchmark, what it stands for.
        make: builds the keyword arguments from a seeded generator, a dtype and a device.

    """

    name: str
    why: str
    make: Callable[[torch.Generator, torch.dtype, torch.device], dict[str, Any]]


@dataclass(frozen=True)
class Op:
    """One op, whatever runs it.

    Attributes:
        name: the public name; a trailing underscore says that arguments are changed in place.
        implementations: backend name to ``"module:function"``; all share the oracle's signature.
        check: raises on arguments outside the contract; called before every implementation.
        cases: argument sets that every implementation must serve as the oracle does.
        benchmarks: argument sets of the sizes that serving has, for ``python -m bench.ops``.
        bytes_moved: bytes that must be read or written at least, for given arguments.
        exact: whether implementations must agree bit for bit (integers, copies) or within rounding.
        preference: what "auto" takes on a device type, where it is not the best backend that runs there.
        invariant: implementations that give a row the same bits whatever rows are beside it, by construction.

    """

    name: str
    implementations: Mapping[str, str]
    check: Callable[..., None]
    cases: Callable[[], Iterable[Case]]
    benchmarks: Callable[[], Iterable[Case]]
    bytes_moved: Callable[..., int]
    exact: bool = True
    preference: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    invariant: frozenset[str] = frozenset()

    def load(self, backend: str, check: bool = True) -> Callable[..., Any]:
        """Import the backend's implementation and put the argument check before it, unless told not to.

        Raises:
            BackendError: there is no such implementation, or it cannot run here; the message says why.

        """
        reason = self.why_unavailable(backend)
        if reason is not None:
            raise BackendError(f"backend {backend!r} cannot serve {self.name}: {reason}")
        implementation = _imported(self.implementations[backend])
        if BACKENDS[backend].on_current_device:
            implementation = _on_device_of_arguments(implementation)
        if not check:
            return implementation

        def checked(*args: Any, **kwargs: Any) -> Any:
            self.check(*args, **kwargs)
            return implementation(*args, **kwargs)

        return checked

    def why_unavailable(self, backend: str) -> str | None:
        """Return None if ``backend`` can run this op here, else the reason."""
        if backend not in self.implementations:
            return f"it has no implementation of this op (there are: {', '.join(self.implementations)})"
        return BACKENDS[backend].why_unavailable()


@dataclass(frozen=True)
class Ops:
    """The implementations chosen for one device; each is an attribute under its op's name, such as ``ops.linear``.

    Attributes:
        chosen: op name to backend name, for every op that is served.
        functions: op name to the chosen implementation; see ``oracle/ops/`` for what each computes. One that is not
            served raises a BackendError when it is called.
        unchecked: the same ops without the argument check, for a caller that repeats a checked call on tensors of
            the same shapes (the layers of one forward).

    """

    chosen: Mapping[str, str]
    functions: Mapping[str, Callable[..., Any]] = field(repr=False)
    unchecked: Ops | None = field(repr=False, default=None)

    def __post_init__(self) -> None:
        for name, function in self.functions.items():
            object.__setattr__(self, name, function)  # read as fast as a field, at every layer of every forward

    if TYPE_CHECKING:  # a real one would slow down every other attribute

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def replaced(self, **functions: Callable[..., Any]) -> Ops:
        """Return the same ops with other functions for some."""
        return replace(self, functions={**self.functions, **functions})

    def is_invariant(self, op: str) -> bool:
        """Return whether the implementation of ``op`` gives a row the same bits whatever rows are beside it."""
        return self.chosen.get(op) in all_ops()[op].invariant


def _on_device_of_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the device of the first tensor the current one meanwhile: a model may be on another, such as cuda:1."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(*args, **kwargs)
        with torch.cuda.device(device):
            return function(*args, **kwargs)

    return guarded


@cache
def _compiled_extension_problem() -> str | None:
    try:
        importlib.import_module("specdec_fast._C")
    except ImportError as error:
        return (
            f"the C++ extension is not importable ({error}); reinstall with a C++17 compiler "
            "and without SPECDEC_NO_CPP=1"
        )
    return None


def _triton_problem() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install '.[triton]'"
    if not INTERPRETING and not torch.cuda.is_available():
        return "torch sees no GPU (TRITON_INTERPRET=1 runs the kernels on the CPU, slowly, for tests)"
    return None


def _flash_problem() -> str | None:
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "torch sees no NVIDIA GPU"
    return None


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("cpp", ("cpu",), _compiled_extension_problem),
        Backend("triton", ("cpu",) if INTERPRETING else ("cuda",), _triton_problem, on_current_device=True),
        Backend("flash", ("cuda",), _flash_problem, partial=True),
        Backend("torch", ("cpu", "cuda", "xpu", "mps"), lambda: None),
    )
}


@lru_cache(maxsize=1)
def all_ops() -> dict[str, Op]:
    """Return every op by name: the registry itself, so engines made after an op was entered here know it."""
    modules = (importlib.import_module(f"specdec_fast.ops.{name}") for name in _DECLARATIONS)
    return {module.OP.name: module.OP for module in modules}


def resolve(device: torch.device, backend: str = AUTO) -> Ops:
    """Choose an implementation of every op for ``device``.

    Args:
        device: where the tensors live.
        backend: ``"auto"`` takes per op the best that runs here; a name takes that one for all ops that it has. The
            other ops raise a BackendError when they are called, not before: a model may need none of them.

    Raises:
        ConfigError: no such backend.
        BackendError: the named backend cannot run here; the message says why.

    """
    if backend != AUTO and backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r}: expected one of {', '.join([AUTO, *BACKENDS])}.")
    chosen, missing = {}, {}
    for op in all_ops().values():
        fills_in = backend != AUTO and BACKENDS[backend].partial and backend not in op.implementations
        choice = _best(op, device) if backend == AUTO or fills_in else backend
        if choice not in op.implementations:
            missing[op.name] = _not_served(op, device, backend)
            continue
        chosen[op.name] = choice
        served = BACKENDS[choice].device_types
        if device.type not in served:
            raise BackendError(
                f"backend {backend!r} serves {', '.join(served)}, not {device.type}; pass backend='{AUTO}'."
            )
    unchecked = Ops(chosen, _load(chosen, check=False) | missing)
    return Ops(chosen, _load(chosen, check=True) | missing, unchecked)


def _load(chosen: Mapping[str, str], check: bool) -> dict[str, Callable[..., Any]]:
    return {name: all_ops()[name].load(choice, check) for name, choice in chosen.items()}


def _not_served(op: Op, device: torch.device, backend: str) -> Callable[..., Any]:
    """Return what stands for an op that ``backend`` lacks."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        there_are = f"there are: {', '.join(op.implementations)}"
        if backend == AUTO:
            raise BackendError(f"no implementation of {op.name} runs on {device.type} here ({there_are}).")
        raise BackendError(
            f"backend {backend!r} has no implementation of {op.name} ({there_are}); pass backend='{AUTO}'."
        )

    return fail


def _imported(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def _best(op: Op, device: torch.device) -> str:
    preferred = op.preference.get(device.type, _PREFERENCE.get(device.type, ()))
    serving = (name for name in preferred if device.type in BACKENDS[name].device_types)
    return next((name for name in serving if op.why_unavailable(name) is None), "torch")


def availability() -> list[tuple[str, str, str | None]]:
    """Return (op, backend, reason) for every pair; the reason is None where the backend can run the op here."""
    return [(op.name, name, op.why_unavailable(name)) for op in all_ops().values() for name in BACKENDS]
