"""Some architectures of ``make sweep``, and the table it writes."""

from __future__ import annotations

import json
import re

import pytest

from bench import sweep
from bench.common.tiny_models import ARCHITECTURES
from support.grids import grid
from support.source_tree import ROOT

DOZEN = (
    "llama", "qwen3", "gemma3_text", "gpt2", "gpt_neox", "mixtral", "olmo2", "phi3", "starcoder2", "cohere", "bloom",
    "mamba", "falcon_h1", "deepseek_v2", "dots1", "hunyuan_v1_moe", "ministral", "lfm2_moe",
)  # fmt: skip
FEW = ("mixtral", "bloom")


@pytest.mark.parametrize("architecture", grid(DOZEN, keep=FEW))
def test_architecture_is_served_right_or_refused(architecture):
    """The verdict is the table's, but whether a program serves it depends on the installation."""
    verdict, why = sweep.examine(architecture)
    written = json.loads((ROOT / "bench/results/models.json").read_text())["architectures"][architecture]["verdict"]
    served = {"program", "pytorch"}
    assert (verdict in served) == (written in served), why
    assert verdict in served | {"refused"}, why
    assert why or verdict == "program"


def test_the_table_has_a_row_for_every_architecture_of_the_results():
    rows = json.loads((ROOT / "bench/results/models.json").read_text())["architectures"]
    written = re.findall(r"^\| (\w[\w-]*) \| ([^|]+) \|", (ROOT / "docs/models.md").read_text(), flags=re.M)
    found = {name: sweep.VERDICTS[row["verdict"]] for name, row in rows.items()}
    assert {name: verdict for name, verdict in written if name != "architecture"} == found
    assert len(found) > 100


@pytest.mark.grid
@pytest.mark.parametrize(
    ("broken", "verdict"),
    [("tokens", "wrong"), ("bits", "wrong"), ("crash", "untyped"), ("hang", "untyped"), ("exit", "untyped")],
)
def test_sweep_reports(broken, verdict, monkeypatch, tmp_path):
    """Wrong tokens, wrong bits, an untyped error, a process that does not end, and one that is gone."""
    if broken == "tokens":
        monkeypatch.setattr(sweep, "transformers_greedy", lambda model, prompt, n: [0] * n)
    elif broken == "bits":
        monkeypatch.setattr(sweep, "logprobs_of", lambda output: object())
    elif broken == "crash":
        monkeypatch.setattr(sweep.sd, "Engine", lambda *args, **kwargs: 1 // 0)
    else:
        action = {"hang": lambda name: sweep.time.sleep(3600), "exit": lambda name: sweep.os._exit(3)}[broken]
        monkeypatch.setattr(sweep, "examine", action)
    found = sweep.sweep(["llama"], tmp_path, processes=1, limit=0.5 if broken == "hang" else 3600)
    assert found["llama"][0] == verdict, found


def test_every_architecture_is_known_by_name():
    assert set(DOZEN) <= set(ARCHITECTURES)
