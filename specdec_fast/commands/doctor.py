"""Show versions, devices, and which backend can run which op here."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

import torch

from specdec_fast.commands.common import format_table
from specdec_fast.ops import BACKENDS, availability, resolve

_PACKAGES = ("specdec-fast", "torch", "transformers", "triton", "flash-attn", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(", ".join(f"{name} {_version(name)}" for name in _PACKAGES))
    print(f"cpu: {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        print(f"cuda:{i}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{_capability(i)}")
    print()
    pairs = availability()
    rows = [
        [name, *("no" if problem else "yes" for op, _, problem in pairs if op == name)]
        for name in dict.fromkeys(op for op, _, _ in pairs)
    ]
    print(format_table(["op", *BACKENDS], rows))
    for device in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        chosen = resolve(torch.device(device)).chosen
        print(f"\nchosen on {device}: " + ", ".join(f"{op} {backend}" for op, backend in chosen.items()))
    for op, backend, problem in pairs:
        if problem:
            print(f"no: {op} x {backend}: {problem}")
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _capability(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"{major}{minor}"
