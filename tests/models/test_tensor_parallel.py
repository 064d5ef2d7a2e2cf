"""A target that transformers' own tensor-parallel plan shards over two processes, on a CPU with Gloo."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from support import sharded
from support.source_tree import ROOT

NUM_PROCESSES = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("accelerate")  # transformers needs it for plans
    folder = tmp_path_factory.mktemp("sharded")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_PROCESSES)]
    run = subprocess.run(
        [*command, sharded.__file__, str(folder)], capture_output=True, text=True, check=False, cwd=ROOT, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_PROCESSES)]


@pytest.mark.grid
def test_outputs_are_those_of_plain_decoding(found):
    whole = sd.Engine(str(demo_pair() / "target"), None, dtype="float32")
    expected = whole.generate(sharded.PROMPTS, sharded.PARAMS, progress=False)
    assert found[0] == found[1]
    assert found[0]["batch"] == found[0]["alone"], "tokens, and bits of log-probabilities"
    assert [tokens for tokens, _ in found[0]["batch"]] == [output.token_ids for output in expected]
    assert found[0]["accepted"] > 0
    assert found[0]["local_rows"] * NUM_PROCESSES == whole.target.model.model.layers[0].self_attn.q_proj.weight.shape[0]
    assert found[0]["why_no_program"] == "its weights are sharded over processes"


@pytest.mark.grid
def test_calls_that_would_differ_between_processes_are_refused(found):
    assert found[0]["auto"].startswith("ConfigError: num_draft_tokens='auto', but the target is sharded")
    assert found[0]["seed"].startswith("InvalidParamsError: a request samples without a seed")
    assert found[0]["service"].startswith("ConfigError: the target is sharded over processes, and requests would reach")
    assert found[0]["draft"].startswith("ConfigError: draft LlamaForCausalLM is sharded over processes; load")
