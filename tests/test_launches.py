"""What is launched is what the kernel files list, and nothing of a batch makes Triton compile anew in mid-serving.

Each check runs in a process of its own: this one has Triton's interpreter in the compiler's place.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[1]
COMMON = """
from dataclasses import replace
import torch
from triton.backends.compiler import GPUTarget
from bench.launches import *
from specdec_fast.triton_kernels import kernel_modules
TARGET = GPUTarget("cuda", 90, 32)
LISTED = [of_variant(variant) for module in kernel_modules() for variant in module.variants()]

OF_A_MODEL = {"NUM_HEADS", "GROUP", "PAGE_SIZE", "ENTRY", "IN_FEATURES", "ALIGNMENT"}

def specialised(asked):  # what it is compiled for, but for the sizes of a model and the tiles that follow from them
    follow = [name.startswith("BLOCK_") or name.endswith("_DIM") or name in OF_A_MODEL for name, _ in asked.constexprs]
    others = tuple(item for item, follows in zip(asked.constexprs, follow) if not follows)
    given = tuple((name, kind) for name, kind in asked.signature if kind != "constexpr")
    return asked.module, asked.kernel, given, asked.divisible, others

def without_options(asked):
    return replace(asked, options=())

KNOWN, SIZES = {specialised(asked) for asked in LISTED}, {without_options(asked) for asked in LISTED}

def arguments(asked):  # one by one; a number that is 1 is known when compiling, and so a size like any other
    for name, kind in asked.signature:
        if kind != "constexpr":
            yield asked.module, asked.kernel, name, kind, name in asked.divisible

KNOWN_ARGUMENTS = {argument for asked in LISTED for argument in arguments(asked)}

def unlisted(notes):
    for asked in (note.asked for note in notes):
        if specialised(asked) not in KNOWN or (without_options(asked) in SIZES and asked not in LISTED):
            yield f"{asked} {specialised(asked)}"
"""


def run(script: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", COMMON + script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_argument_of_the_ops_cases_is_listed():
    """Its type, and whether it is specialised as a multiple of 16; cases have sizes that no file can list."""
    found = run("""
notes = notes_of(calls_of_cases((torch.float32, torch.float16, torch.bfloat16), benchmarks=False), TARGET)
asked = {argument for note in notes for argument in arguments(note.asked)}
print(len(notes), *(asked - KNOWN_ARGUMENTS), sep="\\n")
""").splitlines()
    assert int(found[0]) > 60
    assert found[1:] == []


def test_published_shapes_launch_what_is_listed_whatever_the_batch():
    """The first batch has one sequence of one row; no later one asks for anything else.

    Listed are types, what is specialised as a multiple of 16, flags and tiles; of listed sizes the options as well.
    """
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


@pytest.mark.parametrize(
    "change",
    [
        "specialised_too = {'chunk_ids'}",
        "module._CHUNK = 4096",
        "module._chunk_launch = lambda: Launch({'CHUNK': 8192}, num_warps=4)",
    ],
    ids=["alignment", "tile", "warps"],
)
def test_another_launch_is_not_listed(change):
    """The check rejects a pointer that is specialised by where it lies, another tile, and other options."""
    found = run(f"""
import specdec_fast.triton_kernels.verify_chain as module
from specdec_fast.triton_kernels.variant import Launch
specialised_too = set()
{change}
kernel = module._chunk_kernel
names = [name for name in kernel.do_not_specialize if name not in specialised_too]
module._chunk_kernel = JITFunction(kernel.fn, do_not_specialize=names)
calls = dict(calls_on(PUBLISHED["llama-2-7b"], torch.bfloat16, (4, 4)))
print(*unlisted(notes_of([("greedy", calls["greedy"])], TARGET)), sep="\\n")
""")
    assert "_chunk_kernel" in found
