"""All launches are listed in the kernel files, and no batch makes Triton compile again while it serves.

The checks run in processes of the fixture ``compiler``, because this one has Triton's interpreter in its place.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

# Cases of quantised weights whose formats are listed in bf16 alone, because compiling all of them takes long.
OF_BF16 = (
    r"quantized_linear (int4_a8|mxfp4|curved|q4_k_a8|awq_a8|q6_k)|"
    r"grouped_quantized_linear packed_experts_(rows|a8|crowded|float8|mxfp4|awq|short|q6_k)"
)
COMMON = """
import re
import torch
from triton.backends.compiler import GPUTarget
from bench.gpu_.launches import *
from specdec_fast.triton_kernels import kernel_modules
TARGET = GPUTarget("cuda", 90, 32)
LISTED = {of_variant(variant) for module in kernel_modules() for variant in module.variants()}
OF_A_MODEL = {"NUM_HEADS", "GROUP", "PAGE_SIZE", "ENTRY", "IN_FEATURES", "NUM_CHOICES"}
BY_OUTPUTS = {"BLOCK_OUT", "BLOCK_CHUNKS", "BLOCK_TILES"}  # tiles that follow from a vocabulary, or from outputs

def is_tile(name):
    return name.startswith("BLOCK_") or name in ("ALIGNMENT", "STAGES")

def is_size(name):
    return name in OF_A_MODEL or name in BY_OUTPUTS or (name.endswith("_DIM") and not is_tile(name))

def specialised(asked):  # what it is compiled for, but for the sizes of a model and the tiles that follow from them
    others = tuple((name, value) for name, value in asked.constexprs if not is_size(name) and not is_tile(name))
    return asked.module, asked.kernel, asked.signature, asked.divisible, others

def with_sizes(asked):
    return specialised(asked), tuple((name, value) for name, value in asked.constexprs if is_size(name))

KNOWN, SIZES = {specialised(asked) for asked in LISTED}, {with_sizes(asked) for asked in LISTED}

def unlisted(notes):  # no file can list the sizes of every model, but tiles and options of those that it lists
    for asked in (note.asked for note in notes):
        if specialised(asked) not in KNOWN or (with_sizes(asked) in SIZES and asked not in LISTED):
            yield f"{asked} {specialised(asked)} {asked.options}"
"""


@pytest.fixture
def run(compiler):
    """Return a function that runs a script after COMMON, and returns what it prints."""
    return lambda script: compiler.run(COMMON + script)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_cases_of_the_ops_launch_what_is_listed(run, dtype):
    """Types, what is specialised as a multiple of 16 and flags, together; of listed sizes tiles and options as well."""
    found = run(f"""
calls = calls_of_cases((torch.{dtype},), benchmarks=False)
listed = (call for call in calls if "{dtype}" == "bfloat16" or not re.match({OF_BF16!r}, call[0]))
notes = notes_of(listed, TARGET)
print(len(notes), sum(with_sizes(note.asked) in SIZES for note in notes), *unlisted(notes), sep="\\n")
""").splitlines()
    assert int(found[0]) > 60
    assert int(found[1]) > 10
    assert found[2:] == []


@pytest.mark.grid
def test_published_shapes_launch_what_is_listed_whatever_the_batch(run):
    """The first batch has one sequence of one row; no later one asks for anything else."""
    found = run("""
for name, shape in PUBLISHED.items():
    first = {}
    for rows in ((1,), (1, 1, 1), (6, 1, 3), (2,) * 17):
        for kind, call in calls_on(shape, torch.bfloat16, rows):
            notes = notes_of([(kind, call)], TARGET)
            asked = {note.asked for note in notes}
            print("launches", len(asked))
            for other in asked - first.setdefault(kind, asked):
                print(f"{name} {kind} {rows} compiles anew: {specialised(other)}")
            for line in unlisted(notes):
                print("not listed:", line)
""").splitlines()
    assert found.count("launches 1") > 50
    assert [line for line in found if not line.startswith("launches")] == []


@pytest.mark.grid
def test_what_is_compiled_for_timing_quantised_weights_is_listed(run):
    found = run("""
from bench.gpu_.quantized import calls
notes = notes_of(calls(), TARGET)
print(len(notes), *unlisted(notes), sep="\\n")
""").splitlines()
    assert int(found[0]) > 12
    assert found[1:] == []


@pytest.mark.grid
@pytest.mark.parametrize(
    ("change", "call", "kernel"),
    [
        ("specialised_too = {'chunk_ids'}", "greedy", "_chunk_kernel"),
        ("module._CHUNK = 4096", "greedy", "_chunk_kernel"),
        ("module._chunk_launch = lambda: Launch({'CHUNK': 8192}, num_warps=4)", "greedy", "_chunk_kernel"),
        ("append_kv._TILE = 512", "append", "_append_kernel"),
    ],
    ids=["alignment", "chunk", "warps", "tile"],
)
def test_another_launch_is_not_listed(run, change, call, kernel):
    """The check rejects a pointer that is specialised by where it lies, another tile, and other options."""
    found = run(f"""
import specdec_fast.triton_kernels.append_kv as append_kv
import specdec_fast.triton_kernels.verify_chain as module
from specdec_fast.triton_kernels.variant import Launch
specialised_too = set()
{change}
kernel = module._chunk_kernel
names = [name for name in kernel.do_not_specialize if name not in specialised_too]
module._chunk_kernel = JITFunction(kernel.fn, do_not_specialize=names)
calls = dict(calls_on(PUBLISHED["llama-3.1-8b"], torch.bfloat16, (4, 4)))
print(*unlisted(notes_of([("one", calls["{call}"])], TARGET)), sep="\\n")
""")
    assert kernel in found
