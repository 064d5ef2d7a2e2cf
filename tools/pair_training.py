"""Training a target and distilling a draft from it, on a CPU, within a budget of minutes.

The budget is time, not steps, so the user knows beforehand how long it takes. The price: two runs with one
seed see the same batches in the same order, but end after slightly different numbers of them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from pair_corpus import BOS_ID, CONTEXT, EOS_ID, PAD_ID, SHORT_WINDOW, InputError, TokenStream
from torch.nn import functional as F
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

ROPE_THETA = 10_000.0
MATRIX_LEARNING_RATE = 0.02  # Muon's updates have unit scale, so one rate fits every matrix
OTHER_LEARNING_RATE = 0.004
WARMUP_SHARE = 0.02  # of the budget
SHORT_WINDOW_SHARE = 0.7  # of the budget
CROSS_ENTROPY_SHARE = 0.1  # in the draft's loss: a little of the text itself steadies an early draft

LossFunction = Callable[[PreTrainedModel, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ModelSize:
    """The five numbers that make a Llama of this tool; the rest is fixed."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int

    def config(self, vocab_size: int) -> LlamaConfig:
        """The model's configuration, or an `InputError` for numbers that do not go together."""
        if min(self.hidden, self.layers, self.heads, self.kv_heads, self.ffn) < 1:
            raise InputError(f"model sizes must be positive: {self}")
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise InputError(f"hidden must be a multiple of 2 x heads, and heads of kv_heads: {self}")
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.ffn,
            max_position_embeddings=CONTEXT,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            tie_word_embeddings=True,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
            attn_implementation="eager",  # so small, it trains 1.5 times as fast on a CPU as the fused form
        )


TARGET_SIZE = ModelSize(hidden=128, layers=4, heads=4, kv_heads=2, ffn=352)
DRAFT_SIZE = ModelSize(hidden=64, layers=1, heads=2, kv_heads=1, ffn=176)


@dataclass(frozen=True)
class Budget:
    """How long one model trains, on how many windows of `CONTEXT` tokens at a time, in which order."""

    minutes: float
    batch_size: int
    seed: int


def next_token_loss(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of every next token in the windows `ids` `[batch, window]`."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def distillation_loss(draft: PreTrainedModel, ids: torch.Tensor, target: PreTrainedModel) -> torch.Tensor:
    """KL from the target's distribution to the draft's, plus a little cross-entropy on the text.

    The draft is asked what the *target* would say, not what the text says: a whole distribution teaches more
    per token, and agreement with the target is all that speculative decoding pays for.
    """
    with torch.no_grad():
        target_logits = target(input_ids=ids, use_cache=False).logits[:, :-1].float()
    draft_logits = draft(input_ids=ids, use_cache=False).logits[:, :-1].float()
    target_log_probs, draft_log_probs = target_logits.log_softmax(-1), draft_logits.log_softmax(-1)
    divergence = F.kl_div(draft_log_probs, target_log_probs, log_target=True, reduction="none").sum(-1).mean()
    cross_entropy = F.nll_loss(draft_log_probs.flatten(0, 1), ids[:, 1:].flatten())
    return divergence + CROSS_ENTROPY_SHARE * cross_entropy


def make_optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms; AdamW alone where torch has no Muon."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    if not hasattr(torch.optim, "Muon"):
        return [torch.optim.AdamW([*others, *matrices], lr=OTHER_LEARNING_RATE, betas=(0.9, 0.95))]
    return [
        torch.optim.AdamW(others, lr=OTHER_LEARNING_RATE, betas=(0.9, 0.95)),
        torch.optim.Muon(matrices, lr=MATRIX_LEARNING_RATE, weight_decay=0.01),
    ]


def learning_rate_factor(progress: float) -> float:
    """Linear warm-up, then a cosine to zero, over the share of the budget that is spent."""
    return min(progress / WARMUP_SHARE, 1.0) * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


def train(model: PreTrainedModel, loss_function: LossFunction, stream: TokenStream, budget: Budget) -> dict:
    """Train until the budget is spent and return what happened; the bar counts the budget's seconds.

    Most of the budget goes to twice as many windows of half the length: attention is quadratic, so more
    tokens fit in the time. The last part runs at full length, for positions never trained do not work. (36 s
    on 9.5 MB of text, one thread: held-out cross-entropy 3.07 this way, 3.46 at full length throughout.)
    """
    generator = torch.Generator().manual_seed(budget.seed)
    optimizers = make_optimizers(model)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    seconds, elapsed, steps, tokens, smoothed_loss = budget.minutes * 60, 0.0, 0, 0, 0.0
    model.train()
    began = time.perf_counter()
    with tqdm(total=seconds, bar_format="  {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s{postfix}") as bar:
        while elapsed < seconds:
            for optimizer, peak in zip(optimizers, peaks, strict=True):
                optimizer.param_groups[0]["lr"] = peak * learning_rate_factor(elapsed / seconds)
            window = SHORT_WINDOW if elapsed < SHORT_WINDOW_SHARE * seconds else CONTEXT
            ids = stream.batch(budget.batch_size * CONTEXT // window, window, generator)
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_function(model, ids)
            if not math.isfinite(value := loss.item()):
                raise InputError(f"the loss became {value} after {steps} steps; try other sizes or seeds")
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            steps, tokens = steps + 1, tokens + ids.numel()
            smoothed_loss = value if steps == 1 else 0.98 * smoothed_loss + 0.02 * value
            before, elapsed = elapsed, time.perf_counter() - began
            bar.set_postfix_str(f"step {steps}, loss {smoothed_loss:.3f}", refresh=False)
            bar.update(min(elapsed, seconds) - before)
    model.eval()
    return {"seconds": elapsed, "steps": steps, "tokens": tokens, "final_loss": smoothed_loss}


def new_model(size: ModelSize, vocab_size: int, seed: int) -> LlamaForCausalLM:
    """A freshly initialised model."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(size.config(vocab_size))


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write the model in bf16, with a config.json that transformers 4 reads as well as transformers 5."""
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes 0600, which a bundled file must not be
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    # The names that release 4 looks for; release 5 writes `rope_parameters` and `dtype` in their place.
    config |= {"rope_theta": ROPE_THETA, "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
