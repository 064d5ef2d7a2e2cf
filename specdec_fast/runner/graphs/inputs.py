"""The tensors that a bucket's graphs read, and how a batch gets into them.

The rest of a bucket is rows of additional sequences on the scratch page, like the padding of a RowPadding. Every batch
writes the whole bucket, so nothing is left of an earlier batch.

A phase of a step (a verification, or a drafting loop) is laid out on the host, straight into the arrays of its bucket,
and sent in one transfer. A forward of another kind comes as a batch that is on the device already.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import RaggedBatch
from specdec_fast.batch.recurrent_batch import RecurrentBatch
from specdec_fast.batch.sampling_batch import Sampling
from specdec_fast.device_copy import PackedArrays, all_to_device
from specdec_fast.kv_cache.forward_layout import HostLayout
from specdec_fast.kv_cache.state_pool import RecurrentRows
from specdec_fast.runner.graphs.buckets import Bucket
from specdec_fast.trees.rows import TREE_MASK_BITS, TreeRows

# The columns of ``sampling_columns``. A row has a position, too, so the positions of choices have another name.
_SAMPLING = {
    "temperatures": np.float64,
    "top_k": np.int32,
    "top_p": np.float64,
    "min_p": np.float64,
    "seeds": np.int64,
    "chosen_positions": np.int64,
}


class _Padding(NamedTuple):
    """The rows and sequences that fill a bucket after those of a batch, on the host."""

    positions: np.ndarray  # [bucket.num_rows - T] int64
    slot_mapping: np.ndarray  # [bucket.num_rows - T] int32
    cu_seqlens_q: np.ndarray  # [bucket.num_sequences - B] int32
    seqused_k: np.ndarray  # [bucket.num_sequences - B] int32

    @property
    def recurrent(self) -> RecurrentRows:
        """For recurrent layers: new texts in the scratch slot, whose rows are all stored, so that none is kept."""
        none = np.zeros_like(self.seqused_k)
        return RecurrentRows(none, none, none, self.seqused_k)


@lru_cache(maxsize=256)
def _padding(bucket: Bucket, num_rows: int, batch_size: int, page_size: int) -> _Padding:
    """Make the padding once, because a run needs the same few again and again. Batches copy it."""
    missing = bucket.num_rows - num_rows
    places = bucket.num_sequences - batch_size
    ends = np.minimum(bucket.max_seqlen_q * np.arange(1, places + 1), missing)
    positions = np.arange(missing) % bucket.max_seqlen_q
    return _Padding(
        positions,
        (positions % page_size).astype(np.int32),
        (num_rows + ends).astype(np.int32),
        np.diff(ends, prepend=0).astype(np.int32),
    )


@lru_cache(maxsize=256)
def _padding_on_device(
    bucket: Bucket, num_rows: int, batch_size: int, page_size: int, device: torch.device
) -> list[Tensor]:
    own = _padding(bucket, num_rows, batch_size, page_size)
    return all_to_device([np.zeros_like(own.positions), *own], device)


@lru_cache(maxsize=256)
def _chains(positions: bytes, num_words: int) -> TreeRows:
    """Return the padding rows of a bucket of trees, of which each sequence is a chain."""
    depths = np.frombuffer(positions, np.int64)
    masks = b"".join(((2 << depth) - 1).to_bytes(4 * num_words, "little") for depth in depths.tolist())
    mask = np.frombuffer(masks, "<i4").reshape(len(depths), num_words)
    return TreeRows(depths, (depths - 1).astype(np.int32), mask)


class Inputs:
    """The tensors that a bucket's graphs read.

    Args:
        bucket: its shapes.
        page_size: positions of a page.
        device: of the tensors.
        has_trees: whether rows are trees of draft tokens.
        has_states: whether the model has recurrent layers.

    Attributes:
        batch: the batch made of these tensors, which are never replaced by others. Where a draft token is verified, its
            token id is not among them: see ``token_ids``.
        sampling: how the sequences choose, without repetition penalties.
        drafted: ``[num_rows]`` int64, room for the draft tokens of a verification, sequence after sequence.
        logit_rows: ``[num_logit_rows]`` int64, beside rows of prompts, the rows whose logits are wanted.
        one_each: the places of which a drafting loop computes one row each.
        parents: ``[num_rows]`` int32 of trees, see ``TreeRows``; None for chains.

    """

    def __init__(
        self,
        bucket: Bucket,
        page_size: int,
        device: torch.device,
        has_trees: bool = False,
        has_states: bool = False,
    ) -> None:
        rows = (bucket.num_rows,)
        places = (bucket.num_sequences,)
        self._num_words = -(-bucket.max_seqlen_q // TREE_MASK_BITS)
        trees = {"parents": (np.int32, rows), "tree_mask": (np.int32, (bucket.num_rows, self._num_words))}
        self._bucket = bucket
        self._page_size = page_size
        self.one_each = bucket.one_each
        self._packed = PackedArrays(
            {
                "token_ids": (np.int64, rows),
                "draft_index": (np.int64, rows),
                "positions": (np.int64, rows),
                "slot_mapping": (np.int32, rows),
                "cu_seqlens_q": (np.int32, (bucket.num_sequences + 1,)),
                "seqused_k": (np.int32, places),
                "block_table": (np.int32, (bucket.num_sequences, bucket.num_pages)),
                **{name: (dtype, places) for name, dtype in _SAMPLING.items()},
                **(trees if has_trees else {}),
                **(dict.fromkeys(RecurrentRows._fields, (np.int32, places)) if has_states else {}),
            },
            device,
        )
        own = self._packed.on_device
        recurrent = None
        if has_states:
            recurrent = RecurrentBatch(
                cu_seqlens=own["cu_seqlens_q"], **{name: own[name] for name in RecurrentRows._fields}
            )
        self.parents = own.get("parents")
        self.drafted = torch.zeros(bucket.num_rows, dtype=torch.int64, device=device)
        self.logit_rows = torch.zeros(bucket.num_logit_rows, dtype=torch.int64, device=device)
        self.batch = RaggedBatch(
            token_ids=own["token_ids"],
            positions=own["positions"],
            slot_mapping=own["slot_mapping"],
            cu_seqlens_q=own["cu_seqlens_q"],
            cu_seqlens=own["cu_seqlens_q"],
            seqused_k=own["seqused_k"],
            block_table=own["block_table"],
            # They change, so the recorded code must compute them.
            last_rows=torch.zeros(0, dtype=torch.int64, device=device),
            most_rows=bucket.max_seqlen_q,
            max_seqlen_q=bucket.max_seqlen_q,
            max_seqlen_k=bucket.num_pages * page_size,
            tree_mask=own.get("tree_mask"),
            recurrent=recurrent,
        )
        self.sampling = self._sampling(device)

    def _sampling(self, device: torch.device) -> Sampling:
        own = self._packed.on_device
        places = self._bucket.num_sequences
        return Sampling(
            temperatures=own["temperatures"],
            top_k=own["top_k"],
            top_p=own["top_p"],
            min_p=own["min_p"],
            repetition_penalties=torch.ones(places, dtype=torch.float64, device=device),
            seeds=own["seeds"],
            positions=own["chosen_positions"],
            seen_ids=torch.zeros(0, dtype=torch.int64, device=device),
            cu_seen=torch.zeros(places + 1, dtype=torch.int32, device=device),
        )

    def token_ids(self, vocab_size: int) -> Tensor:
        """Return the ids of the rows of a verification, ``[num_rows]``, below ``vocab_size``; to be recorded.

        Ids outside the vocabulary are clamped: they are rejected anyway, but would index past the embedding.
        """
        own = self._packed.on_device
        drafted = self.drafted.clamp(0, vocab_size - 1)[own["draft_index"].clamp(min=0)]
        return torch.where(own["draft_index"] < 0, own["token_ids"], drafted)

    def fill(self, batch: RaggedBatch) -> None:
        """Copy a batch that is on the device, without its own padding, and fill the rest of the bucket."""
        own = self.batch
        num_rows = batch.token_ids.shape[0]
        batch_size = batch.cu_seqlens.shape[0] - 1
        token_ids, positions, slot_mapping, cu_seqlens, used = _padding_on_device(
            self._bucket, num_rows, batch_size, self._page_size, own.token_ids.device
        )
        torch.cat((batch.token_ids, token_ids), out=own.token_ids)
        torch.cat((batch.positions[:num_rows], positions), out=own.positions)
        torch.cat((batch.slot_mapping[:num_rows], slot_mapping), out=own.slot_mapping)
        torch.cat((batch.cu_seqlens, cu_seqlens), out=own.cu_seqlens_q)
        torch.cat((batch.seqused_k[:batch_size], used), out=own.seqused_k)
        own.block_table.zero_()
        own.block_table[:batch_size, : batch.block_table.shape[1]] = batch.block_table[:batch_size]
        if batch.recurrent is not None and own.recurrent is not None:
            none = torch.zeros_like(used)
            for name, more in zip(RecurrentRows._fields, (none, none, none, used), strict=True):
                torch.cat((getattr(batch.recurrent, name), more), out=getattr(own.recurrent, name))

    def send(
        self,
        layout: HostLayout,
        sampling: Mapping[str, np.ndarray],
        *,
        token_ids: list[int] | None = None,
        first_ids: list[int] | None = None,
        trees: TreeRows | None = None,
    ) -> None:
        """Write a phase of a step into the bucket's arrays, fill the rest of the bucket, and copy them to the device.

        Args:
            layout: of the (first) forward.
            sampling: columns of ``sampling_columns``; empty: the graph chooses greedily and does not read any.
            token_ids: of all its rows; None: some or all of them come in ``drafted``.
            first_ids: of the first row of each sequence, if those of the others come in ``drafted``.
            trees: the shape of the rows, if they are trees.

        """
        arrays = self._packed.arrays()
        counts = layout.counts
        num_rows = len(layout.positions)
        batch_size = len(layout.end)
        padding = _padding(self._bucket, num_rows, batch_size, self._page_size)
        if token_ids is not None:
            arrays["token_ids"][:num_rows] = token_ids
        elif first_ids is not None:
            arrays["token_ids"][counts.cu_seqlens[:-1]] = first_ids
            arrays["draft_index"][:num_rows] = counts.draft_index
            arrays["draft_index"][num_rows:] = -1
        else:
            arrays["draft_index"][:num_rows] = np.arange(num_rows)
            arrays["draft_index"][num_rows:] = -1
        arrays["token_ids"][num_rows:] = 0
        arrays["positions"][:num_rows] = layout.positions
        arrays["positions"][num_rows:] = padding.positions
        arrays["slot_mapping"][:num_rows] = layout.slots
        arrays["slot_mapping"][num_rows:] = padding.slot_mapping
        arrays["cu_seqlens_q"][: batch_size + 1] = counts.cu_seqlens
        arrays["cu_seqlens_q"][batch_size + 1 :] = padding.cu_seqlens_q
        arrays["seqused_k"][:batch_size] = layout.end
        arrays["seqused_k"][batch_size:] = padding.seqused_k
        table = arrays["block_table"]
        table[batch_size:] = 0
        table[:batch_size, layout.table.shape[1] :] = 0
        table[:batch_size, : layout.table.shape[1]] = layout.table
        if trees is not None:
            starts = layout.positions[counts.cu_seqlens[:-1]]
            arrays["positions"][:num_rows] = starts[counts.sequence] + trees.depths
            padding_trees = _chains(padding.positions.tobytes(), self._num_words)
            words = trees.mask.shape[1]
            arrays["parents"][:num_rows] = trees.parents
            arrays["parents"][num_rows:] = padding_trees.parents
            mask = arrays["tree_mask"]
            mask[:num_rows, :words] = trees.mask
            mask[:num_rows, words:] = 0
            mask[num_rows:] = padding_trees.mask
        if layout.recurrent is not None:
            columns = zip(RecurrentRows._fields, layout.recurrent, padding.recurrent, strict=True)
            for name, given, rest in columns:
                arrays[name][:batch_size] = given
                arrays[name][batch_size:] = rest
        for name, column in sampling.items():
            own = arrays["chosen_positions" if name == "positions" else name]
            own[:batch_size] = column
            own[batch_size:] = 0
        self._packed.send()
