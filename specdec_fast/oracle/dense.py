"""Dense, right-aligned batches on stock models: the layout whose realignment the engine does without.

Every row ends in the same column. With ``L`` columns and ``content_i`` committed tokens, row i begins with
``padding_i = L - content_i`` columns that hold nothing:

    padding_i + content_i == L                      for every row
    shift_i = (L_new - L_old) - emitted_i           columns that row i moves after a step; it can be negative

so no row moves when all emitted the same number of tokens. What is padding is known by counting, never by a token's
value: the pad id may well be emitted as content.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

LayerKV = tuple[Tensor, Tensor]  # keys, values: each [B, num_kv_heads, columns, head_dim]


@dataclass(frozen=True)
class RowMove:
    """One row's KV entries: ``length`` columns from ``start`` on, to be found at ``start + shift`` afterwards."""

    start: int
    length: int
    shift: int


def row_moves(padding: list[int], shifts: list[int], num_columns: int) -> list[RowMove]:
    """Return each row's move, for rows that begin after ``padding`` and shall then end with ``num_columns``."""
    return [RowMove(p, max(0, num_columns - p - s), s) for p, s in zip(padding, shifts, strict=True)]


Repad = Callable[[list[LayerKV], list[RowMove], int], list[LayerKV]]
RealignKV = Callable[[list[LayerKV], Tensor, Tensor, Tensor], None]  # layers, starts, lengths, shifts


def repad_in_python(layers: list[LayerKV], moves: list[RowMove], num_columns: int) -> list[LayerKV]:
    """Unpad and repad every row of every layer, as the published method does.

    Args:
        layers: keys and values of each layer, ``[B, num_kv_heads, columns, head_dim]``.
        moves: per row, what to keep and where it goes.
        num_columns: columns of the result.

    Returns:
        New tensors of ``num_columns`` columns, zero where a row holds nothing.

    """

    def repad(tensor: Tensor) -> Tensor:
        out = tensor.new_zeros(*tensor.shape[:2], num_columns, tensor.shape[3])
        for row, move in enumerate(moves):
            content = tensor[row, :, move.start : move.start + move.length]
            out[row, :, move.start + move.shift : move.start + move.shift + move.length] = content
        return out

    return [(repad(keys), repad(values)) for keys, values in layers]


def as_tensors(moves: list[RowMove], device: torch.device) -> tuple[Tensor, ...]:
    """Return the moves' starts, lengths and shifts, each ``[B]`` int32, as ``realign_kv_`` takes them."""
    # A row that keeps nothing may stand outside the columns: there is no place to move it from or to.
    rows = [(m.start, m.length, m.shift) if m.length else (0, 0, 0) for m in moves]
    return torch.tensor(list(zip(*rows, strict=True)), dtype=torch.int32, device=device).unbind()


def repad_in_place(realign_kv_: RealignKV) -> Repad:
    """Make a ``Repad`` of the fused op: rows move inside the tensors they are in, nothing is allocated.

    Columns outside a row's content then hold what stood there before, where ``repad_in_python`` leaves zeros; the
    attention mask hides them, so no output can tell.

    Args:
        realign_kv_: the op, of any backend; see ``oracle/ops/realign_kv.py``.

    Returns:
        A repad whose result are views of the given layers, cropped to ``num_columns``; the layers must have at
        least as many.

    """

    @torch.inference_mode()  # the layers come out of a forward in that mode, and only there may be written to
    def repad(layers: list[LayerKV], moves: list[RowMove], num_columns: int) -> list[LayerKV]:
        realign_kv_(layers, *as_tensors(moves, layers[0][0].device))
        return [(keys[:, :, :num_columns], values[:, :, :num_columns]) for keys, values in layers]

    return repad


class DenseModel:
    """A stock model with a dense, right-aligned KV cache that covers all but the last ``lag`` columns.

    Args:
        model: a Hugging Face causal model.
        lag: columns at the end whose KV entries are not kept between steps. The target's is 1: the newest token is
            fed with the next drafts. A draft model's is 2: after a full acceptance it has seen neither the last draft
            token nor the bonus, and dense rows must all be fed the same columns.

    """

    def __init__(self, model: PreTrainedModel, lag: int) -> None:
        self.model, self.lag = model, lag
        self._cache = DynamicCache()
        self._max_positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @property
    def layers(self) -> list[LayerKV]:
        """Keys and values of every layer; empty before the first column."""
        return [(layer.keys, layer.values) for layer in self._cache.layers]

    def load(self, layers: list[LayerKV]) -> None:
        """Take ``layers`` for the cache, without copying them."""
        if not layers or not self._cache.layers:
            self._cache = DynamicCache(layers or None)
            return
        for layer, (keys, values) in zip(self._cache.layers, layers, strict=True):
            layer.keys, layer.values = keys, values

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return next(self.model.parameters()).device

    @property
    def num_columns(self) -> int:
        """Columns that the cache covers."""
        return self._cache.layers[0].keys.shape[2] if self._cache.layers else 0

    @torch.inference_mode()
    def feed(self, token_ids: Tensor, padding: Tensor) -> Tensor:
        """Compute the next columns, append their KV entries, return logits ``[B, n, vocab_size]``.

        Args:
            token_ids: ``[B, n]``, columns ``num_columns`` to ``num_columns + n - 1``.
            padding: ``[B]``, columns at the left that hold nothing.

        """
        first, stop = self.num_columns, self.num_columns + token_ids.shape[1]
        columns = torch.arange(stop, device=self.device)
        positions = (columns[first:] - padding[:, None]).clamp_min(0)
        if self._max_positions is not None:
            # Only draft tokens past the last position a request may use: what they yield is cut off.
            positions = positions.clamp_max(self._max_positions - 1)
        return self.model(
            input_ids=token_ids,
            attention_mask=(columns >= padding[:, None]).long(),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        ).logits

    def crop(self, num_columns: int) -> None:
        """Keep the first ``num_columns`` columns of the cache."""
        self.load([(k[:, :, :num_columns], v[:, :, :num_columns]) for k, v in self.layers])

    def realign(self, padding: list[int], shifts: list[int], num_columns: int, repad: Repad) -> int:
        """Move every row's entries by its shift, and keep ``num_columns - lag`` columns.

        Args:
            padding: per row, before the move.
            shifts: per row.
            num_columns: L after the step.
            repad: what moves the entries.

        Returns:
            Bytes of KV that moved: the entries of rows with a shift; 0 if no row has one.

        """
        kept = max(0, num_columns - self.lag)
        if not any(shifts):
            self.crop(kept)
            return 0
        moves = row_moves(padding, shifts, kept)
        keys = self.layers[0][0]
        bytes_per_column = 2 * len(self.layers) * keys.shape[1] * keys.shape[3] * keys.element_size()
        self.load(repad(self.layers, moves, kept))
        return sum(move.length for move in moves if move.shift) * bytes_per_column
