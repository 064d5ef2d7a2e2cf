"""Programs of launches that exchange numbers between ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from specdec_fast.models.sharded import ConcatenatedLinear, SummedEmbedding, SummedLinear
from specdec_fast.ranks.exchange import Ranks
from specdec_fast.ranks.operations import forget, number_of
from support.device_programs import launched

VOCAB_SIZE, FIRST, HIDDEN = 40, 16, 24


class Alone(Ranks):
    """The second of two ranks, the first of which always computes ones."""

    rank, size, native = 1, 2, None

    def sum(self, rows):
        return torch.ones_like(rows) + rows

    def concatenate(self, rows, widths):
        assert rows.shape[-1] == widths[1]
        return torch.cat([rows.new_ones(*rows.shape[:-1], widths[0]), rows], dim=-1)


@pytest.fixture
def ranks():
    alone = Alone()
    yield number_of(alone)
    forget(alone)


class Sharded(nn.Module):
    """An embedding, a linear over some inputs with a bias, and an output layer, of which this rank has a part."""

    def __init__(self, ranks, dtype):
        super().__init__()
        counts = [FIRST, VOCAB_SIZE - FIRST]
        table = nn.Embedding(VOCAB_SIZE - FIRST, HIDDEN)
        self.embedding = SummedEmbedding(table, ranks, counts, FIRST)
        self.linear = SummedLinear(nn.Linear(HIDDEN, HIDDEN), ranks)
        self.head = ConcatenatedLinear(nn.Linear(HIDDEN, counts[1], bias=False), ranks, counts)
        self.to(dtype).eval()

    def forward(self, token_ids, positions, cache, logit_rows):
        hidden = self.embedding(token_ids)
        hidden = hidden + torch.nn.functional.silu(self.linear(hidden))
        return self.head(hidden[:, logit_rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@torch.inference_mode()
def test_a_program_sums_and_concatenates_as_pytorch_does(ranks, dtype):
    torch.manual_seed(0)
    model = Sharded(ranks, dtype)
    token_ids = torch.tensor([FIRST, 3, VOCAB_SIZE - 1, FIRST - 1, 0, 30])  # of both ranks' parts
    logits = launched(model)(token_ids)
    rows = torch.arange(len(token_ids))
    expected = model(token_ids[None], rows[None], None, rows)[0]
    assert torch.equal(logits[:, :FIRST], torch.ones(len(token_ids), FIRST, dtype=dtype))
    assert logits.shape == (len(token_ids), VOCAB_SIZE)
    torch.testing.assert_close(logits, expected)
    alike = logits[torch.tensor([1, 3, 4])]
    assert torch.equal(alike, alike[:1].expand_as(alike))  # tokens that this rank has not got have zeros
    assert not torch.equal(logits[0], logits[2])
