"""A DFlash drafter as a module that can be trained (arXiv 2602.06036), or a DSpark drafter (arXiv 2607.05147)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec_fast.drafters.shared.trainable import DecoderLayer, DrafterModule, Drafts

_ANCHORS_PER_BLOCK = 2  # blocks that start in as many positions as a block has rows


class _MarkovHead(nn.Module):
    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)  # the bias begins as 0

    def forward(self, previous: Tensor) -> Tensor:
        output: Tensor = self.markov_w2(self.markov_w1(previous))
        return output


class _ConfidenceHead(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)
        nn.init.zeros_(self.proj.weight)  # every token begins with probability 1/2
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        output: Tensor = self.proj(torch.cat([hidden, embedded], dim=-1)).squeeze(-1)
        return output


class DFlashModule(DrafterModule):
    """Layers over the target's features, with the parameter names of checkpoints.

    Args:
        config: sizes; hidden size and vocabulary are the target's.
        feature_size: width of a row's taps, concatenated.
        block_size: rows of a block.
        mask_token_id: stands for a token to be drafted.
        markov_rank: of the Markov head, which makes it DSpark, with a confidence head; 0: none of them.
        embedding: ``[vocab_size, H]``, the target's; it is not trained.
        output: ``[vocab_size, H]``, the target's output layer; it is not trained.
    """

    num_batches: Tensor

    def __init__(
        self,
        config: LlamaConfig,
        feature_size: int,
        block_size: int,
        mask_token_id: int,
        markov_rank: int,
        embedding: Tensor,
        output: Tensor,
    ) -> None:
        super().__init__()
        self.config = config
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.fc = nn.Linear(feature_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config, has_norms=True) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = _MarkovHead(config.vocab_size, markov_rank) if markov_rank else None
        self.confidence_head = _ConfidenceHead(config.hidden_size + markov_rank) if markov_rank else None
        self._embedding = embedding
        self._head = output
        self._rotary = LlamaRotaryEmbedding(config)
        self.register_buffer(
            "num_batches", torch.zeros((), dtype=torch.int64, device="cpu")
        )  # the anchors depend on it

    @property
    def most_steps(self) -> int:
        """The number of tokens that a block drafts: DSpark's first row drafts too."""
        return self.block_size - (self.markov_head is None)

    def unroll(self, features: Tensor, token_ids: Tensor, num_steps: int) -> list[Tensor]:
        length = token_ids.shape[1]
        rows = torch.arange(length - 1, device=token_ids.device)
        drafted = self._logits(self._blocks(features, token_ids, rows, num_steps), token_ids, rows)
        return [drafted[:, : length - 1 - step, step] for step in range(num_steps)]

    def drafts(self, features: Tensor, token_ids: Tensor, num_steps: int) -> Drafts:
        # Blocks behind tokens at random positions, others in each batch.
        rows = self._anchors(token_ids, num_steps)
        drafted = self._logits(self._blocks(features, token_ids, rows, num_steps), token_ids, rows)
        return [(drafted[:, :, step], rows + step + 1) for step in range(num_steps)]

    def scored_drafts(self, features: Tensor, token_ids: Tensor, num_steps: int) -> tuple[Drafts, list[Tensor]]:
        """Draft as ``drafts`` does, and estimate what is accepted; only with a confidence head.

        Returns:
            What ``drafts`` returns; per step, the logits ``[B, N]`` of the probability that its token is accepted if
            those before it are. They pass no gradient on to the layers.
        """
        assert self.confidence_head is not None
        assert self.markov_head is not None
        rows = self._anchors(token_ids, num_steps)
        hidden = self._blocks(features, token_ids, rows, num_steps)
        drafted = self._logits(hidden, token_ids, rows)
        embedded = self.markov_head.markov_w1(_previous(token_ids, rows, num_steps))
        scored = self.confidence_head(hidden.detach(), embedded.detach())
        steps = range(num_steps)
        return [(drafted[:, :, step], rows + step + 1) for step in steps], [scored[:, :, step] for step in steps]

    def output_layers(self) -> list[nn.Module]:
        # The output layer is the target's.
        if self.markov_head is None or self.confidence_head is None:
            return []
        return [self.markov_head.markov_w2, self.confidence_head.proj]

    def _decoder_layers(self) -> list[DecoderLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def _anchors(self, token_ids: Tensor, num_steps: int) -> Tensor:
        """Choose the positions ``[N]`` behind whose next token blocks begin."""
        length = token_ids.shape[1]
        generator = torch.Generator(device="cpu").manual_seed(int(self.num_batches))
        self.num_batches += 1
        count = max(1, _ANCHORS_PER_BLOCK * length // self.block_size)
        chosen = torch.randperm(length - 1 - num_steps + 1, generator=generator, device="cpu")[:count].sort().values
        return chosen.to(token_ids.device)

    def _blocks(self, features: Tensor, token_ids: Tensor, rows: Tensor, num_steps: int) -> Tensor:
        """Compute blocks whose context ends with ``rows``.

        Args:
            features: ``[B, L, feature_size]``.
            token_ids: ``[B, L]`` int64.
            rows: ``[N]`` int64 below L - 1; the newest token of block n is at position ``rows[n] + 1``.
            num_steps: tokens to draft.

        Returns:
            ``[B, N, num_steps, H]`` after the last norm: step k for the token at position ``rows[n] + 2 + k``.
        """
        length = token_ids.shape[1]
        device = token_ids.device
        size = num_steps + (self.markov_head is None)
        positions = rows[:, None] + 1 + torch.arange(size, device=device)
        blocks = torch.full((len(token_ids), *positions.shape), self.mask_token_id, device=device)
        blocks[:, :, 0] = token_ids[:, rows + 1]
        context = self.hidden_norm(self.fc(features))
        everywhere = self._rotary(context, torch.arange(length, device=device)[None])
        within = self._rotary(context, positions.flatten()[None])
        visible = torch.arange(length, device=device) <= rows[:, None, None]  # [N, 1, L]
        hidden = functional.embedding(blocks, self._embedding).flatten(1, 2)
        for layer in self._decoder_layers():
            attention = layer.self_attn
            states = layer.input_layernorm(hidden)
            query = attention.queries(states, within)
            of_blocks = attention.entries(states, within)
            of_context = attention.entries(context, everywhere)
            hidden = hidden + attention.o_proj(_attended(query, of_context, of_blocks, visible, size))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        drafting: Tensor = self.norm(hidden).unflatten(1, (len(rows), size))[:, :, size - num_steps :]
        return drafting

    def _logits(self, hidden: Tensor, token_ids: Tensor, rows: Tensor) -> Tensor:
        """Return logits ``[B, N, num_steps, vocab_size]`` for results of ``_blocks``."""
        logits = functional.linear(hidden, self._head)
        if self.markov_head is None:
            return logits
        biased: Tensor = logits + self.markov_head(_previous(token_ids, rows, hidden.shape[2]))
        return biased


def _previous(token_ids: Tensor, rows: Tensor, num_steps: int) -> Tensor:
    """Return the text's token ``[B, N, num_steps]`` before the one that each step of each block drafts."""
    places = rows[:, None] + 1 + torch.arange(num_steps, device=rows.device)
    return token_ids[:, places.clamp(max=token_ids.shape[1] - 1)]


def _attended(
    query: Tensor, context: tuple[Tensor, Tensor], within: tuple[Tensor, Tensor], visible: Tensor, size: int
) -> Tensor:
    """Attend from blocks to the context that each sees and to all rows of the block itself.

    Args:
        query: ``[B, heads, N * size, head_dim]``.
        context: keys and values, ``[B, heads, L, head_dim]`` each.
        within: those of the blocks' rows, like ``query``.
        visible: ``[N, 1, L]`` bool, the context of each block.
        size: rows of a block.

    Returns:
        ``[B, N * size, heads * head_dim]``.
    """
    blocks = [states.unflatten(2, (-1, size)) for states in (query, *within)]  # [B, heads, N, size, head_dim]
    scale = query.shape[-1] ** -0.5
    length = visible.shape[-1]
    scores = (query @ context[0].mT).unflatten(2, (-1, size)).masked_fill(~visible, float("-inf"))
    weights = (torch.cat([scores, blocks[0] @ blocks[1].mT], dim=-1) * scale).softmax(-1)
    seen = weights[..., :length].flatten(2, 3) @ context[1]
    output = seen + (weights[..., length:] @ blocks[2]).flatten(2, 3)
    return output.transpose(1, 2).flatten(-2)
