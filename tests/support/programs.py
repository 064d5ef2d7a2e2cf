"""Forward programs under test: a ragged batch for whole models, and models that are one function."""

from __future__ import annotations

import copy

import pytest
import torch

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.kv_cache.cache_rules import CacheRules
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.layer_layout import KVLayout
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import resolve
from specdec_fast.ops.registry import all_ops
from specdec_fast.program import compile_forward
from specdec_fast.program.executors import executor_for
from support.models import VOCAB_SIZE

CPU = torch.device("cpu")
needs_programs = pytest.mark.skipif(
    all_ops()["linear"].why_unavailable("cpp") is not None, reason="programs run in the C++ extension"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTH = 24  # of the rows that single operations get
IDS = torch.arange(41) * 7 % VOCAB_SIZE
NO_LAYERS = KVLayout.uniform(num_layers=0, num_kv_heads=1, head_dim=4, dtype=torch.float32, device=CPU)


def ragged_logits(model, logit_rows=None, ids=IDS):
    """Three sequences of tokens ``[41]`` in two forwards: the second forward's logits."""
    pool = PagePool(model.layout, 512, 16, model.row_padding)
    for owner in "abc":
        pool.add(owner)
    first = [Rows("a", 0, 20), Rows("b", 0, 11), Rows("c", 0, 10)]
    model.forward(lay_out(pool, first, ids), pool)
    second = [Rows("a", 20, 6), Rows("b", 11, 1), Rows("c", 10, 3)]
    return model.forward(lay_out(pool, second, ids[:10]), pool, logit_rows)


@torch.inference_mode()
def dense_logits(model, ids=IDS):
    """Return the logits of ``ragged_logits`` from the Hugging Face model itself, sequence by sequence."""
    first, second = ids.split([20, 11, 10]), ids[:10].split([6, 1, 3])
    texts = [torch.cat(pieces) for pieces in zip(first, second, strict=True)]
    return torch.cat([model(text[None]).logits[0, -len(own) :] for text, own in zip(texts, second, strict=True)])


def eager(model):
    """Return the same model without its program."""
    other = copy.copy(model)
    other.use_programs(None, None)
    return other


class Function(torch.nn.Module):
    """A model without layers: ``function`` of the embedded tokens ``[1, T, WIDTH]`` and the positions ``[1, T]``."""

    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        self.function = function
        self.embedding = torch.nn.Embedding(VOCAB_SIZE, WIDTH, dtype=dtype)
        torch.manual_seed(0)
        self.embedding.weight.data = torch.randn(VOCAB_SIZE, WIDTH).mul(3).to(dtype)
        self.embedding.weight.data[:3] = torch.linspace(-30, 30, 3 * WIDTH).view(3, WIDTH)  # far from 0 as well

    def forward(self, token_ids, positions, cache=None, logit_rows=None):
        out = self.function(self.embedding(token_ids), positions)
        return out if logit_rows is None else out[:, logit_rows]


def compiled(model):
    ops = resolve(CPU)
    executor, _ = executor_for(ops, CPU)
    program = executor(compile_forward(model, model, NO_LAYERS, ops, CacheRules())).program

    def run(token_ids):
        pool = PagePool(NO_LAYERS, 256, 16)
        pool.add("a")
        batch = lay_out(pool, [Rows("a", 0, len(token_ids))], token_ids)
        return program(token_ids, batch, pool.pages, None)

    return run
