"""Functions of rows and positions that programs compute, by the operations that they consist of."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from support.models import VOCAB_SIZE
from support.programs import WIDTH

FREQUENCIES = torch.linspace(0.01, 2, 5)
WEIGHT, BIAS = torch.linspace(-2, 2, WIDTH), torch.linspace(0.5, 3, WIDTH)
TABLE = torch.randn(VOCAB_SIZE + 2, WIDTH, generator=torch.Generator().manual_seed(1))
ORDER = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(2))
COMPARISONS = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)


def widened(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def group_limited(x):
    """The router of DeepSeek-V3: the best experts of the best two of four groups."""
    scores = widened(x).sigmoid()
    choice = scores + 1e-4 * torch.arange(WIDTH)
    groups = choice.view(-1, 4, 6).topk(2, dim=-1)[0].sum(dim=-1).topk(2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(choice[:, :4]).scatter_(1, groups, 1).unsqueeze(-1).expand(-1, 4, 6).reshape(-1, WIDTH)
    weights = scores.gather(1, choice.masked_fill(~mask.bool(), float("-inf")).topk(4, dim=-1)[1])
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights * 2.5


def put_together(x):
    out = x.new_empty(*x.shape[:2], 4, 8)
    out[..., :6] = x.view(1, -1, 4, 6)
    out[..., 6:].copy_(x[:, :, None, :2].expand(-1, -1, 4, -1))
    return out.flatten(2)


def overwritten_after_a_copy(x):
    x = x * 1
    before = x.clone()
    head = before[..., :6]  # a view of the copy, which keeps the old numbers, too
    x[..., :4] = x[..., 4:8]
    x.mul_(2)
    return torch.cat((x - before, head), -1)


def changed_through_a_view(x):
    x = x * 1
    heads = x.view(1, -1, 4, 6)
    heads[:, :, 1:].add_(x[..., None, :6])
    heads[..., 2] *= 3
    x[..., :5].neg_()
    return torch.cat((x, heads.transpose(2, 3).flatten(2)), -1)


def a_copy_is_changed(x):
    """A tensor that PyTorch has copied, with a view of it, shows what is written into the copy; the first does not."""
    x = x * 1
    repeated = x[..., None].contiguous().squeeze(-1).clone()
    half = repeated[..., ::2]
    half.sub_(1)
    return torch.cat((x, repeated), -1)


def constants_of_all_rows(x):
    """Zeros and other numbers that a model makes for every row of the batch."""
    shape = x.shape[:2]
    x = torch.cat((torch.zeros(*shape, 3, dtype=x.dtype), x, TABLE[:3, :2].to(x.dtype)[None, :1].expand(*shape, 2)), -1)
    return x * torch.full((*shape, 1), 2.0, dtype=x.dtype) + torch.ones(shape[1], 1, dtype=x.dtype)


def over_heads(x, function):
    """A function along the axis of heads, not the last one."""
    heads = function(x.view(1, -1, 4, 6), dim=2, keepdim=True)
    return torch.cat((heads.squeeze(2), heads.transpose(1, 2).flatten(0, 1)), -1)


def tall(x):
    """The product of a matrix whose rows are columns of the memory, as Gemma-3n's layers multiply their inputs."""
    inputs = torch.stack((x, x * 2, x.square()), 0)
    factors = x[..., :9].reshape(1, -1, 3, 3).permute(0, 1, 3, 2)
    return (
        (torch.matmul(inputs.permute(1, 2, 3, 0), factors).permute(3, 0, 1, 2) + inputs).permute(1, 2, 0, 3).flatten(2)
    )


def repeated_in_front(x):
    return (x.repeat(3, 1, 1, 1) * TABLE[:3, None, None].to(x.dtype)).permute(1, 2, 0, 3).flatten(2)


def turned(p):
    angles = p[..., None].float() * torch.linspace(0.01, 2, WIDTH // 2)
    return torch.polar(torch.full_like(angles, 1.5), angles) * 0.5


def rotated(x, p):
    pairs = torch.view_as_complex(widened(x).float().reshape(*x.shape[:-1], -1, 2)).unsqueeze(2)
    return torch.view_as_real(pairs * turned(p).unsqueeze(2)).flatten(2).type_as(x)


FUNCTIONS = {
    # functions of one number
    "copy": lambda x, p: x.clone(), "neg": lambda x, p: -x, "abs": lambda x, p: x.abs(),
    "square": lambda x, p: x**2, "cube": lambda x, p: x**3, "sqrt": lambda x, p: (x * x).sqrt(),
    "rsqrt": lambda x, p: (x * x + 0.1).rsqrt(), "reciprocal": lambda x, p: x.abs().add(1).reciprocal(),
    "exp": lambda x, p: x.exp(), "sin": lambda x, p: x.sin(), "cos": lambda x, p: x.cos(),
    "sin_of_much": lambda x, p: (widened(x) * 3e4).sin().to(x.dtype), "cos_of_much": lambda x, p: (x * 900).cos(),
    "sigmoid": lambda x, p: x.sigmoid(), "silu": lambda x, p: F.silu(x), "tanh": lambda x, p: x.tanh(),
    "relu": lambda x, p: x.relu(), "gelu": lambda x, p: F.gelu(x),
    "gelu_tanh": lambda x, p: F.gelu(x, approximate="tanh"), "floor": lambda x, p: (x * 3).floor(),
    "log": lambda x, p: torch.cat((x.abs().log(), (1 + x / 1000).log()), -1),
    "log1p": lambda x, p: torch.cat((x.abs().log1p(), (x / 1000).log1p()), -1),
    "expm1": lambda x, p: torch.cat((x.expm1(), (x / 1000).expm1()), -1), "softplus": lambda x, p: F.softplus(x),
    "softplus_steep": lambda x, p: F.softplus(x, beta=2, threshold=3),
    # of two, with constants, scalars and repeated numbers on either side
    "add": lambda x, p: x + WEIGHT, "sub": lambda x, p: WEIGHT - x, "rsub": lambda x, p: 1.5 - x,
    "mul": lambda x, p: 2.5 * x, "div": lambda x, p: x / BIAS, "by_a_number": lambda x, p: x / torch.tensor(3.0),
    "broadcast": lambda x, p: (x.view(1, -1, 4, 6) * x[..., :6].unsqueeze(2)).flatten(2),
    "maximum": lambda x, p: torch.maximum(x, WEIGHT.to(x.dtype)), "clamp": lambda x, p: x.clamp(min=-1.5, max=2),
    "max_of_two": lambda x, p: torch.max(torch.min(x, WEIGHT.to(x.dtype)), torch.tensor(-0.5)),
    "minimum": lambda x, p: torch.minimum(x, x.view(1, -1, 2, 12)[:, :, 0].repeat_interleave(2, -1)),
    "clamp_min": lambda x, p: x.clamp_min(0.5), "clamp_max": lambda x, p: x.clamp_max(0.5),
    # that compare and choose
    "compare": lambda x, p: torch.cat([f(x, WEIGHT).to(x.dtype) for f in COMPARISONS], -1),
    "logic": lambda x, p: (~((x > 0) & (x < 2)) | (x == 0)).float(),
    "where": lambda x, p: torch.where(x > WEIGHT, x, -1.0) + torch.where(x > 1, 2.0, x),
    "masked_fill": lambda x, p: x.masked_fill(~(x > 0).float().bool(), float("-inf")),
    "softmax": lambda x, p: x.softmax(-1), "softmax_wide": lambda x, p: widened(x).softmax(-1),
    "softmax_of_heads": lambda x, p: x.view(1, -1, 4, 6).transpose(1, 2).softmax(-1).transpose(1, 2).flatten(2),
    "topk": lambda x, p: x.view(-1, WIDTH).topk(5, dim=-1)[0][None],
    "places": lambda x, p: (x.float() + 1e-4 * torch.arange(WIDTH)).topk(5).indices.float(),
    "largest": lambda x, p: torch.cat([y.float() for y in x.view(1, -1, 4, 6).max(-1)], -1),
    "argmax": lambda x, p: x.argmax(-1, keepdim=True).float(),
    "gather": lambda x, p: x.square().gather(-1, (x.float() + 1e-4 * torch.arange(WIDTH)).topk(5).indices),
    "numbers_of_a_vector": lambda x, p: WEIGHT.to(x.dtype)[x.view(1, -1, 4, 6).topk(2).indices].flatten(2),
    "scatter": lambda x, p: torch.full_like(x, -1).scatter(-1, x[..., :8].topk(3).indices, 2.5),
    "scatter_rows": lambda x, p: torch.ones_like(x).scatter_(-1, x[..., :8].topk(3).indices, x[..., :3]),
    "group_limited": lambda x, p: group_limited(x[0])[None],
    "in_place": lambda x, p: x.clone().div_(x.abs().sum(-1, keepdim=True)).add_(1).mul_(WEIGHT.to(x.dtype)),
    # over the last axis
    "mean": lambda x, p: x.mean(-1, keepdim=True), "sum": lambda x, p: x.view(1, -1, 4, 6).sum(-1),
    "layer_norm": lambda x, p: F.layer_norm(x, (WIDTH,), WEIGHT.to(x.dtype), BIAS.to(x.dtype)),
    "layer_norm_bare": lambda x, p: F.layer_norm(x, (WIDTH,)),
    "rms_norm": lambda x, p: F.rms_norm(x, (WIDTH,), WEIGHT.to(x.dtype), 1e-6),
    "rms_norm_of_heads": lambda x, p: F.rms_norm(x.view(1, -1, 4, 6), (6,)).flatten(2),
    "mean_of_heads": lambda x, p: x.view(1, -1, 4, 6).mean(2), "sum_kept": lambda x, p: over_heads(x, torch.sum),
    "norm_1": lambda x, p: x.norm(p=1, dim=-1, keepdim=True), "norm_2": lambda x, p: over_heads(x, torch.norm),
    "normalize": lambda x, p: F.normalize(x.view(1, -1, 4, 6), dim=-1).flatten(2),
    "std": lambda x, p: torch.std(x, -1, keepdim=True, unbiased=False),
    "std_of_heads": lambda x, p: over_heads(x, torch.std),
    "var": lambda x, p: x.view(1, -1, 4, 6).var(-1), "var_corrected": lambda x, p: x.var(-1, correction=3)[..., None],
    # products of two matrices of a row
    "product": lambda x, p: (x.view(1, -1, 4, 6) @ x.reshape(1, -1, 6, 4)).flatten(2),
    "product_of_a_constant": lambda x, p: (TABLE[:9, :4].to(x.dtype) @ x.view(1, -1, 4, 6)).flatten(2),
    "product_of_a_tall_one": lambda x, p: tall(x), "product_of_many": lambda x, p: (
        x.view(1, -1, 2, 1, 12) @ x.view(1, -1, 1, 12, 2)).flatten(2),
    # the same numbers elsewhere
    "rotate_half": lambda x, p: torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1),
    "rotate_pairs": lambda x, p: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2),
    "repeat": lambda x, p: x[..., :5].repeat_interleave(2, dim=-1),
    "repeated": lambda x, p: x.view(1, -1, 4, 6).repeat(1, 1, 2, 3).flatten(2),
    "repeated_in_front": lambda x, p: repeated_in_front(x),
    "constants_of_all_rows": lambda x, p: constants_of_all_rows(x),
    "other_names": lambda x, p: torch.cat((torch.multiply(x, 2).subtract_(1).absolute(), x.greater(1).to(x.dtype)), -1),
    "overwritten_after_a_copy": lambda x, p: overwritten_after_a_copy(x),
    "changed_through_a_view": lambda x, p: changed_through_a_view(x),
    "a_copy_is_changed": lambda x, p: a_copy_is_changed(x),
    "split": lambda x, p: x.split([8, 4, 12], -1)[2] * x.chunk(2, -1)[0],
    "heads": lambda x, p: (x.view(1, -1, 4, 6).transpose(1, 2) * 2).transpose(1, 2).reshape(1, x.shape[1], WIDTH),
    "swapped": lambda x, p: x.view(1, -1, 4, 6).transpose(2, 3).reshape(1, x.shape[1], WIDTH),
    "expand": lambda x, p: (x[:, :, None, :6].expand(1, -1, 3, 6) + 1).flatten(2),
    "unbind": lambda x, p: x.view(1, -1, 3, 8).unbind(2)[1], "select": lambda x, p: x.view(1, -1, 3, 8)[:, :, -1],
    "put_together": lambda x, p: put_together(x),
    # of positions
    "rotary": lambda x, p: (p[..., None].float() * FREQUENCIES).cos().to(x.dtype),
    "rotary_product": lambda x, p: (FREQUENCIES[None, :, None] @ p[:, None, :].float()).transpose(1, 2),
    "learned_positions": lambda x, p: x + F.embedding(p + 2, TABLE.to(x.dtype)),
    "scaled_by_position": lambda x, p: x * (1 + 0.1 * torch.log(1 + torch.floor(p / 16)))[..., None].to(x.dtype),
    "whole_times_halves": lambda x, p: torch.cat((x * (p + 3001)[..., None], x + (p - 5001)[..., None]), -1),
    "compared_positions": lambda x, p: torch.where((p >= 20)[..., None] & (p != 40)[..., None], x, -x),
    "row_of_a_table": lambda x, p: x * TABLE.to(x.dtype)[p],
    # complex numbers
    "rotated": rotated, "polar": lambda x, p: torch.view_as_real(turned(p)).flatten(2).to(x.dtype),
    # linear layers
    "linear": lambda x, p: F.linear(x, TABLE[:11].to(x.dtype), WEIGHT[:11].to(x.dtype)),
    "linear_of_heads": lambda x, p: F.linear(x.view(1, -1, 4, 6), TABLE[:5, :6].contiguous().to(x.dtype)).flatten(2),
    "linear_of_gpt2": lambda x, p: torch.addmm(BIAS.to(x.dtype), x[0], TABLE[:WIDTH].to(x.dtype))[None],
    "linear_as_matmul": lambda x, p: x @ TABLE[:WIDTH, :7].contiguous().to(x.dtype),
    "linear_as_matmul_of_heads": lambda x, p: (x.view(1, -1, 4, 6) @ TABLE[:6].to(x.dtype)).flatten(2),
    "linear_of_a_slice": lambda x, p: F.linear(x[..., 3:9], TABLE[:5, :6].contiguous().to(x.dtype)),
    # another order of a row's numbers
    "ordered": lambda x, p: x.index_select(-1, ORDER),
    "heads_ordered": lambda x, p: x.view(1, -1, 4, 6).index_select(-1, ORDER[:9] % 6).flatten(2),
}  # fmt: skip
