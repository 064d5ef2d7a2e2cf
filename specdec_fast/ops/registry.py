"""The registry of ops: each op is declared once and implemented per backend.

An :class:`Op` names its implementations as import paths, so the chosen implementation alone is imported. ``resolve``
chooses once, by device or by an explicit name; no other module compares a backend's name. Tests and benchmarks cover
every implementation that a declaration names.
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
_DECLARATIONS = ("append_kv", "paged_attention", "verify_chain", "noise_words",
                 "linear", "quantized_linear", "grouped_linear", "grouped_quantized_linear", "compact_kv", "realign_kv",
                 "conv_rows", "linear_attention_rows", "selective_scan_rows")  # fmt: skip
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"  # Triton kernels then run on the CPU, as NumPy
# The backends that "auto" chooses from, best first; "torch" runs anywhere. "auto" never chooses FlashAttention: it
# supports neither fp32 nor most page sizes, and does not document the order of its sums.
_PREFERENCE = {"cpu": ("cpp", "torch"), "cuda": ("triton", "torch")}


@dataclass(frozen=True)
class Backend:
    """One way to run ops."""

    name: str  # its name in EngineConfig.backend and specdec-fast doctor
    device_types: tuple[str, ...]  # the torch.device types that it runs on
    why_unavailable: Callable[[], str | None]  # returns None if it can run here, else the reason and the remedy
    partial: bool = False  # whether it has some ops only; if it is named explicitly, "auto" chooses the other ops
    on_current_device: bool = False  # whether it launches on the current device instead of the device of its arguments


@dataclass(frozen=True)
class Op:
    """One op, independent of its backends."""

    name: str  # the public name; a trailing underscore says that the op changes arguments in place
    implementations: Mapping[str, str]  # backend name to "module:function"; all have the oracle's signature
    check: Callable[..., None]  # raises on arguments outside the contract; called before every implementation
    exact: bool = True  # whether implementations must agree bit for bit (integers, copies) or within rounding
    # arguments that an op which is not exact changes in place within rounding; what it changes of others is exact
    rounded: tuple[str, ...] = ()
    # device type, and dtype if there is one, to the backends that "auto" chooses from, where the general order does not
    # hold
    preference: Mapping[tuple[str, torch.dtype | None], tuple[str, ...]] = field(default_factory=dict)
    # backends whose implementation gives a row the same bits whatever the other rows, by construction
    invariant: frozenset[str] = frozenset()
    # backends whose implementation gives a row of a tree the bits that it has alone in the chain of its path
    trees: frozenset[str] = frozenset()

    def load(self, backend: str, check: bool = True) -> Callable[..., Any]:
        """Import an implementation, and add the argument check if ``check``; a BackendError says why there is none."""
        reason = self.why_unavailable(backend)
        if reason is not None:
            raise BackendError(f"backend {backend!r} cannot serve {self.name}: {reason}")
        implementation = _imported(self.implementations[backend])
        if BACKENDS[backend].on_current_device:
            implementation = _on_device_of_arguments(implementation)
        if not check:
            return implementation

        device_types = BACKENDS[backend].device_types

        def checked(*args: Any, **kwargs: Any) -> Any:
            self.check(*args, **kwargs)
            if (device := _device_of(args, kwargs)).type not in device_types:  # an address there means nothing here
                raise ValueError(
                    f"{self.name} got tensors on {device}; backend {backend!r} runs on {', '.join(device_types)}."
                )
            return implementation(*args, **kwargs)

        return checked

    def why_unavailable(self, backend: str) -> str | None:
        """Return None if ``backend`` can run this op here, else the reason."""
        if backend not in self.implementations:
            return f"it has no implementation of this op (there are: {', '.join(self.implementations)})"
        return BACKENDS[backend].why_unavailable()


@dataclass(frozen=True)
class Ops:
    """The implementations chosen for one device; each is an attribute under its op's name, such as ``ops.linear``."""

    chosen: Mapping[str, str]  # op name to backend name, for every op that has an implementation here
    # op name to the chosen implementation; ``ops/`` defines the result of each. For an op without an implementation, a
    # function that raises a BackendError.
    functions: Mapping[str, Callable[..., Any]] = field(repr=False)
    # the same ops without the argument check; None: these have none
    unchecked: Ops | None = field(repr=False, default=None)

    def __post_init__(self) -> None:
        for name, function in self.functions.items():
            object.__setattr__(self, name, function)  # every layer of every forward reads it, so it must be fast

    if TYPE_CHECKING:  # for mypy only: at run time it would slow down every other attribute

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    @property
    def without_checks(self) -> Ops:
        """The ops for a caller that has checked tensors of the same shapes before, as for the layers of one forward."""
        return self.unchecked or self

    def replaced(self, **functions: Callable[..., Any]) -> Ops:
        """Return the same ops with other functions for some."""
        return replace(self, functions={**self.functions, **functions})

    def is_invariant(self, op: str) -> bool:
        """Return whether the chosen implementation of ``op`` gives a row the same bits whatever the other rows."""
        return self.chosen.get(op) in all_ops()[op].invariant

    def has_trees(self, op: str) -> bool:
        """Return whether the chosen implementation of ``op`` gives a tree's rows the bits of their paths' chains."""
        return self.chosen.get(op) in all_ops()[op].trees


@dataclass(frozen=True)
class OpsOfDevices(Ops):
    """Ops for tensors of several types of devices: each call runs what was chosen for the device of its tensors."""

    by_type: Mapping[str, Ops] = field(default_factory=dict, repr=False)

    def is_invariant(self, op: str) -> bool:
        """Return whether this holds on every type of device."""
        return all(ops.is_invariant(op) for ops in self.by_type.values())

    def has_trees(self, op: str) -> bool:
        """Return whether this holds on every type of device."""
        return all(ops.has_trees(op) for ops in self.by_type.values())


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    return next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _on_device_of_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        device = _device_of(args, kwargs)
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
    """Return every op by name. The dict is the registry: an op added to it is known to engines made afterwards."""
    modules = (importlib.import_module(f"specdec_fast.ops.{name}") for name in _DECLARATIONS)
    return {module.OP.name: module.OP for module in modules}


def resolve(device: torch.device, backend: str = AUTO, dtype: torch.dtype | None = None) -> Ops:
    """Choose an implementation of every op for ``device``.

    ``"auto"`` chooses per op the best backend that runs here, for numbers of ``dtype`` if it is given. The name of a
    backend chooses it for all ops that it has; the other ops raise a BackendError when they are called, because a model
    may need none. Raises ConfigError if there is no such backend, BackendError with the reason if it cannot run here.
    """
    if backend != AUTO and backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r}: expected one of {', '.join([AUTO, *BACKENDS])}.")
    chosen = {}
    missing = {}
    for op in all_ops().values():
        is_left_to_auto = backend != AUTO and BACKENDS[backend].partial and backend not in op.implementations
        choice = _best(op, device, dtype) if backend == AUTO or is_left_to_auto else backend
        if choice not in op.implementations:
            missing[op.name] = _missing(op, device, backend)
            continue
        chosen[op.name] = choice
        device_types = BACKENDS[choice].device_types
        if device.type not in device_types:
            raise BackendError(
                f"backend {backend!r} runs on {', '.join(device_types)}, not {device.type}; pass backend='{AUTO}'."
            )
    unchecked = Ops(chosen, _load(chosen, check=False) | missing)
    return Ops(chosen, _load(chosen, check=True) | missing, unchecked)


def resolve_all(devices: Iterable[torch.device], backend: str = AUTO, dtype: torch.dtype | None = None) -> Ops:
    """Choose an implementation of every op for each of several devices; see ``resolve``.

    The result's ``chosen`` names the backends of an op, one for each type of device.
    """
    by_type = {device.type: resolve(device, backend, dtype) for device in devices}
    if len(by_type) == 1:
        return next(iter(by_type.values()))
    unchecked = {type_: ops.without_checks for type_, ops in by_type.items()}
    chosen = {
        op: ", ".join(dict.fromkeys(ops.chosen[op] for ops in by_type.values()))
        for op in all_ops()
        if all(op in ops.chosen for ops in by_type.values())
    }
    return OpsOfDevices(
        chosen, _dispatched(by_type), OpsOfDevices(chosen, _dispatched(unchecked), by_type=unchecked), by_type=by_type
    )


def _dispatched(by_type: Mapping[str, Ops]) -> dict[str, Callable[..., Any]]:
    def for_device(name: str) -> Callable[..., Any]:
        functions = {type_: ops.functions[name] for type_, ops in by_type.items()}

        def dispatched(*args: Any, **kwargs: Any) -> Any:
            return functions[_device_of(args, kwargs).type](*args, **kwargs)

        return dispatched

    return {name: for_device(name) for name in all_ops()}


def _load(chosen: Mapping[str, str], check: bool) -> dict[str, Callable[..., Any]]:
    return {name: all_ops()[name].load(choice, check) for name, choice in chosen.items()}


def _missing(op: Op, device: torch.device, backend: str) -> Callable[..., Any]:

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


def _best(op: Op, device: torch.device, dtype: torch.dtype | None) -> str:
    preferred = op.preference.get((device.type, dtype), _PREFERENCE.get(device.type, ()))
    candidates = (name for name in preferred if device.type in BACKENDS[name].device_types)
    return next((name for name in candidates if op.why_unavailable(name) is None), "torch")


def availability() -> list[tuple[str, str, str | None]]:
    """Return (op, backend, reason) for every pair; the reason is None where the backend can run the op here."""
    return [(op.name, name, op.why_unavailable(name)) for op in all_ops().values() for name in BACKENDS]
