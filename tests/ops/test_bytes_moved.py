"""The fewest bytes an op must move, which every bandwidth is computed with, against counts made by hand."""

from __future__ import annotations

import pytest
import torch

from bench.op_cases import OP_CASES
from support.op_cases import make


@pytest.mark.parametrize(
    ("op", "case", "dtype", "expected"),
    [
        # 48 rows of 151,936 logits, read once
        ("verify_chain", "large_vocabulary", torch.bfloat16, 48 * 151_936 * 2),
        # 48 rows of keys and of values, 2 heads x 32 numbers, read and written
        ("append_kv_", "verify", torch.float32, 48 * 2 * (2 * 32) * 2 * 4),
        # contexts 1, 16, 17, 90: keys and values of 2 heads x 32; 4 query rows and outputs of 4 heads x 32
        ("paged_attention", "decode", torch.float32, (124 * 2 * 64 + 2 * 4 * 128) * 4),
        # contexts 40 and 9, 6 rows each behind a window of 8: 13 and 9 entries
        ("paged_attention", "window", torch.float16, (22 * 2 * 64 + 2 * 12 * 128) * 2),
        # 3 entries of a path in each of 2 sequences, and its root stays: 2 layers of keys and values, read and written
        ("compact_kv_", "accepted_path", torch.float32, 6 * 2 * 2 * (2 * 32) * 2 * 4),
        # rows of 90, 97 and 83 columns move, one of 60 stays: 2 layers of keys and values, read and written
        ("realign_kv_", "step", torch.float16, 270 * 2 * 2 * (2 * 32) * 2 * 2),
        # 12 nodes of 10 tokens: an id read and a word written for each, a seed and a position for each node
        ("noise_words", "level", torch.float32, (12 * 10 * 2 + 12 * 2) * 8),
        # 25 rows of 24 channels, read, written and stored; 3 earlier inputs of 9 sequences; 24 x 4 weights
        ("conv_rows_", "mixed", torch.float16, ((3 * 25 + 9 * 3) * 24 + 24 * 4) * 2),
        # 25 rows of a query and key of 16 and of values and outputs of 2 heads x 24; 9 states of 2 x 16 x 24, read and
        # written; 10 kept rows read and 12 written, of a key, two values, two decays and two betas
        (
            *("linear_attention_rows_", "gated_delta", torch.float16),
            25 * (2 * 16 + 2 * 48) * 2 + (2 * 9 * 2 * 16 * 24 + 22 * (16 + 48 + 4)) * 4,
        ),
        # 25 rows of x and y of 24 channels, of B and C of 16, and of 24 steps; 24 x 16 of A; 9 states, read and
        # written; 22 kept rows of x, dt and B
        (
            *("selective_scan_rows_", "mixed", torch.float16),
            25 * 2 * (24 + 16) * 2 + (25 * 24 + 24 * 16 + 2 * 9 * 16 * 24 + 22 * (2 * 24 + 16)) * 4,
        ),
    ],
    ids=[
        "logits once",
        "rows twice",
        "whole contexts",
        "windows only",
        "entries that move",
        "columns that move",
        "ids and words",
        "inputs thrice",
        "states and kept rows",
        "states of channels",
    ],
)
def test_bytes_moved(op, case, dtype, expected):
    assert OP_CASES[op].bytes_moved(**make(op, case, dtype)) == expected
