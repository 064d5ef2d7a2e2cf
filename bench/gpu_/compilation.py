"""Task "compile" of ``bench.gpu``: the ops that the other tasks launch, compiled on all cores into Triton's cache.

If each kernel were compiled at its first launch, compilation would take longer than all measurements. The task calls
the launchers on the CPU to find what will be launched (``launches.py``). Several processes then compile a share each,
and all later processes find the results in the cache. The kernels of forward programs are generated when an engine is
made, and compiled at their first launch. On a CPU the task compiles for Hopper.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from time import monotonic
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from bench.common.pairs import ModelShape
from bench.gpu_ import decoding as gpu_decoding
from bench.gpu_ import kernels as gpu_kernels
from bench.gpu_ import quantized as gpu_quantized
from bench.gpu_.isolated_tasks import ROOT, Progress, Settings
from bench.gpu_.launches import Call, Heads, Note, calls_of_cases, calls_on, launcher, notes_of
from bench.gpu_.timings import HAS_PART
from specdec_fast.ops.registry import INTERPRETING
from specdec_fast.triton_kernels.linear import linears

BUNDLED = (Heads(4, 2, 32, 1024), Heads(2, 1, 32, 1024))  # target and draft
ROWS = (6, 1, 3)  # rows of a batch; no compilation depends on them
HOPPER = GPUTarget("cuda", 90, 32)


def run(settings: Settings, progress: Progress) -> None:
    """Find what will be launched, and compile it."""
    if INTERPRETING:
        progress.row(not_served="Triton's interpreter replaces the compiler")
        return
    target = _target(torch.device(settings.device))
    began = monotonic()
    notes = notes_of(_smoke_calls() if settings.smoke else _calls(), target)
    progress.note(target=str(target), compilations=len(notes), finding_seconds=monotonic() - began)
    jobs = min(len(notes), os.cpu_count() or 1)
    shares = [notes[i::jobs] for i in range(jobs)]
    began, done = monotonic(), 0
    with ThreadPoolExecutor(jobs) as pool:  # each thread waits for a process
        compiled = partial(_compiled_elsewhere, target=target, seconds=progress.seconds_left)
        for result in chain.from_iterable(pool.map(compiled, shares)):
            done += 1
            if "error" in result:
                progress.fail(result["kernel"], result["error"])
    progress.row(compiled=done, of=len(notes), processes=jobs, seconds=monotonic() - began)
    if done < len(notes):
        progress.has_time(f"{len(notes) - done} compilations", float("inf"))


def _target(device: torch.device) -> GPUTarget:
    if device.type != "cuda":
        return HOPPER
    from triton.runtime.driver import driver

    return driver.active.get_current_target()


def _calls() -> Iterator[tuple[str, Call]]:
    """Yield calls that launch everything that the other tasks launch, at their sizes except contexts and batches."""
    floats = (torch.float32, torch.float16, torch.bfloat16)
    yield from calls_of_cases(floats, benchmarks=False)
    yield from calls_of_cases((torch.float32, torch.bfloat16), benchmarks=True, without=HAS_PART)
    yield from gpu_quantized.calls()
    shape, (in_features, out_features) = gpu_kernels.FULL.verify, gpu_kernels.FULL.linear
    for dtype in floats:
        yield from calls_on(Heads(shape.heads, shape.kv_heads, shape.head_dim, 1024), dtype, ROWS)
        weight = torch.empty(out_features, in_features, dtype=dtype)
        for count in (1, 64, 65, 600):  # the number of rows chooses one of four compilations
            rows = torch.empty(count, in_features, dtype=dtype)
            yield "linear", partial(launcher("linear"), rows, weight)
            parts = gpu_kernels.parts_of_weight(weight)
            yield "linears", partial(linears, rows, parts)
            for part in parts[:2]:  # the third has the size of the second
                yield "linear", partial(launcher("linear"), rows, part)
        for bundled in BUNDLED:
            yield from calls_on(bundled, dtype, ROWS)
    sizes = gpu_decoding.FULL
    for model in (sizes.target, sizes.draft):
        yield from calls_on(heads_of(model, sizes.vocab_size), sizes.dtype, ROWS)


def _smoke_calls() -> Iterator[tuple[str, Call]]:
    sizes = gpu_decoding.SMOKE
    for name, call in calls_on(heads_of(sizes.target, sizes.vocab_size), sizes.dtype, ROWS):
        if name in ("append", "greedy"):
            yield name, call


def heads_of(model: ModelShape, vocab_size: int) -> Heads:
    """Return the sizes of a model that the ops see."""
    return Heads(model.num_attention_heads, model.num_key_value_heads, model.head_dim, vocab_size)


def _compiled_elsewhere(notes: list[Note], target: GPUTarget, seconds: float) -> list[dict[str, Any]]:
    """Compile in a separate process; return its results until it ends or time is up."""
    command = [sys.executable, "-m", "bench.gpu_.compiler"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"input": pickle.dumps((target, notes)), "stdout": subprocess.PIPE, "cwd": ROOT}
    try:
        said = subprocess.run(command, env=environment, timeout=seconds, check=False, **options).stdout
    except subprocess.TimeoutExpired as stopped:
        said = stopped.stdout or b""
    complete = said.rpartition(b"\n")[0]
    return [json.loads(line) for line in complete.splitlines() if line.startswith(b"{")]
