"""The process of another rank that works as on a GPU: no programs, graphs, and no memory that ranks share.

Repeated calls take the place of graphs (``repeated.py``).
"""

from __future__ import annotations

from typing import Any

from specdec_fast.program import executors
from specdec_fast.ranks import exchange
from specdec_fast.runner import follower, loading
from specdec_fast.runner.graphs.capture import CAPTURES
from support.repeated import Repeated, graphs_for_cpu


def ranks_as_on_gpus(monkeypatch: Any) -> None:
    """Let all ranks of engines that are made later work as on a GPU."""
    graphs_for_cpu(monkeypatch)
    monkeypatch.setattr(exchange, "_has_extension", lambda: False)
    monkeypatch.setattr(loading, "_FOLLOWER", __name__)


def main(*given: int) -> None:
    """Do what the process of another rank does."""
    executors.EXECUTORS.clear()
    CAPTURES["cpu"] = Repeated
    exchange._has_extension = lambda: False
    follower.main(*given)
