"""A process of a target sharded by its tensor-parallel plan: ``torch.distributed.run ... sharded.py FOLDER [MODEL]``.

It writes ``RANK.json``: the outputs of batches with drafts, those of plain decoding one prompt at a time, what the
exchanges between the processes compute, and the errors of calls that would let the processes compute different steps.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.ranks.exchange import CHUNK_BYTES, GroupRanks, connected

PROMPTS = ["One day, a little bird", "Count from 3 to 9: 3,", "Items: owl, hen, fox.\nSorted:"]
IDS = [[5, 9, 40, 7], [3] * 21, [60, 2, 8]]  # of models without a tokenizer
# Of a small Qwen3, whose vocabulary is no multiple of the number of processes.
SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
PARAMS = [
    sd.SamplingParams(max_new_tokens=12, logprobs=True),
    sd.SamplingParams(max_new_tokens=12, logprobs=True, temperature=0.8, seed=3),
    sd.SamplingParams(max_new_tokens=12, logprobs=True),
]


def take_for_sharded(monkeypatch: Any) -> None:
    """Let targets that are whole be taken for sharded ones, whose processes share no memory."""
    monkeypatch.setattr("specdec_fast.runner.ragged_model.is_sharded", lambda _: True)
    as_it_is = lambda model: (model, SimpleNamespace(native=None))  # noqa: E731
    monkeypatch.setattr("specdec_fast.runner.ragged_model.sharded_copy", as_it_is)


def error_of(function: Any) -> str:
    """Return the error that a call raises."""
    try:
        function()
    except sd.SpecDecError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def exchanged() -> dict[str, bool]:
    """Return whether exchanges over memory and over the process group have the same bits, those of sums in order."""
    group = distributed.group.WORLD
    memory = connected(group, torch.device("cpu"))
    by_group = GroupRanks(group)
    same = {"shares memory": memory.native is not None}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        parts = [torch.randn(3, CHUNK_BYTES // 4 + 5, generator=torch.Generator("cpu").manual_seed(rank)).to(dtype)
                 for rank in range(memory.size)]  # fmt: skip
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        own = parts[memory.rank]
        sums = [memory.sum(own), by_group.sum(own), torch.cat([memory.sum(row[None]) for row in own])]
        same[f"sum {dtype}"] = all(torch.equal(each, total.to(dtype)) for each in sums)
        widths = [CHUNK_BYTES // 4 + 5 - 2 * rank for rank in range(memory.size)]
        whole = torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
        rows = own[:, : widths[memory.rank]]
        same[f"rows {dtype}"] = all(torch.equal(each.concatenate(rows, widths), whole) for each in (memory, by_group))
    return same


def decoded(engine: sd.Engine, prompts: Any, params: Any) -> list[Any]:
    """Return ids and log-probabilities."""
    return [(each.token_ids, each.logprobs) for each in engine.generate(prompts, params, progress=False)]


def outputs_of(model: Any, prompts: Any, draft: Any, eager: bool) -> dict[str, Any]:
    """Decode in batches with several K, and plainly one prompt at a time."""
    plain = sd.Engine(model, None, enforce_eager=eager)
    found: dict[str, Any] = {
        "program": plain.describe()["forward_program"],
        "one_by_one": plain.describe()["rows_one_by_one"],
        "alone": [decoded(plain, [prompt], params)[0] for prompt, params in zip(prompts, PARAMS, strict=True)],
        "plain": decoded(plain, prompts, PARAMS),
    }
    for k in (1, 4):
        engine = sd.Engine(model, draft, enforce_eager=eager, num_draft_tokens=k)
        found[f"K {k}"] = decoded(engine, prompts, PARAMS)
    return found


def main(folder: Path, source: str | None) -> None:
    """Decode in every way."""
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    pair = str(demo_pair() / "target"), str(demo_pair() / "draft")
    plan = DistributedConfig(tp_size=distributed.get_world_size())
    found: dict[str, Any] = {"exchanged": exchanged()}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(source or pair[0], dtype=dtype, distributed_config=plan).eval()
        draft = "ngram" if source else AutoModelForCausalLM.from_pretrained(pair[1], dtype=dtype).eval()
        for eager in (False, True) if source is None else (False,):  # seconds on two cores
            name = f"{dtype} {'eager' if eager else 'program'}"
            found[name] = outputs_of(model, IDS if source else PROMPTS, draft, eager)
    if source is None:
        found["local_rows"] = model.model.layers[0].self_attn.q_proj.weight.to_local().shape[0]
        engine = sd.Engine(model, None)
        drafter = f"eagle3:{demo_pair() / 'eagle3'}"
        found["eagle3"] = decoded(sd.Engine(model, drafter, num_draft_tokens=4), PROMPTS, PARAMS)
        found["auto"] = error_of(lambda: sd.Engine(model, pair[1], num_draft_tokens="auto"))
        found["seed"] = error_of(lambda: engine.generate(PROMPTS, sd.SamplingParams(temperature=0.8)))
        found["service"] = error_of(lambda: sd.AsyncEngine(model, pair[1]))
        found["draft"] = error_of(lambda: sd.Engine(pair[0], model))
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
