"""Pairs to time: the shapes of published models with random weights, made from seeds, and the bundled pair.

Costs are those of the shapes. Two random models do not agree, so almost no proposal of such a draft model is accepted;
``bench/common/replay.py`` replays a chosen acceptance instead.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

SEED = 0
# Large compared with what random layers add, so that a token's own embedding decides the next token; see random_model.
EMBEDDING_SCALE = 4.0
TIED_GAIN = 0.8  # gain of a layer's matrices if embeddings are tied; see random_model
DEMO = "demo"  # the bundled pair: trained, so not in PAIRS


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, named as in its config, without the vocabulary, which a pair shares."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    model_type: str = "qwen3"


@dataclass(frozen=True)
class HybridShape(ModelShape):
    """Sizes of a model in which three of four layers are gated delta nets."""

    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 16


@dataclass(frozen=True)
class Pair:
    """A target, its draft, and the vocabulary of both."""

    target: ModelShape
    draft: ModelShape
    vocab_size: int


QWEN3_8B = ModelShape(4096, 12288, 36, 32, 8, 128, tie_word_embeddings=False)
QWEN3_1B7 = ModelShape(2048, 6144, 28, 16, 8, 128, tie_word_embeddings=True)
QWEN3_06B = ModelShape(1024, 3072, 28, 16, 8, 128, tie_word_embeddings=True)
# Not a published model: Qwen3, small enough to draft for Qwen3-0.6B on a CPU. 39 of its 42 million parameters are the
# embedding, which is also the output layer.
QWEN3_42M = ModelShape(256, 768, 4, 4, 2, 64, tie_word_embeddings=True)
QWEN3_5_08B = HybridShape(1024, 3584, 24, 8, 2, 256, tie_word_embeddings=True, model_type="qwen3_5_text")
VICUNA_7B = ModelShape(4096, 11008, 32, 32, 32, 128, tie_word_embeddings=False, model_type="llama")
VICUNA_68M = ModelShape(768, 3072, 2, 12, 12, 64, tie_word_embeddings=False, model_type="llama")
GLM_4_9B = ModelShape(4096, 13696, 40, 32, 2, 128, tie_word_embeddings=False, model_type="glm4")
# Ten million parameters, eight of them in layers, and a draft of a tenth: neither fits a first-level cache, and a step
# takes about a millisecond.
TEN_MILLION = ModelShape(384, 1024, 5, 6, 6, 64, tie_word_embeddings=True)
ONE_MILLION = ModelShape(128, 384, 2, 2, 2, 64, tie_word_embeddings=True)
TINY_TARGET = ModelShape(32, 64, 2, 4, 2, 16, tie_word_embeddings=False)
TINY_DRAFT = ModelShape(16, 32, 1, 2, 1, 16, tie_word_embeddings=True)

# By the target's name. GLM-4-9B has no small sibling, so a Qwen3-0.6B with its vocabulary drafts for it.
PAIRS = {
    "qwen3-0.6b": Pair(QWEN3_06B, QWEN3_42M, 151_936),
    "qwen3-1.7b": Pair(QWEN3_1B7, QWEN3_06B, 151_936),
    "qwen3-8b": Pair(QWEN3_8B, QWEN3_06B, 151_936),
    "qwen3.5-0.8b": Pair(QWEN3_5_08B, QWEN3_42M, 248_320),
    "vicuna-7b": Pair(VICUNA_7B, VICUNA_68M, 32_000),
    "glm-4-9b": Pair(GLM_4_9B, QWEN3_06B, 151_552),
    "10m": Pair(TEN_MILLION, ONE_MILLION, 4096),
    "smoke": Pair(TINY_TARGET, TINY_DRAFT, 97),
}


def config_of(shape: ModelShape, vocab_size: int) -> PreTrainedConfig:
    """Return the config of a model of this shape. It has no special tokens, so no text ends before its limit."""
    config = AutoConfig.for_model(**asdict(shape), vocab_size=vocab_size)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    if shape.tie_word_embeddings:
        config.initializer_range = TIED_GAIN / shape.hidden_size**0.5
    return config


def random_model(
    shape: ModelShape, vocab_size: int, dtype: torch.dtype, device: torch.device, seed: int
) -> PreTrainedModel:
    """Build a model of this shape with random weights, on the device.

    With usual random weights the best logits are so close that in bf16 every tenth token is a tie. So if the output
    layer is separate, embeddings are as large as all that the layers add, and the output layer has the same rows in
    another order. The next token is then the one whose row is the last token's embedding, by a margin larger than
    rounding. If embedding and output layer are tied, the model would repeat the last token, as it would with weights of
    the usual size. With somewhat wider weights a text varies and depends on its whole context. In fp32 one token in
    tens of thousands is then a tie, in bf16 several in a hundred.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(shape, vocab_size), dtype=dtype).eval()
    if shape.tie_word_embeddings:
        return model
    with torch.no_grad():
        embedding: Tensor = model.get_input_embeddings().weight
        embedding.normal_(std=EMBEDDING_SCALE)
        order = torch.randperm(vocab_size, device=device)
        unit = 1 / (EMBEDDING_SCALE * shape.hidden_size**0.5)
        model.get_output_embeddings().weight.copy_(embedding[order]).mul_(unit)
    return model


def random_pair(
    pair: Pair, dtype: torch.dtype, device: torch.device, seed: int = SEED
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Build a target and its draft."""
    target = random_model(pair.target, pair.vocab_size, dtype, device, seed)
    return target, random_model(pair.draft, pair.vocab_size, dtype, device, seed + 1)


def random_prompts(count: int, num_tokens: int, vocab_size: int, seed: int = SEED) -> list[list[int]]:
    """Make random prompts of ``num_tokens`` ids each."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count, num_tokens), generator=generator).tolist()
