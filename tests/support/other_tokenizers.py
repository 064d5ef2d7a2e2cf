"""Tokenizers other than the bundled one, and the bundled draft model with its ids in another order."""

from __future__ import annotations

import copy
import json

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specdec_fast.assets import demo_pair

BOS = "<s>"
EOS = "</s>"
BUNDLED = (demo_pair() / "draft" / "tokenizer.json").read_text(encoding="utf-8")


def fast(backend, bos=BOS, eos=EOS):
    """Wrap a tokenizer of ``tokenizers``."""
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)


def permuted(draft, seed=0):
    """Return the bundled draft model with its ids in another order, and its tokenizer."""
    description = json.loads(BUNDLED)
    vocabulary = description["model"]["vocab"]
    order = torch.randperm(len(vocabulary), generator=torch.Generator().manual_seed(seed))
    new = order.tolist()
    description["model"]["vocab"] = {word: new[token] for word, token in vocabulary.items()}
    for added in description["added_tokens"]:
        added["id"] = new[added["id"]]
    for special in description["post_processor"]["special_tokens"].values():
        special["ids"] = [new[token] for token in special["ids"]]
    model = copy.deepcopy(draft)
    model.config._name_or_path = ""
    weights = model.get_input_embeddings().weight.data
    weights[order] = weights.clone()
    return model, fast(Tokenizer.from_str(json.dumps(description)))


def byte_level(texts, vocab_size=420):
    """Train a BPE over bytes, without tokens at the beginning of a text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    )
    return fast(backend, bos=None, eos="<|end|>")


def sentencepiece(texts, vocab_size=500):
    """Train a BPE that marks spaces and puts one before a text, with byte fallback, as Llama 2 has."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size - 259))
    state = json.loads(trained.to_str())["model"]
    words = ["<unk>", BOS, EOS, *byte_tokens, *state["vocab"]]
    merges = [tuple(merge) for merge in state["merges"]]
    vocabulary = {word: token for token, word in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", BOS, EOS])
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])])
    return fast(backend)
