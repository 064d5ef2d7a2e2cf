"""Hidden states that wait are counted as long as their memory is kept, and keep no memory of others."""

from __future__ import annotations

import torch

from specdec_fast.drafters.shared.queued_features import KeptRows, KeptStates, QueuedFeatures


def forward_of(num_rows, total):
    return KeptStates(torch.arange(num_rows * 6.0).view(num_rows, 2, 3), total)


def test_all_rows_of_a_forward_count_while_one_of_them_waits():
    total, one, other = KeptRows(), QueuedFeatures(), QueuedFeatures()
    kept = forward_of(10, total)
    one.add(kept, [0, 1, 3])
    other.add(kept, range(7, 8))
    assert (total.num_rows, one.num_queued, other.num_queued) == (10, 3, 1)
    taken = torch.cat(one.take(2) + one.take(1))
    assert torch.equal(taken, kept.hidden_states[[0, 1, 3]])
    assert (total.num_rows, one.num_queued, one.kv_length) == (10, 0, 3)
    other.clear()
    assert (total.num_rows, other.num_queued, other.kv_length) == (0, 0, 0)


def test_what_waits_of_a_long_prompt_keeps_no_memory_of_the_rest():
    total, features = KeptRows(), QueuedFeatures()
    kept = forward_of(40, total)
    features.add(kept, range(39))
    features.take(37)
    features.copy_rest(total)
    assert total.num_rows == features.num_queued == 2
    rest = features.take(2)[0]
    assert torch.equal(rest, kept.hidden_states[37:39])
    assert rest.untyped_storage().nbytes() == rest.nbytes
    assert total.num_rows == 0
