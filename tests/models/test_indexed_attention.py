"""Sparse attention by an indexer (DeepSeek-V3.2, GLM-5): each row attends over the positions that are selected for it.

The tiny models select six positions, so from the seventh token on the selection decides. They have many index heads: a
position at which every head scores 0 is as good as another one, and ``torch.topk`` promises no order of equal scores.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn.functional import relu
from transformers import AutoModelForCausalLM

import specdec_fast as sd
from specdec_fast.batch.ragged_batch import AttentionParams, Rows
from specdec_fast.drafters.mtp.model import _expect_full_attention
from specdec_fast.equivalence.compare import transformers_greedy
from specdec_fast.errors import UnsupportedModelError
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.indexed_rows import IndexedRows, OfEachRow
from specdec_fast.kv_cache.layer_layout import KVLayout, KVShape
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models import replaced_functions
from specdec_fast.models.kv_probe import KVProbe
from specdec_fast.models.model_checks import check_decoder, indexed_layers
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from support.grids import combinations, grid
from support.invariants import CheckedEngine, patched
from support.models import TINY, VOCAB_SIZE
from support.recurrent_models import noisy_copy
from support.repeated import graphs_for_cpu

CPU = torch.device("cpu")
NEW_TOKENS = 9
INDEX_TOPK = 6
PROMPTS = [[(7 * i + 3 * n) % VOCAB_SIZE for i in range(n)] for n in (1, 9, 17, 28)]
_SIZES = {
    **TINY,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": INDEX_TOPK,
    "mlp_layer_types": ["dense", "sparse"],
}
_SHARED = {"indexer_types": ["full", "shared"]}  # the second layer takes what the first one has selected
_MADE = {
    "deepseek-v3.2": ("DeepseekV32Config", _SIZES),
    "glm-5": ("GlmMoeDsaConfig", {**_SIZES, **_SHARED}),
    "hy-v4": ("HYV4Config", {**_SIZES, **_SHARED}),  # with sinks
    "axk2": ("AXK2Config", _SIZES),
}
FAMILIES = [name for name, (kind, _) in _MADE.items() if hasattr(transformers, kind)]  # of the installed transformers
KINDS = ["deepseek-v3.2", "glm-5"]


def indexed_model(family, dtype=torch.float32, **options):
    torch.manual_seed(0)
    kind, sizes = _MADE[family]
    config = getattr(transformers, kind)(**copy.deepcopy({**sizes, **options}))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(dtype)


def decode(engine):
    params = sd.SamplingParams(max_new_tokens=NEW_TOKENS, logprobs=True)
    outputs = [output.raise_for_error() for output in engine.generate(PROMPTS, params, progress=False)]
    assert engine.core.pool.is_vacant
    return [(output.token_ids, output.logprobs) for output in outputs]


@pytest.fixture(scope="module")
def known():
    """Return a model and what ``transformers`` decodes with it; both are kept."""
    models = {}

    def made(family):
        if family not in models:
            model = indexed_model(family)
            models[family] = model, [transformers_greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
        return models[family]

    return made


@pytest.mark.parametrize("family", grid(FAMILIES, keep=KINDS))
def test_tokens_are_those_of_generate(known, family):
    model, expected = known(family)
    assert len({token for tokens in expected for token in tokens}) > 5, "texts should vary"
    engine = sd.Engine(model, noisy_copy(model), max_batch_size=3, deterministic=False)
    assert [tokens for tokens, _ in decode(engine)] == expected
    accepted = engine.last_run.decoding.accepted_per_position
    assert accepted[0] > accepted[1] > 0, "acceptance should be ragged"
    assert engine.describe()["why_no_program"] == "its indexers select the positions over which each row attends"
    indexers = (0, 1) if family in ("deepseek-v3.2", "axk2") else (0,)
    assert engine.target.layout.indexers == indexers
    assert engine.target.layout.num_layers == engine.target.hf.num_layers == 2
    assert engine.describe()["kv_bytes_per_token"] == 4 * (2 * 4 * (12 + 8 + 16) + len(indexers) * 16)


def everything(original, rows, scores_of, most):
    """Ignore the scores: every position that a row sees is selected."""
    return original(rows, scores_of, rows.longest)


def next_best(original, rows, scores_of, most):
    """One position is lost."""
    return original(rows, scores_of, most - 1)


@pytest.mark.parametrize("mistake", [everything, next_best])
def test_another_selection_changes_tokens(known, mistake):
    model, expected = known("deepseek-v3.2")
    engine = sd.Engine(model, None, deterministic=False)  # when it is loaded, a mistake would be noticed
    with patched(IndexedRows, "select", mistake):
        assert [tokens for tokens, _ in decode(engine)] != expected


@pytest.fixture(scope="module")
def plain():
    """Return a model, and its plain decoding at batch 1; both are kept."""
    models = {}

    def decoded(family, dtype):
        if (family, dtype) not in models:
            model = indexed_model(family, dtype)
            models[family, dtype] = model, decode(sd.Engine(model, None, max_batch_size=1))
        return models[family, dtype]

    return decoded


@combinations(
    family=KINDS,
    dtype=[torch.float32, torch.bfloat16],
    drafter=["ngram", "model"],
    num_draft_tokens=[1, 5],
    batch_size=[1, 4],
    prefill={"whole": {}, "chunked": {"max_prefill_tokens": 5}},
)
def test_bits_are_those_of_plain_decoding(plain, family, dtype, drafter, num_draft_tokens, batch_size, prefill):
    model, expected = plain(family, dtype)
    draft = noisy_copy(model) if drafter == "model" else drafter
    engine = sd.Engine(model, draft, num_draft_tokens=num_draft_tokens, max_batch_size=batch_size, **prefill)
    assert not engine.target.row_padding.one_by_one, engine.target.why_one_by_one
    assert decode(engine) == expected


def test_preempted_sequences_begin_again(plain):
    model, expected = plain("deepseek-v3.2", torch.float32)
    engine = sd.Engine(model, "ngram", max_batch_size=4, page_size=1, kv_cache_tokens=48)
    assert decode(engine) == expected
    assert engine.last_run.num_preemptions > 0


def test_no_row_reads_keys_that_no_token_owns(known):
    """Keys of indexers, too, are NaN unless a committed token owns them."""
    model, tokens = known("glm-5")
    expected = {(tuple(prompt), NEW_TOKENS): of_prompt for prompt, of_prompt in zip(PROMPTS, tokens, strict=True)}
    engine = sd.Engine(model, "ngram", page_size=4, max_batch_size=2, num_draft_tokens=3, deterministic=False)
    checked = CheckedEngine(engine, expected=expected, tolerance=None)
    outputs = checked.generate(PROMPTS, sd.SamplingParams(max_new_tokens=NEW_TOKENS))
    assert all(output.error is None for output in outputs)
    assert checked.num_checked


def test_what_is_refused_and_off(known, monkeypatch):
    graphs_for_cpu(monkeypatch)
    engine = sd.Engine(known("deepseek-v3.2")[0], "ngram", deterministic=False)
    assert engine.describe()["graphs"] is False
    assert engine.describe()["why_no_graphs"] == "its indexers wait for the device"
    with pytest.raises(
        sd.NotYetSupportedError, match=r"verifies no trees .* indexers select positions for rows of cha"
    ):
        engine.target.expect_trees()
    with pytest.raises(sd.NotYetSupportedError, match="windows, chunks or indexers in 2 of its 2 layers; MTP layers"):
        _expect_full_attention(engine.target)


# Rows of two sequences, on pages of four positions, and padding rows behind them.
SPANS = [Rows("a", 0, 9), Rows("b", 0, 2)]
D = 4


def indexed_rows(spans=SPANS, padding=2):
    pool = PagePool(KVLayout((KVShape(1, D, 0),), (0,), torch.float32, CPU, indexers=(0,)), 64, 4)
    for owner, *_ in spans:
        pool.add(owner)
    batch = lay_out(pool, spans, torch.zeros(sum(span.count for span in spans), dtype=torch.int64))
    return IndexedRows(batch, pool.page_size, padding), pool.layers[0][0]


def selected(rows, pages, keys, queries, k):
    """Score as an indexer of ``transformers`` does, with one head."""
    of_each = rows.append(pages, keys)
    scores = relu(torch.matmul(queries[:, :, None], of_each.transpose(-1, -2).float().unsqueeze(1)) * 0.5)
    scores = torch.matmul(torch.ones(1, rows.num_rows, 1, 1), scores).squeeze(-2) + torch.zeros(1, 1, 1)
    return scores.topk(min(k, scores.shape[-1]), dim=-1).indices


def test_the_lowest_of_equal_positions_is_selected():
    rows, pages = indexed_rows()
    keys = torch.zeros(1, 13, D)
    keys[0, [5, 7], 0] = 1.0  # positions 5 and 7 of the first sequence
    keys[0, 11:] = float("nan")  # padding rows
    found = selected(rows, pages, keys, torch.ones(1, 13, D), 3)
    expected = [[0], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 5], [0, 1, 5], [0, 5, 7], [0, 5, 7], [0], [0, 1]]
    padded = [row + [-1] * (3 - len(row)) for row in [*expected, [], []]]
    assert found.dtype == torch.int32
    assert found[0].tolist() == padded


def test_zeros_of_both_signs_are_equal():
    rows, _ = indexed_rows([Rows("a", 0, 4)], padding=0)
    scores = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    found = OfEachRow(rows, lambda row: scores[None, None, : row + 1]).topk(2)
    assert found.indices[0].tolist() == [[0, -1], [0, 1], [0, 1], [0, 1]]


def test_a_row_is_selected_for_alone_as_in_a_batch():
    generator = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(2, 1, 13, D, generator=generator)
    in_batch = selected(*indexed_rows(), keys, queries, 4)
    assert in_batch[0, :9].tolist() != [[*range(min(4, row + 1))] + [-1] * (3 - row) for row in range(9)]
    pool_of_one = indexed_rows([Rows("a", 0, 9)], padding=0)
    assert torch.equal(selected(*pool_of_one, keys[:, :9], queries[:, :9], 4), in_batch[:, :9])


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_attention_over_all_positions_has_the_bits_of_ordinary_attention(backend):
    rows, _ = indexed_rows()
    found = OfEachRow(rows, lambda row: torch.zeros(1, 1, rows._contexts[row])).topk(9).indices
    batch = rows.attending(found)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(*size, generator=generator) for size in ((11, 4, 8), (17, 4, 2, 8), (17, 4, 2, 6)))
    attend = resolve(CPU, backend).paged_attention
    pages = tuple(each.flatten(0, 1)[:, None] for each in (key, value))
    ordinary = attend(query, (key, value), rows._batch.row_by_row(), AttentionParams(0.3))
    assert torch.equal(attend(query, pages, batch, AttentionParams(0.3)), ordinary)


def test_an_indexer_that_computes_otherwise_is_refused():
    rows, pages = indexed_rows()
    keys = rows.append(pages, torch.zeros(1, 13, D))
    with pytest.raises(AttributeError, match="no 'dtype': each row of the forward has its own keys"):
        keys.dtype  # noqa: B018
    with pytest.raises(AttributeError, match="no 'masked_fill_'"):
        keys.masked_fill_(torch.ones(1), 0.0)
    with pytest.raises(UnsupportedModelError, match=r"scores of shape \[1, 1, 4\] for a row that sees 1 positions"):
        keys.transpose(1, 2).sum(-1).unsqueeze(1).topk(2)
    with pytest.raises(UnsupportedModelError, match=r"tensor of shape \[1, 5, 4\]; expected the 13 rows"):
        (keys * torch.ones(1, 5, D)).topk(2)
    with pytest.raises(UnsupportedModelError, match=r"top-k along dimension 1; expected the last"):
        keys.topk(2, dim=1)


@pytest.mark.parametrize(
    ("layer", "dtype", "message"),
    [
        (7, torch.float32, "layer 7 caches keys of an indexer, but did not .* for indexers of layers 0, 1"),
        (
            1,
            torch.float16,
            r"layer 1 computed keys of shape \[1, 3, 16\] in torch.float16; .* \[1, 3, 16\] in torch.float32",
        ),
    ],
)
def test_keys_without_a_place_in_the_pages_are_refused(known, layer, dtype, message):
    target = RaggedModel(known("deepseek-v3.2")[0], resolve(CPU))
    pool = PagePool(target.layout, 32, 16)
    pool.add("a")
    cache = target.hf.make_cache(pool, lay_out(pool, [Rows("a", 0, 3)], torch.arange(3)))
    with pytest.raises(UnsupportedModelError, match=message):
        cache.update_indexer(torch.zeros(1, 3, 16, dtype=dtype), layer)


def test_keys_of_another_dtype_than_those_of_attention_are_refused():
    probe = KVProbe(resolve(CPU))
    states = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16)
    probe.attend(*states, 0, AttentionParams(1.0))
    probe.update_indexer(torch.zeros(1, 8, 4, dtype=torch.float16), 0)
    with pytest.raises(UnsupportedModelError, match=r"attends in torch.float16 and torch.float32; a KV cache has one"):
        probe.layout("Model", torch.float32, CPU)


def without_indices(original, *args, indices=None, **kwargs):
    return original(*args, **kwargs)


def with_other_indices(original, *args, indices, **kwargs):
    return original(*args, indices=indices.clone(), **kwargs)


@pytest.mark.parametrize(
    ("change", "message"),
    [(without_indices, "layer 0 .* passes no indices"), (with_other_indices, "layer 0 attends over indices that no")],
)
def test_a_layer_without_the_selection_of_its_indexer_is_refused(change, message):
    original = replaced_functions._attend
    interface = transformers.AttentionInterface
    interface.register("specdec_paged", lambda *args, **kwargs: change(original, *args, **kwargs))
    try:
        with pytest.raises(UnsupportedModelError, match=message):
            sd.Engine(indexed_model("deepseek-v3.2"), None)
    finally:
        interface.register("specdec_paged", original)


def test_layers_of_indexers_have_two_names():
    kinds = ["full_attention", "indexed_attention", "deepseek_sparse_attention"]
    assert indexed_layers(SimpleNamespace(layer_types=kinds)) == {1, 2}
    assert indexed_layers(SimpleNamespace(layer_types=None)) == set()


def test_indexers_beside_recurrent_layers_are_refused():
    config = SimpleNamespace(
        is_encoder_decoder=False, layer_types=["linear_attention", "indexed_attention"], max_position_embeddings=99
    )
    config.get_text_config = lambda decoder: config
    with pytest.raises(UnsupportedModelError, match="indexed_attention and linear_attention; models can be served"):
        check_decoder(SimpleNamespace(config=config))
