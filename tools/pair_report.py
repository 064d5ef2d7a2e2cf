"""What a target and its draft are worth together, measured on prompts that neither was trained on.

Everything is measured in fp32 unless it says otherwise, one prompt at a time: that is the arithmetic in which
speculative decoding is compared with plain decoding, and batching would blur it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pair_corpus import CONTEXT, EOS_ID, PAD_ID
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

GAPS = (1e-4, 1e-3, 1e-2)


@dataclass(frozen=True)
class Protocol:
    """How the pair is measured; the figures mean nothing without it."""

    num_draft_tokens: int = 5
    max_new_tokens: int = 200
    seed: int = 0


@dataclass(frozen=True)
class Models:
    """The saved pair as a user loads it; the bf16 target is only asked where its argmax differs."""

    target: PreTrainedModel
    draft: PreTrainedModel
    target_bf16: PreTrainedModel

    @classmethod
    def load(cls, folder: Path) -> Models:
        """Read the pair from `folder`: what is measured is what was written, rounded to bf16."""

        def read(name: str, dtype: torch.dtype) -> PreTrainedModel:
            return AutoModelForCausalLM.from_pretrained(folder / name, dtype=dtype).eval()

        fp32, bf16 = torch.float32, torch.bfloat16
        return cls(read("target", fp32), read("draft", fp32), read("target", bf16))


def walk_rounds(agreement: Sequence[bool], num_draft_tokens: int) -> list[int]:
    """Accepted draft tokens in each round of greedy speculative decoding.

    `agreement[i]` says whether the draft's argmax at position i of the target's own greedy text is that very
    token. No speculative decoder has to run: while its draft tokens are accepted the draft sees the target's
    own text, and the first one that differs ends the round. The round then emits its accepted tokens and the
    target's next token, whatever the draft thought of that one, so the walk moves on by accepted + 1.

    The last token of the text is always counted as a next token. So each token is counted once, and the mean
    of accepted + 1 is exactly tokens divided by rounds.
    """
    rounds, position = [], 0
    while position < len(agreement):
        drafts = agreement[position : min(position + num_draft_tokens, len(agreement) - 1)]
        accepted = next((i for i, agrees in enumerate(drafts) if not agrees), len(drafts))
        rounds.append(accepted)
        position += accepted + 1
    return rounds


def continue_text(
    model: PreTrainedModel, prompt_ids: torch.Tensor, max_new_tokens: int, seed: int | None = None
) -> torch.Tensor:
    """Prompt and continuation `[num_tokens]`: greedy, or sampled at temperature 1 when a seed is given."""
    sampling = (
        {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    )
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        return model.generate(
            prompt_ids[None],
            attention_mask=torch.ones_like(prompt_ids)[None],
            max_new_tokens=max_new_tokens,
            pad_token_id=PAD_ID,
            **sampling,
        )[0]


def predicting_logits(model: PreTrainedModel, ids: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Logits `[num_new, vocab]` from which each token after the prompt is chosen, in one forward."""
    return model(input_ids=ids[None], use_cache=False).logits[0, prompt_length - 1 : -1].float()


def measure_greedy(models: Models, prompts: Iterable[torch.Tensor], protocol: Protocol) -> dict:
    """Agreement, rounds, lengths and near-ties along the target's greedy continuation of each prompt."""
    agreement: list[bool] = []
    rounds: list[int] = []
    lengths: list[int] = []
    eos_lengths: list[int] = []
    gaps: list[torch.Tensor] = []
    bf16_differs = 0
    for prompt_ids in prompts:
        ids = continue_text(models.target, prompt_ids, protocol.max_new_tokens)
        new_ids = ids[len(prompt_ids) :]
        target_logits = predicting_logits(models.target, ids, len(prompt_ids))
        draft_logits = predicting_logits(models.draft, ids, len(prompt_ids))
        bf16_logits = predicting_logits(models.target_bf16, ids, len(prompt_ids))
        agrees = (draft_logits.argmax(-1) == new_ids).tolist()
        agreement += agrees
        rounds += walk_rounds(agrees, protocol.num_draft_tokens)
        lengths.append(len(new_ids))
        if new_ids[-1] == EOS_ID:
            eos_lengths.append(len(new_ids))
        best_two = target_logits.topk(2).values
        gaps.append(best_two[:, 0] - best_two[:, 1])
        bf16_differs += int((bf16_logits.argmax(-1) != target_logits.argmax(-1)).sum())
    all_gaps = torch.cat(gaps)
    return {
        "positions": len(agreement),
        "greedy_agreement": statistics.fmean(agreement),
        "rounds": len(rounds),
        "tokens_per_round": len(agreement) / len(rounds),
        "accepted_per_round": [rounds.count(n) / len(rounds) for n in range(protocol.num_draft_tokens + 1)],
        "median_new_tokens": statistics.median(lengths),
        "ended_by_eos": len(eos_lengths),
        "eos_after_tokens": {"min": min(eos_lengths), "median": statistics.median(eos_lengths), "max": max(eos_lengths)}
        if eos_lengths
        else None,
        "positions_with_gap_below": {f"{gap:.0e}": int((all_gaps < gap).sum()) for gap in GAPS},
        "bf16_argmax_differs": bf16_differs / len(agreement),
    }


def measure_sampled(models: Models, prompts: Iterable[torch.Tensor], protocol: Protocol) -> dict:
    """Overlap of the two distributions over text that the target samples at temperature 1.

    The sum over the vocabulary of min(target_probs, draft_probs) is the chance that standard rejection
    sampling accepts a draft token there.
    """
    overlaps = []
    for index, prompt_ids in enumerate(prompts):
        ids = continue_text(models.target, prompt_ids, protocol.max_new_tokens, seed=protocol.seed + index)
        target_probs = predicting_logits(models.target, ids, len(prompt_ids)).softmax(-1)
        draft_probs = predicting_logits(models.draft, ids, len(prompt_ids)).softmax(-1)
        overlaps.append(torch.minimum(target_probs, draft_probs).sum(-1))
    every = torch.cat(overlaps)
    return {"sampled_positions": len(every), "sampled_overlap": every.mean().item()}


def cross_entropy(model: PreTrainedModel, documents: Iterable[Sequence[int]]) -> float:
    """Mean negative log-likelihood per token, in nats, of documents given as ids from bos to eos."""
    total, count = 0.0, 0
    for document in documents:
        ids = torch.tensor(document[:CONTEXT])
        logits = predicting_logits(model, ids, 1)
        total += F.cross_entropy(logits, ids[1:], reduction="sum").item()
        count += len(ids) - 1
    return total / count


@torch.inference_mode()
def measure_pair(folder: Path, held_out: list[list[int]], protocol: Protocol) -> dict:
    """All figures of the pair saved in `folder`, on its own prompts.jsonl and the held-out documents."""
    began = time.perf_counter()
    models = Models.load(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    prompts = [torch.tensor(tokenizer(row["prompt"]).input_ids) for row in rows]
    greedy = measure_greedy(models, tqdm(prompts, desc="greedy text", unit="prompt"), protocol)
    sampled = measure_sampled(models, tqdm(prompts, desc="sampled text", unit="prompt"), protocol)
    return {
        "prompts": len(prompts),
        "num_draft_tokens": protocol.num_draft_tokens,
        "max_new_tokens": protocol.max_new_tokens,
        "target_held_out_cross_entropy": cross_entropy(models.target, held_out),
        "draft_held_out_cross_entropy": cross_entropy(models.draft, held_out),
        **greedy,
        **sampled,
        "seconds": time.perf_counter() - began,
    }


def figures(measured: dict) -> list[tuple[str, str]]:
    """The measured figures as (what, value) lines, for the terminal and the model card alike."""
    ended = measured["eos_after_tokens"]
    ends = f", after {ended['min']} to {ended['max']} tokens (median {ended['median']:g})" if ended else ""
    gaps = ", ".join(f"{gap}: {count}" for gap, count in measured["positions_with_gap_below"].items())
    return [
        ("greedy agreement per token", f"{measured['greedy_agreement']:.3f}"),
        (f"tokens per round, K = {measured['num_draft_tokens']}", f"{measured['tokens_per_round']:.2f}"),
        (
            f"rounds by accepted drafts 0..{measured['num_draft_tokens']}",
            " ".join(f"{share:.2f}" for share in measured["accepted_per_round"]),
        ),
        ("ended by eos", f"{measured['ended_by_eos']} of {measured['prompts']}{ends}"),
        ("median new tokens", f"{measured['median_new_tokens']:g}"),
        ("sum of min(target, draft) probabilities", f"{measured['sampled_overlap']:.3f}"),
        (f"gap of the two best logits below, of {measured['positions']:,} positions", gaps),
        ("bf16 argmax differs from fp32", f"{measured['bf16_argmax_differs']:.1%} of positions"),
        (
            "held-out cross-entropy, nats per token",
            f"target {measured['target_held_out_cross_entropy']:.2f}, "
            f"draft {measured['draft_held_out_cross_entropy']:.2f}",
        ),
    ]


def table(measured: dict) -> str:
    """The figures in two aligned columns."""
    lines = figures(measured)
    width = max(len(what) for what, _ in lines)
    return "\n".join(f"  {what:<{width}}  {value}" for what, value in lines)


def model_card(report: dict) -> str:
    """A short README.md of the pair, from the report alone: nothing in it that was not measured."""
    source, measured, versions = report["source"], report["measured"], report["versions"]
    models = "\n".join(
        f"| {name} | {model['parameters']:,} | {model['hidden']} | {model['layers']} | "
        f"{model['heads']} / {model['kv_heads']} | {model['ffn']} | "
        f"{model['seconds']:.0f} s, {model['tokens'] / 1e6:.2f} M tokens |"
        for name, model in (("target", report["target"]), ("draft", report["draft"]))
    )
    values = "\n".join(f"| {what} | {value} |" for what, value in figures(measured))
    return f"""# Demo pair trained on `{source["file"]}`

`target/` and `draft/`: `LlamaForCausalLM`, bf16 safetensors, tied embeddings, context {CONTEXT}, one
byte-level BPE tokenizer of {report["vocab_size"]:,} tokens (bos 0, which the tokenizer adds; eos 1; pad 2),
{report["megabytes"]:.2f} MB together.

| | parameters | hidden | layers | heads / KV heads | FFN | trained |
|---|---|---|---|---|---|---|
{models}

Text: {source["characters"]:,} characters; {source["training_tokens"]:,} training tokens in
{source["training_documents"]:,} documents closed by eos, and {source["held_out_documents"]:,} documents held
out before the tokenizer was trained. The target learnt by cross-entropy and saw each training token about
{report["target"]["passes"]:.1f} times; the draft was distilled from it. {report["optimizer"]}, bf16 autocast,
CPU threads: {report["threads"]}, seed {report["seed"]}.

Measured in fp32 on {measured["prompts"]} held-out prompts, {measured["max_new_tokens"]} tokens at most, with
torch {versions["torch"]} and transformers {versions["transformers"]}:

| figure | value |
|---|---|
{values}

`prompts.jsonl`: those prompts (`prompt`, `task`, `n_tokens` without bos). The models are for trying and
testing decoders, not for their prose; whether they may be passed on depends on the rights to the text.
"""
