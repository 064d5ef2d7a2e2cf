"""Files that come with the package."""

from __future__ import annotations

from pathlib import Path


def demo_pair() -> Path:
    """Return the folder of the bundled pair: ``target/``, ``draft/``, ``prompts.jsonl`` and its model card.

    ``eagle3/`` is an EAGLE-3 drafter for the target.
    """
    return Path(__file__).parent / "demo_pair"
