"""A kernel that computes nothing, for tests of launchers."""

from __future__ import annotations

from typing import Any


class Noted:
    """Replaces the kernel, and notes grids and arguments."""

    def __init__(self) -> None:
        self.grids: list[int] = []
        self.args: tuple[Any, ...] = ()

    def __getitem__(self, grid: tuple[int]) -> Any:
        self.grids.append(grid[0])

        def launch(*args: Any, **options: Any) -> None:
            self.args = args

        return launch
