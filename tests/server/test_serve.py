"""The command within this process: what holds while it serves."""

from __future__ import annotations

import gc

from specdec_fast.assets import demo_pair
from specdec_fast.cli import main
from specdec_fast.commands import serve


def test_the_garbage_collector_passes_over_the_models_while_they_are_served(monkeypatch):
    counts = [gc.get_freeze_count()]

    async def served(app, engine, listener, args):
        counts.append(gc.get_freeze_count())
        await engine.close()

    monkeypatch.setattr(serve, "_serve", served)
    assert main(["serve", "--target", str(demo_pair() / "target"), "--draft", "none", "--port", "0"]) == 0
    before, during, after = *counts, gc.get_freeze_count()
    assert during > before, "a full collection looks at every object of torch and the models"
    assert after <= before
