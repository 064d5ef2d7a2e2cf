"""Row-count invariance: every logit has the same bits alone and in any batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import specdec_fast as sd
from bench.exactness import bundled_prompts
from specdec_fast.assets import demo_pair
from specdec_fast.batch.ragged_batch import RowPadding, Rows
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.loading import load_model
from specdec_fast.ops import resolve
from specdec_fast.runner.batch_invariance import make_deterministic
from specdec_fast.runner.ragged_model import RaggedModel
from support.grids import grid
from support.models import WITH_CHUNKS, tiny_model, truncated_copy
from support.row_bits import Alone, assert_same_bits

CPU = torch.device("cpu")


# Fewer and more rows than any multiple, one row and many, all drafters' shapes: K 0 in a batch, 1, 5, 8.
SETTINGS = [(2, 5, "eqspec"), (5, 1, "exspec"), (8, 5, "exspec"), (16, 8, "eqspec"), (8, 0, "eqspec")]


@pytest.mark.parametrize("dtype", grid([torch.float32, torch.bfloat16, torch.float16], keep=[torch.bfloat16]), ids=str)
def test_demo_pair_has_the_same_bits_in_every_batch(dtype, prompt_ids):
    target, draft = (
        AutoModelForCausalLM.from_pretrained(demo_pair() / n, dtype=dtype).eval() for n in ("target", "draft")
    )
    alone = Alone(target, prompt_ids)
    for batch_size, k, method in SETTINGS:
        assert_same_bits(
            target, draft, prompt_ids, alone, max_batch_size=batch_size, num_draft_tokens=k, method=method, page_size=7
        )


@pytest.mark.parametrize("dtype", grid([torch.float32, torch.bfloat16], keep=[torch.bfloat16]), ids=str)
@pytest.mark.parametrize("architecture", grid(list(WITH_CHUNKS), keep=list(WITH_CHUNKS)[:1]))
def test_architectures_have_the_same_bits_in_every_batch(architecture, dtype):
    target = tiny_model(architecture)
    draft = truncated_copy(target, 2).to(dtype)
    target = target.to(dtype)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(97, (n,), generator=generator).tolist() for n in (1, 2, 9, 17, 30, 5, 5)]
    alone = Alone(target, prompts)
    for batch_size, k, method in SETTINGS[1:3]:
        assert_same_bits(target, draft, prompts, alone, max_batch_size=batch_size, num_draft_tokens=k, method=method)


def test_prefill_in_other_chunks_has_the_same_bits(prompt_ids, monkeypatch, target):
    alone = Alone(target, prompt_ids)
    made = []

    def in_small_chunks(model):
        make_deterministic(model)
        model.row_padding = replace(model.row_padding, largest=48)
        made.append(model.row_padding)

    monkeypatch.setattr("specdec_fast.runner.loading.make_deterministic", in_small_chunks)
    assert_same_bits(target, None, prompt_ids, alone, max_batch_size=8)
    assert made, "the engine did not ask for the rule"


EACH_RULE = ({}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9})  # in one batch, prompt by prompt


@pytest.mark.grid
@pytest.mark.parametrize(("dtype", "length"), [("bfloat16", 96), ("bfloat16", 256), ("float32", 256)])
def test_long_texts_of_all_rules_in_one_batch(dtype, length):
    """64 prompts: speculation at batch 32 against plain decoding at batch 8, some against batch 1."""
    prompts = bundled_prompts()
    params = [
        sd.SamplingParams(max_new_tokens=length, ignore_eos=True, logprobs=True, seed=i, **EACH_RULE[i % 3])
        for i in range(len(prompts))
    ]

    def decode(draft, num_prompts, **settings):
        models = (demo_pair() / name if name else None for name in ("target", draft))
        engine = sd.Engine(*(path and str(path) for path in models), dtype=dtype, **settings)
        outputs = engine.generate(prompts[:num_prompts], params[:num_prompts])
        return [(output.token_ids, output.logprobs) for output in outputs]

    plain = decode(None, 64, max_batch_size=8)
    assert decode("draft", 64, max_batch_size=32, num_draft_tokens=5, method="exspec") == plain
    assert decode(None, 9, max_batch_size=1) == plain[:9]
    assert {len(token_ids) for token_ids, _ in plain} == {length}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_recomputed_prefix_has_the_bits_of_the_cache(dtype, prompt_ids):
    """The KV entries of a text, decoded token by token, are those of its prefill, whole, in pieces and in a batch."""
    model = RaggedModel(load_model(str(demo_pair() / "target"), dtype, CPU), resolve(CPU))
    make_deterministic(model)
    text = (prompt_ids[4] + prompt_ids[9])[:90]

    def entries(forwards):
        pool = PagePool(model.layout, 1024, 7, model.row_padding)
        for owner in ("text", "other"):
            pool.add(owner)
        for rows in forwards:
            ids = [token for r in rows for token in text[r.start : r.start + r.count]]
            model.forward(lay_out(pool, rows, torch.tensor(ids)), pool)
        table = torch.tensor(pool.block_table("text"))
        return pool.tensors[0][:, :, table].flatten(2, 3)[:, :, : len(text)]

    decoded = entries([[Rows("text", i, 1)] for i in range(90)])
    for forwards in (
        [[Rows("text", 0, 90)]],
        [[Rows("text", 0, 33)], [Rows("text", 33, 6)], [Rows("text", 39, 51)]],
        [[Rows("other", 0, 11), Rows("text", 0, 45)], [Rows("text", 45, 45), Rows("other", 11, 62)]],
    ):
        assert torch.equal(entries(forwards), decoded)


def test_attention_that_depends_on_its_neighbours_gets_each_row_alone(target, draft):
    """As does the PyTorch op, whose sums differ with the number of rows that a sequence has."""
    engine = sd.Engine(target, draft, backend="torch", num_draft_tokens=3)
    assert engine.describe()["attend_per_row"] is True
    default = sd.Engine(target, draft).describe()
    assert default["attend_per_row"] is (default["ops"]["paged_attention"] == "torch")


@pytest.mark.parametrize("deterministic", [True, False])
def test_describe_reports_it(target, deterministic):
    described = sd.Engine(target, None, deterministic=deterministic, enforce_eager=True).describe()
    assert described["deterministic"] is deterministic
    assert described["row_multiple"] == (64 if deterministic else 1), "on CUDA, means over rows need 16 rows or more"
    assert described["rows_one_by_one"] is False
    default = sd.Engine(target, None, deterministic=deterministic).describe()
    assert default["forward_program"] is (default["ops"]["linear"] == "cpp")
    assert default["row_multiple"] == 1 or not default["forward_program"]


@pytest.mark.parametrize(
    ("num_rows", "multiple", "padding"), [(1, 4, 3), (4, 4, 0), (5, 4, 3), (0, 4, 0), (7, 1, 0), (3, 64, 61)]
)
def test_padding(num_rows, multiple, padding):
    assert RowPadding(multiple, 512).padding(num_rows) == padding
