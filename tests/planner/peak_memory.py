"""The peak of a process that makes an engine and decodes, beside what was planned: run by ``test_peak_memory.py``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import specdec_fast as sd
from specdec_fast.freed_memory import return_freed_memory

TARGET = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 7}
DRAFT = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2}
ONE_LAYER = {"num_hidden_layers": 1}
BATCH, PROMPT, NEW = 4, 130, 8


def status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:"))) * 1024


def model_of(sizes: dict[str, int]) -> torch.nn.Module:
    """Return a random model in bf16 with grouped-query attention."""
    config = LlamaConfig(
        **sizes, num_attention_heads=8, num_key_value_heads=4, vocab_size=16_000, max_position_embeddings=1024,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def decode(target: torch.nn.Module, draft: torch.nn.Module | None) -> sd.Engine:
    """Make an engine with a budget that it does not exhaust, and decode a batch."""
    engine = sd.Engine(target, draft, memory_bytes=2**30, max_batch_size=BATCH, method="eqspec", num_draft_tokens=4)
    prompts = [[(11 * i + j) % 16_000 for j in range(PROMPT)] for i in range(BATCH)]
    params = sd.SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    outputs = engine.generate(prompts, params, progress=False)
    assert all(len(output.token_ids) == NEW for output in outputs), [output.error for output in outputs]
    return engine


def main(drafts: bool) -> None:
    """Print planned bytes, by term, and the bytes by which the process grew at its peak."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # What is imported, and what libraries keep for matrices of these sizes.
    decode(model_of({**TARGET, **ONE_LAYER}), model_of({**DRAFT, **ONE_LAYER}) if drafts else None)
    return_freed_memory()
    before = status("VmRSS")
    target, draft = model_of(TARGET), model_of(DRAFT) if drafts else None
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the process begins anew
    engine = decode(target, draft)
    assert engine.memory_plan is not None
    print(json.dumps({"terms": engine.memory_plan.terms, "peak": status("VmHWM") - before}))


if __name__ == "__main__":
    main(sys.argv[1] == "draft")
