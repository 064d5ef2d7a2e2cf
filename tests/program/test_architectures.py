"""Architectures that compute with token ids or positions, as programs: their logits where these integers matter."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Phi3Config

from bench.common.tiny_models import tiny_config, tiny_model, varied
from bench.sweep import examine
from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.kv_cache.forward_layout import lay_out
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.ops import resolve
from specdec_fast.runner.ragged_model import RaggedModel
from support.grids import grid
from support.models import TINY_GROUPED, VOCAB_SIZE
from support.programs import CPU, DTYPES, IDS, dense_logits, eager, needs_programs, ragged_logits

pytestmark = needs_programs
PLACEHOLDER = 35  # a token of both forwards of `ragged_logits`
SERVED = (
    "apertus", "beam", "bert", "cohere_compass_text", "ctrl", "dbrx", "electra", "ernie", "gemma3", "gemma3n_text",
    "gemma4", "gemma4_unified", "laguna", "longcat_flash", "ministral3", "phi4_multimodal", "phimoe", "roc_bert",
    "whisper",
)  # fmt: skip


def placeholders(config):
    """Let the ids of images, videos and sounds be tokens of the text."""
    for name in ("image_token_id", "video_token_id", "audio_token_id"):
        if hasattr(config, name):
            setattr(config, name, PLACEHOLDER)


def outside(config):
    """Let a placeholder be no row of the embedding, so that the model replaces it."""
    config.image_token_id = VOCAB_SIZE


def short(config):
    """Scale queries by a position's distance from 0, in steps of eight positions."""
    config.rope_parameters |= {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}


# What is changed in the defaults, and the tokens of the texts.
CHANGES = {
    "gemma3": (outside, torch.where(IDS == PLACEHOLDER, VOCAB_SIZE, IDS)),
    "gemma4": (placeholders, IDS),
    "gemma4_unified": (placeholders, IDS),
    "ministral3": (short, IDS),
}


def types_by_position(model):
    """Let the type of a token, which BERT reads at its position, be other than 0."""
    model.base_model.embeddings.token_type_ids[0] = torch.arange(model.config.max_position_embeddings) // 3 % 2


# Architectures as the sweep builds them; what is changed in the model.
BUILT = {
    "bert": types_by_position, "cohere_compass_text": varied, "dbrx": varied, "gemma3n_text": varied,
    "longcat_flash": varied,
}  # fmt: skip
NAMES = [*CHANGES, *BUILT]


def tiny(name, dtype):
    if name in BUILT:
        model = tiny_model(name)
        BUILT[name](model)
        return model.to(dtype)
    torch.manual_seed(0)
    config = tiny_config(CONFIG_MAPPING[name])
    CHANGES[name][0](config)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(dtype)


def texts(name):
    """Return the tokens of a test of an architecture."""
    return CHANGES[name][1] if name in CHANGES else IDS


@pytest.mark.parametrize(
    ("name", "dtype"),
    grid(
        [(name, dtype) for name in NAMES for dtype in DTYPES],
        lambda each: each[1] == torch.float32 and each[0] in NAMES[::4],
    ),
    ids=str,
)
@torch.inference_mode()
def test_integers_of_the_batch_are_computed_as_pytorch_does(name, dtype):
    """At most twice as far from the fp64 model as PyTorch's own forward of that dtype."""
    model = RaggedModel(tiny(name, dtype), resolve(CPU))
    assert model.program is not None, model.why_no_program
    ids = texts(name)
    truth = dense_logits(copy.deepcopy(model.model).double(), ids)
    ours, theirs = ((ragged_logits(m, ids=ids).double() - truth).norm() for m in (model, eager(model)))
    assert ours <= 2 * theirs


@pytest.mark.grid
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_kernels_compute_integers_of_the_batch(name):
    """In Triton's interpreter; nine tokens, of which the sixth is a placeholder."""
    pytest.importorskip("triton")
    from support.device_programs import interpreted

    model, ids = interpreted(tiny(name, torch.float32)), texts(name)[:9]
    pool = PagePool(model.layout, 64, 16)
    pool.add("a")
    got, truth = model.forward(lay_out(pool, [Rows("a", 0, 9)], ids), pool), model.model(ids[None]).logits[0]
    assert (got - truth).norm() <= 1e-5 * truth.norm()


@pytest.mark.parametrize("name", grid(SERVED, keep=["gemma3", "whisper"]))
def test_outputs_are_those_of_generate_and_of_plain_decoding(name):
    assert examine(name) == ("program", "")


def longrope(**options):
    """Build a model whose frequencies change for a whole batch with a text of more than 64 positions."""
    torch.manual_seed(0)
    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [4.0, 5.0, 6.0, 7.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    config = Phi3Config(**TINY_GROUPED, original_max_position_embeddings=64, rope_parameters=rope, **options)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@torch.inference_mode()
def test_frequencies_of_longrope_are_those_of_short_texts():
    """The model overwrites them in place with those of long texts when it is used elsewhere; an engine sees neither."""
    model = RaggedModel(longrope(), resolve(CPU))
    assert (model.why_no_program, model.max_positions) == (None, 64)
    rotary = model.model.model.rotary_emb
    expected, buffer, frequencies = ragged_logits(model), rotary.inv_freq, rotary.inv_freq.clone()
    assert torch.allclose(expected, ragged_logits(eager(model)), atol=1e-4, rtol=0)
    model.model(torch.arange(90)[None])
    assert not torch.equal(rotary.inv_freq, frequencies)
    if rotary.inv_freq is buffer:  # transformers 5.17 replaces the buffer, which is noticed
        model.expect_same_weights()
    assert torch.equal(ragged_logits(model), expected)
