"""A process of a target sharded by its tensor-parallel plan: ``torch.distributed.run ... sharded.py FOLDER``.

It writes ``RANK.json``: the outputs of a batch with a draft, those of plain decoding one prompt at a time, and the
errors of calls that would let the processes compute different steps.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import specdec_fast as sd
from specdec_fast.assets import demo_pair

PROMPTS = ["One day, a little bird", "Count from 3 to 9: 3,", "Items: owl, hen, fox.\nSorted:"]
PARAMS = [
    sd.SamplingParams(max_new_tokens=12, logprobs=True),
    sd.SamplingParams(max_new_tokens=12, logprobs=True, temperature=0.8, seed=3),
    sd.SamplingParams(max_new_tokens=12, logprobs=True),
]


def error_of(function: Any) -> str:
    """Return the error that a call raises."""
    try:
        function()
    except sd.SpecDecError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(folder: Path) -> None:
    """Decode in every way."""
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    pair = str(demo_pair() / "target"), str(demo_pair() / "draft")
    plan = DistributedConfig(tp_size=distributed.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32, distributed_config=plan).eval()
    engine, plain = sd.Engine(model, pair[1]), sd.Engine(model, None)
    batch = engine.generate(PROMPTS, PARAMS, progress=False)
    alone = [plain.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    found = {
        "local_rows": model.model.layers[0].self_attn.q_proj.weight.to_local().shape[0],
        "accepted": engine.last_run.decoding.num_accepted_tokens,
        "batch": [(output.token_ids, output.logprobs) for output in batch],
        "alone": [(output.token_ids, output.logprobs) for output in alone],
        "why_no_program": engine.describe()["why_no_program"],
        "auto": error_of(lambda: sd.Engine(model, pair[1], num_draft_tokens="auto")),
        "seed": error_of(lambda: engine.generate(PROMPTS, sd.SamplingParams(temperature=0.8))),
        "service": error_of(lambda: sd.AsyncEngine(model, pair[1])),
        "draft": error_of(lambda: sd.Engine(pair[0], model)),
    }
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
