"""Token ids and positions as numbers of a program: computed for every row, never kept from the recording."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from specdec_fast.kv_cache.cache_rules import CacheRules
from specdec_fast.ops import resolve
from specdec_fast.program import NotLowerableError, compile_forward
from support.models import VOCAB_SIZE
from support.programs import CPU, DTYPES, NO_LAYERS, WIDTH, Function, compiled, needs_programs

pytestmark = needs_programs
TABLE = torch.randn(VOCAB_SIZE, WIDTH, generator=torch.Generator().manual_seed(2))
PLACEHOLDER, PAD = 41, 5


class OfTokens(Function):
    """A model without layers: ``function`` of the embedding's weights ``[V, WIDTH]`` and the token ids ``[1, T]``."""

    def forward(self, token_ids, positions, cache=None, logit_rows=None):
        out = self.function(self.embedding.weight, token_ids)
        return out if logit_rows is None else out[:, logit_rows]


def replaced(weight, ids):
    other = ids.clone()
    other[ids == PLACEHOLDER] = PAD
    return F.embedding(other, weight)


def of_several_masks(weight, ids):
    mask = (ids == PLACEHOLDER) | (ids == 7) | ~(ids < 90)
    rows = F.embedding(torch.where(mask, PAD, ids), weight)
    return torch.where(mask[..., None], TABLE[PAD].to(weight.dtype).view(1, 1, -1), rows * 2)


FUNCTIONS = {
    "replaced": replaced,
    "of_several_masks": of_several_masks,
    "masked": lambda w, ids: F.embedding(ids.masked_fill(ids > 60, 3), w),
    "clamped": lambda w, ids: F.embedding(ids.clamp(10, 20), w),
    "shifted": lambda w, ids: F.embedding((ids + 1).clamp(max=VOCAB_SIZE - 1), w),
    "indexed": lambda w, ids: w[torch.maximum(ids.to(torch.int32), torch.tensor(50)).long()],
    "as_numbers": lambda w, ids: F.embedding(ids, w) * (ids + 3001)[..., None] + ids.float()[..., None].to(w.dtype),
    "chosen": lambda w, ids: F.embedding(F.embedding(ids, w).float().argmax(-1), w),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@torch.inference_mode()
def test_token_ids_are_those_of_the_row(name, dtype):
    """The recordings have the token ids 0 and 1."""
    model, token_ids = OfTokens(FUNCTIONS[name], dtype), torch.arange(97)
    assert torch.equal(compiled(model)(token_ids), model(token_ids[None], None)[0])


@pytest.mark.parametrize("name", FUNCTIONS)
@torch.inference_mode()
def test_kernels_take_token_ids_of_the_row(name):
    pytest.importorskip("triton")
    from support.device_programs import launched

    model, token_ids = OfTokens(FUNCTIONS[name], torch.float16), torch.tensor([PLACEHOLDER, 7, 96, 60])
    assert torch.equal(launched(model)(token_ids), model(token_ids[None], None)[0])


KINDS, NUMBERS = torch.arange(VOCAB_SIZE) % 7 % 3, torch.linspace(-1, 1, VOCAB_SIZE + 2)


def per_axis(p):
    """Positions for text, time, height and width, as models of images and text have them: here they are equal."""
    four = p[None].expand(4, *p.shape)
    text, rest = four[0], four[1:].transpose(0, 1).transpose(0, 1)
    angles = rest[..., None].float() * FREQUENCIES  # [3, 1, T, WIDTH]
    angles = torch.cat((angles[0, ..., :8], angles[1, ..., 8:16], angles[2, ..., 16:]), -1)
    return torch.where((text > 50)[..., None], angles, -angles)


def numbers_of_rows(p):
    return torch.arange(p.shape[1])


FREQUENCIES = torch.linspace(0.5, 2, WIDTH)
OF_POSITIONS = {
    "kind_of_a_position": lambda x, p: x * F.embedding(KINDS.expand(1, -1).gather(1, p), TABLE).to(x.dtype),
    "number_of_a_position": lambda x, p: x * NUMBERS.to(x.dtype)[p + 2][..., None],
    "number_of_a_computed_place": lambda x, p: x * NUMBERS.to(x.dtype)[(p.clamp(max=90) > 40).long()][..., None],
    "row_of_whole_numbers": lambda x, p: x * torch.stack((KINDS, KINDS + 1), 1)[p].to(x.dtype).sum(-1, keepdim=True),
    "per_axis": lambda x, p: per_axis(p).to(x.dtype),
    "of_lengths": lambda x, p: x * (numbers_of_rows(p) + (p - numbers_of_rows(p) + 1))[..., None].to(x.dtype),
    "rows_per_axis": lambda x, p: F.embedding(p.expand(3, *p.shape), TABLE.to(x.dtype)).permute(1, 2, 0, 3).flatten(2),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OF_POSITIONS)
@torch.inference_mode()
def test_positions_are_those_of_the_row(name, dtype):
    """The recordings have the positions 0 to 7."""
    model, token_ids = Function(OF_POSITIONS[name], dtype), torch.arange(97)
    assert torch.equal(compiled(model)(token_ids), model(token_ids[None], torch.arange(97)[None])[0])


@pytest.mark.parametrize("name", OF_POSITIONS)
@torch.inference_mode()
def test_kernels_take_positions_of_the_row(name):
    pytest.importorskip("triton")
    from support.device_programs import launched

    model, token_ids = Function(OF_POSITIONS[name], torch.float16), torch.arange(12)
    assert torch.equal(launched(model)(token_ids), model(token_ids[None], torch.arange(12)[None])[0])


def test_a_vector_of_whole_numbers_is_watched_for_changes():
    """A program keeps a copy of it, in fp32."""
    model = Function(lambda x, p: x * model.kinds[p][..., None])
    model.register_buffer("kinds", KINDS.clone())
    plan = compile_forward(model, model, NO_LAYERS, resolve(CPU), CacheRules())
    assert any(tensor is model.kinds for tensor in plan.baked)


def test_an_index_outside_of_the_table_is_refused():
    program = compiled(OfTokens(lambda w, ids: F.embedding(torch.where(ids == 3, -2, ids), w)))
    with pytest.raises(IndexError, match=f"index -2 lies outside a table of {VOCAB_SIZE} rows"):
        program(torch.tensor([1, 3]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_numbers_are_compared_in_the_dtype_of_the_rows(dtype):
    """PyTorch rounds the number, so a row that has the rounded number is not greater."""
    model = Function(lambda x, p: torch.cat([(x > 0.1).float(), (x == torch.tensor(0.3)).float()], -1), dtype)
    model.embedding.weight.data[:] = torch.tensor([0.1, 0.3] * (WIDTH // 2)).to(dtype)
    token_ids = torch.arange(3)
    expected = model(token_ids[None], None)[0]
    assert torch.equal(compiled(model)(token_ids), expected)
    assert expected[0, :2].tolist() == [0, 1]
    assert expected[0, WIDTH:][:2].tolist() == [0, 1]


def recorded(function, max_positions):
    model = Function(function)
    return compile_forward(model, model, NO_LAYERS, resolve(CPU), CacheRules(), None, max_positions)


LENGTH = {
    "where": lambda x, p: x * torch.where(p.max() + 1 > 64, TABLE[0], TABLE[1]),
    "if": lambda x, p: x if bool(torch.max(p) + 1 > 64) else -x,
    "other_way": lambda x, p: x if p.max() - 64 < 0 else -x,
    "equal": lambda x, p: x if p.max() != 64 else -x,
}


@pytest.mark.parametrize("name", LENGTH)
def test_comparisons_with_the_longest_text_are_decided_by_the_bounds(name):
    """Up to 64 positions no text is longer than that; if there may be 65, a program would be wrong for some of them."""
    assert recorded(LENGTH[name], 64).instructions
    for limit in (66, None):
        with pytest.raises(NotLowerableError, match=r"either way|largest number of all rows"):
            recorded(LENGTH[name], limit)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, p: x * p.max(), "a number of the whole batch"),
        (lambda x, p: x if p.max() else -x, "Python decides"),
        (lambda x, p: x * x.max(), "largest number of all rows"),
        (lambda x, p: x * (p - numbers_of_rows(p))[..., None], "positions minus the numbers of rows"),
        (lambda x, p: x * (p - 2 * numbers_of_rows(p))[..., None], "sub of integers"),
        (lambda x, p: x * (p == 2**24 + 1)[..., None], "integers and 16777217"),
        (lambda x, p: F.embedding(x.topk(2).indices, TABLE).sum(-2), "one integer for each row"),
        (lambda x, p: F.embedding(p, x[0]), "a table that is not plain"),
        (lambda x, p: x * p[None].expand(2, *p.shape).reshape(1, -1, 2), "rows are not an axis of their own"),
        (lambda x, p: x * (KINDS + 2**25)[p][..., None], "integers beyond 16777216"),
        (lambda x, p: x * p.expand(p.shape[1], -1).sum(), "integers of the batch in a shape"),
        (lambda x, p: torch.view_as_complex(x.view(1, -1, 12, 2)).abs(), "abs.*complex numbers"),
    ],
)
def test_what_integers_cannot_express_is_refused_with_the_operation(function, message):
    with pytest.raises(NotLowerableError, match=message) as error:
        recorded(function, 64)
    assert str(error.value).startswith("aten.")


class Rewriting(Function):
    """A model that fills a buffer before it reads it, as LongRoPE does with its frequencies."""

    def __init__(self):
        super().__init__(lambda x, p: x)
        self.register_buffer("factors", torch.ones(WIDTH))

    def forward(self, token_ids, positions, cache=None, logit_rows=None):
        self.factors.copy_(TABLE[3] * 2)
        out = self.embedding(token_ids) * self.factors
        return out if logit_rows is None else out[:, logit_rows]


@torch.inference_mode()
def test_a_program_sees_what_the_model_wrote_while_it_was_recorded():
    model, token_ids = Rewriting(), torch.arange(9)
    plan = compile_forward(model, model, NO_LAYERS, resolve(CPU), CacheRules())
    assert all(tensor is not model.factors for tensor in plan.baked)
    program = compiled(model)
    expected = model(token_ids[None], None)[0]
    model.factors.zero_()  # another forward of the model would fill it again
    assert torch.equal(program(token_ids), expected)
