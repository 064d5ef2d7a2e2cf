"""Dense, right-aligned batches on stock models: the layout that needs realignment, which the engine avoids.

Every row ends in the same column. With ``L`` columns and ``content_i`` committed tokens, row i begins with
``padding_i = L - content_i`` columns of padding:

    padding_i + content_i == L                      for every row
    shift_i = (L_new - L_old) - emitted_i           columns by which row i moves after a step; it can be negative

So no row moves if all rows emitted the same number of tokens. The code counts padding and never recognises it by a
token's value, because the pad id may be emitted as content.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor

from specdec_fast.model_arguments import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DenseLayerKV = tuple[Tensor, Tensor]  # keys, values: each [B, num_kv_heads, columns, head_dim]


@dataclass(frozen=True)
class RowMove:
    """The move of one row's KV entries: ``length`` columns from ``start`` on move to ``start + shift``."""

    start: int
    length: int
    shift: int


def row_moves(padding: list[int], shifts: list[int], num_columns: int) -> list[RowMove]:
    """Return each row's move: it begins after ``padding`` columns, and shall then end at ``num_columns``."""
    return [RowMove(p, max(0, num_columns - p - s), s) for p, s in zip(padding, shifts, strict=True)]


Repad = Callable[[list[DenseLayerKV], list[RowMove], int], list[DenseLayerKV]]
RealignKV = Callable[[list[DenseLayerKV], Tensor, Tensor, Tensor], None]  # layers, starts, lengths, shifts


def repad_in_python(layers: list[DenseLayerKV], moves: list[RowMove], num_columns: int) -> list[DenseLayerKV]:
    """Unpad and repad every row of every layer, as the published method does, into new tensors of ``num_columns``.

    ``layers`` are ``[B, num_kv_heads, columns, head_dim]`` keys and values; ``moves`` has, per row, the columns to keep
    and their shift. Columns of padding are zeros in the result.
    """

    def repad(tensor: Tensor) -> Tensor:
        out = tensor.new_zeros(*tensor.shape[:2], num_columns, tensor.shape[3])
        for row, move in enumerate(moves):
            content = tensor[row, :, move.start : move.start + move.length]
            out[row, :, move.start + move.shift : move.start + move.shift + move.length] = content
        return out

    return [(repad(keys), repad(values)) for keys, values in layers]


def as_tensors(moves: list[RowMove], device: torch.device) -> tuple[Tensor, ...]:
    """Return starts, lengths and shifts of the moves, each ``[B]`` int32, the arguments of ``realign_kv_``."""
    # A row that keeps nothing may begin outside the columns; it has nothing to move.
    rows = [(m.start, m.length, m.shift) if m.length else (0, 0, 0) for m in moves]
    return torch.tensor(list(zip(*rows, strict=True)), dtype=torch.int32, device=device).unbind()


def repad_in_place(realign_kv_: RealignKV) -> Repad:
    """Make a ``Repad`` from the fused op: rows move inside their tensors, and nothing is allocated.

    Columns outside a row's content then keep their old numbers, where ``repad_in_python`` writes zeros. The attention
    mask hides these columns, so they affect no output. The repad returns views of the given layers, cropped to
    ``num_columns``; the layers must have at least so many.
    """

    @torch.inference_mode()  # a forward made the layers in this mode, and only in it may they be written
    def repad(layers: list[DenseLayerKV], moves: list[RowMove], num_columns: int) -> list[DenseLayerKV]:
        realign_kv_(layers, *as_tensors(moves, layers[0][0].device))
        return [(keys[:, :, :num_columns], values[:, :, :num_columns]) for keys, values in layers]

    return repad


class DenseModel:
    """A stock model with a dense, right-aligned KV cache that covers all but the last ``lag`` columns.

    ``lag`` is 1 for the target, which computes the newest token together with the next draft tokens. It is 2 for a
    draft model: after a full acceptance it has computed neither the last draft token nor the bonus token, and all dense
    rows must compute the same columns.
    """

    def __init__(self, model: PreTrainedModel, lag: int) -> None:
        self.model = model
        self.lag = lag
        self._cache = transformers.DynamicCache()
        self._cache_argument = cache_argument(model)
        self._max_positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @property
    def layers(self) -> list[DenseLayerKV]:
        """Keys and values of every layer; empty before the first column."""
        return [(layer.keys, layer.values) for layer in self._cache.layers]

    def load(self, layers: list[DenseLayerKV]) -> None:
        """Use ``layers`` as the cache, without copying them."""
        if not layers or not self._cache.layers:
            self._cache = transformers.DynamicCache(layers or None)
            return
        for layer, (keys, values) in zip(self._cache.layers, layers, strict=True):
            layer.keys = keys
            layer.values = values

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    @property
    def num_columns(self) -> int:
        """The number of columns in the cache."""
        return self._cache.layers[0].keys.shape[2] if self._cache.layers else 0

    @torch.inference_mode()
    def feed(self, token_ids: Tensor, padding: Tensor) -> Tensor:
        """Compute the next n columns ``[B, n]``, append their KV entries, return logits ``[B, n, vocab_size]``.

        ``padding [B]`` counts the columns of padding at the left.
        """
        first = self.num_columns
        stop = self.num_columns + token_ids.shape[1]
        columns = torch.arange(stop, device=self.device)
        positions = (columns[first:] - padding[:, None]).clamp_min(0)
        if self._max_positions is not None:
            # Only draft tokens lie beyond the last position that a request may use; their results are cut off.
            positions = positions.clamp_max(self._max_positions - 1)
        return self.model(
            input_ids=token_ids,
            attention_mask=(columns >= padding[:, None]).long(),
            position_ids=positions,
            use_cache=True,
            **{self._cache_argument: self._cache},
        ).logits

    def crop(self, num_columns: int) -> None:
        """Keep the first ``num_columns`` columns of the cache."""
        self.load([(k[:, :, :num_columns], v[:, :, :num_columns]) for k, v in self.layers])

    def realign(self, padding: list[int], shifts: list[int], num_columns: int, repad: Repad) -> int:
        """Move rows' entries by their shifts; keep ``num_columns - lag`` columns; return the bytes of KV that moved.

        ``padding`` counts each row's columns of padding before the move. ``num_columns`` is L after the step.
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
