"""Models that emit a given script, and a tokenizer of any bytes: they put any text at any place of a block."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

NUM_POSITIONS = 256
INCOMPLETE = "\ufffd"  # what the bytes of a character that is not complete are decoded to


class ByteTokenizer:
    """Decodes token i to ``pieces[i]``, which need not be whole characters."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode(self, token_ids: list[int], **kwargs: object) -> str:
        return b"".join(self.pieces[token] for token in token_ids).decode("utf-8", errors="replace")


def scripted_model(script: list[int], vocab_size: int) -> GPT2LMHeadModel:
    """Build a model that answers position p with ``script[p]``, whatever the tokens are.

    Its one layer adds nothing, the embeddings of tokens are zero and those of positions one-hot. The later a position
    the larger its best logit, so no two positions have equal logits. Where every id stands in the script once, a logit
    is a sum with one term that is not zero: its bits do not depend on the rows computed with it.
    """
    config = GPT2Config(
        vocab_size=vocab_size,
        n_embd=NUM_POSITIONS,
        n_layer=1,
        n_head=4,
        n_inner=4,
        n_positions=NUM_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln_" not in name:
                parameter.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(NUM_POSITIONS))
        positions = torch.arange(len(script))
        model.lm_head.weight[torch.tensor(script), positions] = (1 + positions / NUM_POSITIONS) / 4
    return model
