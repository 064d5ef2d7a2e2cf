"""Show versions, devices, and which backend can run which op here; or check the taps of a drafter."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch

from specdec_fast.assets import demo_pair
from specdec_fast.commands.common import add_backend_options, add_tap_layers, backend_settings, format_table
from specdec_fast.commands.prompt_files import read_prompts
from specdec_fast.commands.tap_offsets import agreements, better
from specdec_fast.config import EngineConfig
from specdec_fast.errors import ConfigError
from specdec_fast.models.loading import load_model
from specdec_fast.ops import BACKENDS, availability, resolve

_PACKAGES = ("specdec-fast", "torch", "transformers", "triton", "flash-attn", "numpy")
_NUM_TOKENS = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the check of a drafter's taps."""
    taps = parser.add_argument_group("taps", "compare a drafter's taps with those beside them, instead of the report")
    taps.add_argument("--drafter", metavar="D", help="as --draft of generate: eagle3:FOLDER, or the folder")
    taps.add_argument("--target", help="name or folder of its target")
    taps.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="(default: those of the bundled pair)")
    taps.add_argument("--num-tokens", type=int, metavar="N", help=f"tokens to write (default: {_NUM_TOKENS})")
    taps.add_argument("--dtype", default=None, help="of the target (default: the checkpoint's)")
    add_tap_layers(taps)
    add_backend_options(taps)


def run(args: argparse.Namespace) -> int:
    """Print the report. With --drafter, exit status 1 if it agrees more often at other taps."""
    if args.drafter or args.target:
        return _check_taps(args)
    for option in ("prompts", "num_tokens", "dtype", "tap_layers"):
        if getattr(args, option) is not None:
            raise ConfigError(
                f"--{option.replace('_', '-')} is for the check of a drafter; pass --drafter and --target."
            )
    _report()
    return 0


def _check_taps(args: argparse.Namespace) -> int:
    if not (args.drafter and args.target):
        raise ConfigError("--drafter and --target belong together: a drafter is checked against its target.")
    config = EngineConfig(
        **backend_settings(args),
        tap_layers=args.tap_layers,
    )
    prompts = _prompts(args.prompts or demo_pair() / "prompts.jsonl")
    num_tokens = _NUM_TOKENS if args.num_tokens is None else args.num_tokens
    target = load_model(args.target, EngineConfig(dtype=args.dtype).dtype, config.device)  # type: ignore[arg-type]
    measured = agreements(target, args.drafter, config, prompts, num_tokens)
    rows = [(f"{a.offset:+}", ",".join(map(str, a.taps)), f"{a.rate:.1%}", a.num_drafts) for a in measured]
    print(format_table(("offset", "layers", "agreement", "draft tokens"), rows))
    other = better(measured)
    if other is None:
        return 0
    layers = ",".join(map(str, other.taps))
    print(f"\nwarning: the drafter agrees more often at offset {other.offset:+}; pass --tap-layers {layers}")
    return 1


def _prompts(path: Path) -> list[Any]:
    lines = read_prompts(path)
    for line in lines:
        if line.problem is not None:
            raise ConfigError(f"{path.name}, line {line.number}: {line.problem}")
    return [line.prompt for line in lines]


def _report() -> None:
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


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _capability(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"{major}{minor}"
