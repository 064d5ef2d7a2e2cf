"""What every benchmark reports: the machine, one JSON line at the end, a plot on request."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from specdec_fast.speculation_length import LENGTH_POLICIES

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def rounded(value: Any) -> Any:
    """Return plain values for JSON, with floats to four digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def integers(text: str) -> list[int]:
    """Parse ``2,4,8``."""
    return [int(part) for part in text.split(",")]


def draft_tokens(text: str) -> list[int | str]:
    """Parse ``3,5,auto``: numbers of draft tokens, or names of policies that choose them."""
    return [part if part in LENGTH_POLICIES else _natural(part) for part in text.split(",")]


def _natural(text: str) -> int:
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected integers from 0 on, or {', '.join(LENGTH_POLICIES)}")
    return int(text)


def probabilities(text: str) -> list[float]:
    """Parse ``0.8,0.4,0``."""
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers from 0 to 1")
    return values


def names(text: str) -> list[str]:
    """Parse ``a,b,c``."""
    return text.split(",")


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add --repeats, --threads, --json and --plot."""
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads of torch and of the C++ ops (default: torch's own choice)")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the result (needs matplotlib)")


def prepare(args: argparse.Namespace) -> None:
    """Set the threads; check before minutes of measuring that a plot can be drawn."""
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.plot:
        pyplot()


def pyplot() -> Any:
    """Import matplotlib for drawing into files, or exit with the remedy."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib; pip install '.[bench]', or leave --plot out.")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def machine(device: torch.device) -> dict[str, Any]:
    """Return a description of the machine."""
    described = {
        "cpu": _cpu_name(),
        "architecture": platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        described["gpu"] = torch.cuda.get_device_name(device)
    return described


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # Linux only; elsewhere Python's own description is used
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def write_json(report: dict[str, Any], path: Path | None) -> None:
    """Print the report as the last line, and write it to ``path`` if there is one; floats to four digits."""
    report = rounded(report)
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
