"""The invariants of the design, checked on a running engine after every step."""

from __future__ import annotations

import contextlib
import sys

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from specdec_fast.oracle import autoregressive

TOLERANCE = 1e-4  # on fp32 KV entries of unit size recomputed in another order; a wrong entry is off by about 1


_attended: dict[int, tuple] = {}


def _noting(module, query, key, value, *args, **kwargs):
    _attended[module.layer_idx] = (key[0].transpose(0, 1), value[0].transpose(0, 1))
    own = sys.modules[type(module).__module__].eager_attention_forward  # with sinks, where the model has some
    return own(module, query, key, value, *args, **kwargs)


AttentionInterface.register("noting", _noting)
AttentionMaskInterface.register("noting", eager_mask)


@torch.inference_mode()
def dense_kv(model, token_ids):
    """Recompute what each layer attends over after a prefix: keys and values ``[n, num_kv_heads, head size]``."""
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    config._attn_implementation = "noting"
    try:
        model(torch.tensor([token_ids]), use_cache=False)
        return [_attended[layer] for layer in sorted(_attended)]
    finally:
        config._attn_implementation = before
        _attended.clear()


def slots_of(pool, owner, num_positions):
    table = pool.block_table(owner)
    return [table[p // pool.page_size] * pool.page_size + p % pool.page_size for p in range(num_positions)]


def kept_pages(pool):
    return set() if pool.prefixes is None else set(pool.prefixes.key_of)


def depths_of_mask(tree_mask):
    """How many rows each row descends from, by counting the bits of its mask."""
    return [sum(bin(word & 0xFFFFFFFF).count("1") for word in row) - 1 for row in tree_mask.tolist()]


class CheckedEngine:
    """Wraps an engine so that every step of ``generate`` asserts I1 to I6.

    Before each step all KV memory that no committed token owns is filled with NaN, so any read of it shows. Of a
    drafter that is no model, these are the pages without an owner.

    Args:
        engine: the engine; its requests are greedy, unless ``expected`` has their tokens.
        poison: whether to fill memory with NaN.
        expected: tokens by prompt and ``max_new_tokens``; those that it lacks are computed by the oracle.
        tolerance: on KV entries that are computed anew; None: they are not compared, because rounding hides mistakes.

    """

    def __init__(self, engine, poison=True, expected=None, tolerance=TOLERANCE):
        self.engine, self.poison, self.tolerance = engine, poison, tolerance
        self.expected = {} if expected is None else expected
        self.num_checked = 0
        self._launch, engine.core._launch = engine.core._launch, self.launch
        self._finish, engine.core._finish = engine.core._finish, self.finish
        self._forward, engine.target.forward = engine.target.forward, self.forward
        if program := engine.target.program:
            self._verify, program.verify = program.verify, self.verify
        self._before = {}
        self._kept = {}  # by pool and key: the bits that a page had when it was first seen to be kept

    def generate(self, prompts, params):
        self.params = params
        return self.engine.generate(prompts, params)

    @property
    def _pools(self):
        """(pool, model, committed KV length per owner) of the target, and of the drafter if it has one."""
        pools = [(self.engine.core.pool, self.engine.target.model, lambda s: s.target_kv_length)]
        drafter = self.engine.drafter
        if hasattr(drafter, "draft_kv_length"):
            pools.append((drafter.pool, drafter.model.model, lambda s: drafter.draft_kv_length[s]))
        return [pool for pool in pools if pool[0] is not None]

    @property
    def _other_pool(self):
        """The pool of a drafter that is no model; None if there is none."""
        drafter = self.engine.drafter
        return None if hasattr(drafter, "draft_kv_length") else getattr(drafter, "pool", None)

    def launch(self, room):
        if self.poison:
            self._poison()
        self._before = {s: (s.length, s.stats.num_accepted_tokens) for s in room.batch}
        return self._launch(room)

    def finish(self, step):
        emitted = self._finish(step)
        for pool, model, kv_length in self._pools:
            self._check_pages(pool)
            for sequence in pool._pages_of:
                if sequence.finish_reason is None:
                    self._check_cache(pool, model, sequence, kv_length(sequence))
        if self._other_pool is not None:
            self._check_pages(self._other_pool)
        self._check_lag(emitted)
        for sequence, tokens in emitted:
            self._check_emission(sequence, tokens)
        self.num_checked += len(emitted)
        return emitted

    def forward(self, batch, pool, *rest):
        """I1: every row's position is its index in its own sequence, and the rows of a sequence are its last ones.

        In a tree, a row's index is that in the text of its path.
        """
        bounds = batch.cu_seqlens_q.tolist()
        owners = list(pool._pages_of)
        for i, used in enumerate(batch.seqused_k.tolist()[: len(batch.last_rows)]):  # padding has no owner
            rows = slice(bounds[i], bounds[i + 1])
            positions = batch.positions[rows].tolist()
            above = range(len(positions)) if batch.tree_mask is None else depths_of_mask(batch.tree_mask[rows])
            assert positions == [used - len(positions) + depth for depth in above], "I1: positions"
            pages = batch.block_table[i, : pool.num_pages_for(used)].tolist()
            owner = next(s for s in owners if pool._pages_of[s][: len(pages)] == pages)
            committed = owner.token_ids[positions[0] :]
            assert batch.tree_mask is None or len(committed) == 1, "I1: a tree begins at the last committed token"
            fed = batch.token_ids[rows].tolist()[: len(committed)]
            assert fed == committed[: len(fed)], "I6: rows stand on the pages of another sequence"
        return self._forward(batch, pool, *rest)

    def verify(self, spans, last_tokens, draft_tokens, sampling, *taps):
        """I1 for spans that a program lays out: they begin at the last committed token of their owner."""
        owners = {place: owner for owner, place in self.engine.core.pool._places.items()}
        for (place, start, count, *_), token in zip(spans.spans, last_tokens, strict=True):
            owner = owners[place]
            assert token == owner.token_ids[-1], "I6: rows stand on the pages of another sequence"
            assert start == owner.length - 1, "I1: positions"
            assert count <= owner.num_remaining or spans.parents is not None
        return self._verify(spans, last_tokens, draft_tokens, sampling, *taps)

    def _poison(self):
        for pool, _, kv_length in self._pools:
            owned = [slot for s in pool._pages_of for slot in slots_of(pool, s, kv_length(s))]
            owned += [page * pool.page_size + i for page in kept_pages(pool) for i in range(pool.page_size)]
            for tensor in pool.tensors:
                flat = tensor.flatten(2, 3)  # [layers, planes, slots, heads, head size]
                keep = torch.zeros(flat.shape[2], dtype=torch.bool)
                keep[owned] = True
                flat[:, :, ~keep] = float("nan")
        if self._other_pool is not None:
            for tensor in self._other_pool.tensors:
                tensor[:, :, self._other_pool._free] = float("nan")

    def _check_cache(self, pool, model, sequence, kv_length):
        """I2: the entry at position i is the one computed for committed token i."""
        assert kv_length <= sequence.length - 1, "I3: the newest committed token has no KV"
        if not kv_length or self.tolerance is None:
            return
        slots = slots_of(pool, sequence, kv_length)
        recomputed = dense_kv(model, sequence.token_ids[:kv_length])
        for layer, pair in enumerate(zip(pool.layers, recomputed, strict=True)):
            for cached, expected in zip(*pair, strict=True):
                difference = (cached.flatten(0, 1)[slots] - expected).abs().max()
                assert difference < self.tolerance, f"I2: KV of layer {layer} off by {difference}"

    def _check_lag(self, emitted):
        """I3: the target lacks the newest token; the draft lacks one more after a full acceptance, never more.

        If it was not called, it lacks all tokens since its last call.
        """
        for sequence, _ in emitted:
            if sequence.finish_reason is None:
                assert sequence.target_kv_length == sequence.length - 1, "I3: target lag"
                lengths = getattr(self.engine.drafter, "draft_kv_length", {})
                if isinstance(self.engine.config.num_draft_tokens, int):
                    assert lengths.get(sequence, sequence.length - 2) >= sequence.length - 2, "I3: draft lag"

    def _check_pages(self, pool):
        """I4: rejection hands out and takes back nothing; no page has two owners, and the scratch page has none.

        Kept pages may have several, and never change.
        """
        owned = [page for table in pool._pages_of.values() for page in table]
        assert 0 not in owned
        kept = kept_pages(pool)
        shared = {page for page in owned if owned.count(page) > 1}
        assert shared <= kept, "I4: a page has two owners"
        every = sorted({*owned, *kept, *pool._free})
        assert every == list(range(1, pool.num_pages + 1)), "I4: a page was lost"
        assert not {*owned, *kept} & {*pool._free}, "I4: a page in use is free"
        if pool.prefixes is not None:
            self._check_kept(pool, owned)

    def _check_kept(self, pool, owned):
        prefixes = pool.prefixes
        assert {page: key for key, page in prefixes.page_of.items()} == prefixes.key_of
        assert [0, *map(owned.count, range(1, pool.num_pages + 1))] == prefixes.num_owners, "a page's owners"
        assert {*prefixes.idle} == {*prefixes.key_of} - {*owned}, "idle pages are kept ones without an owner"
        for key, page in prefixes.page_of.items():
            bits = [tensor[:, :, page].clone().view(torch.uint8) for tensor in pool.tensors]
            before = self._kept.setdefault((id(prefixes), key), bits)
            assert all(map(torch.equal, before, bits)), f"page {page} was written while it was kept"

    def _check_emission(self, sequence, tokens):
        """I5 and I6: the tokens are plain decoding's; accepted + 1 of them, unless the request ended."""
        key = (tuple(sequence.token_ids[: sequence.prompt_length]), sequence.params.max_new_tokens)
        if key not in self.expected:
            model, new_tokens = self.engine.target.model, sequence.params.max_new_tokens
            self.expected[key] = autoregressive(model, list(key[0]), new_tokens, sequence.stop_ids)
        emitted = sequence.emitted_ids
        assert sequence.error is None, sequence.error
        assert emitted == self.expected[key][: len(emitted)], "I5/I6: a token differs from plain decoding"
        length_before, accepted_before = self._before[sequence]
        assert sequence.length == length_before + len(tokens)
        if sequence.finish_reason is None:
            accepted = sequence.stats.num_accepted_tokens - accepted_before
            assert len(tokens) == accepted + 1, "I5: accepted + 1 tokens per step"
        else:
            assert emitted == self.expected[key], "I5: the request ended early"


@contextlib.contextmanager
def patched(owner, name, replacement):
    """Replace a method for the duration of a block; the replacement gets the original first."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: replacement(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, original)
