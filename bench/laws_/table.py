"""The file of ``bench.laws``: it grows by one drafter at a time, and a later call goes on with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from bench.common import report
from bench.laws_.points import Grid, GridSettings
from specdec_fast.errors import ConfigError
from specdec_fast.whole_files import replaced

KEYS = ("layers", "training_tokens", "seed")


class GridTable:
    """Points and costs of one grid, kept in ``path``.

    Raises ConfigError if the file there cannot be read, or is of other settings.
    """

    def __init__(self, path: Path, settings: GridSettings, command: str, machine: dict[str, Any]) -> None:
        self._path = path
        shared = report.rounded({**asdict(settings), "target": Path(settings.target).name})
        self.data: dict[str, Any] = {
            "command": command,
            "machine": machine,
            "settings": shared,
            "num_draft_tokens": settings.num_draft_tokens,
            "points": [],
            "costs": [],
        }
        if path.exists():
            self._read(shared)

    def _read(self, shared: dict[str, Any]) -> None:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            before, points, costs = found["settings"], found["points"], found["costs"]
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--json {self._path}: no table of this command ({error!r}); delete it, or name another."
            ) from None
        if others := [name for name, value in shared.items() if before.get(name) != value]:
            raise ConfigError(f"--json {self._path}: of other settings ({', '.join(others)}); name another file.")
        self.data |= {"points": points, "costs": costs}

    def missing(self, layers: list[int], training_tokens: list[int], seeds: list[int]) -> Iterator[tuple[int, ...]]:
        """Yield the (layers, tokens, seed) that the file lacks: all of the first seed, then of the next."""
        done = {tuple(point[key] for key in KEYS) for point in self.data["points"]}
        for seed, tokens, number in product(seeds, training_tokens, layers):
            if (number, tokens, seed) not in done:
                yield number, tokens, seed

    def add(self, point: dict[str, Any]) -> None:
        """Add a drafter's point, and write the file."""
        self.data["points"] = sorted(
            [*self.data["points"], report.rounded(point)], key=lambda each: [each[key] for key in KEYS]
        )
        self.save()

    def time_forwards(self, grid: Grid, layers: list[int], batch_sizes: list[int]) -> None:
        """Time the forwards of the drafters whose costs are missing, and write the file."""
        known = {each["layers"] for each in self.data["costs"]}
        self.data["costs"] += [grid.forward_seconds(number, batch_sizes) for number in layers if number not in known]
        self.save()

    def save(self) -> None:
        """Write the file; an interrupt leaves the one before it."""
        with replaced(self._path) as unfinished:
            text = json.dumps(report.rounded(self.data), indent=1)
            unfinished.write_text(text + "\n", encoding="utf-8")
