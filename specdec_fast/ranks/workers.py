"""The processes of the ranks from 1 on: rank 0 starts them, sends them messages through pipes, and ends them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

import torch
from torch import distributed

from specdec_fast.errors import ConfigError, RankError
from specdec_fast.ranks.exchange import Ranks
from specdec_fast.ranks.operations import forget

START_SECONDS = 300.0  # that a process may take to import PyTorch and transformers, or to load after rank 0
_CONNECT_TIMEOUT = timedelta(seconds=30)  # of one rank that waits for another one while all make the group
_LOAD_TIMEOUT = timedelta(minutes=10)  # of one rank that waits for another one while weights are read
_ANSWER_SECONDS = 60.0  # that a process may take for the rest of a forward, or to allocate pages
_END_SECONDS = 2.0  # that a process may take to end by itself
_GPU_VARIABLE = "LOCAL_RANK"  # by which transformers chooses a GPU
_ONLY_GLOO = "cpu:gloo,cuda:gloo"  # older PyTorch adds NCCL for a mesh of GPUs if the group is named "gloo"
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main(*map(int, sys.argv[2:]))"
)


class Workers:
    """The processes of the ranks from 1 on. Closing, or the end of this process, ends them.

    Args:
        num_ranks: with this process.
        module: has ``main(rank, num_ranks, parent, descriptor)``, which a process calls: the process that started it,
            and its end of a pipe of ``multiprocessing``.
        on_one_gpu: whether all of them take the first GPU; otherwise rank r takes GPU r.

    Attributes:
        processes: of the ranks, from 1 on.
        ranks: with which the processes exchange numbers; None before the model is loaded.
        failure: why they compute nothing any more; None as long as they do.

    """

    def __init__(self, num_ranks: int, module: str, on_one_gpu: bool = False) -> None:
        self.num_ranks = num_ranks
        self.on_one_gpu = on_one_gpu
        self.ranks: Ranks | None = None
        self.failure: Exception | None = None
        self._owner = os.getpid()
        self._is_closing = False
        self._pipes: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, num_ranks):
                self._start(rank, _START.format(module=module))
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, code: str) -> None:
        here, there = socket.socketpair()
        self._pipes.append(Connection(here.detach()))
        with there:
            numbers = map(str, (rank, self.num_ranks, os.getpid(), there.fileno()))
            command = [sys.executable, "-c", code, json.dumps(sys.path), *numbers]
            gpu = 0 if self.on_one_gpu else rank
            environment = {**os.environ, _GPU_VARIABLE: str(gpu)}
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[there.fileno()])
        self.processes.append(process)
        Thread(target=self._watch, args=(rank, process), name=f"specdec_fast-rank-{rank}", daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of a process; let nobody wait for its numbers then."""
        code = process.wait()
        if not self._is_closing:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self.fail(RankError(f"the process of rank {rank} of the target has ended ({how}); make a new Engine."))

    def connect(self, ranks: Ranks) -> None:
        """Take the ranks with which the processes exchange numbers from now on."""
        self.ranks = ranks
        if self.failure is not None:
            self.abort()

    def fail(self, error: Exception) -> None:
        """Compute nothing from now on, and let forwards that wait for other ranks raise; any thread may call."""
        self.failure = self.failure or error
        self.abort()

    def abort(self) -> None:
        """Let exchanges of the present forward raise in all ranks, if they exchange through shared memory."""
        if self.ranks is not None and self.ranks.native is not None:
            self.ranks.native.abort()

    def send(self, message: Any) -> None:
        """Send a message to every process."""
        if self.failure is not None:
            raise self.failure
        try:
            for pipe in self._pipes:
                pipe.send(message)
        except OSError as error:
            raise self.reason_of(error) from error

    def answers(self, seconds: float = _ANSWER_SECONDS) -> list[Any]:
        """Return the answer of every process, by rank; a RankError says that one has ended, or does not answer."""
        found = []
        deadline = monotonic() + seconds
        for rank, pipe in enumerate(self._pipes, start=1):
            try:
                if not pipe.poll(max(0.0, deadline - monotonic())):
                    self.fail(RankError(f"rank {rank} of the target has not answered for {seconds:.0f} seconds."))
                    assert self.failure is not None
                    raise self.failure
                found.append(pipe.recv())
            except (EOFError, OSError) as error:
                raise self.reason_of(error) from error
        return found

    def reason_of(self, error: Exception) -> Exception:
        """Return what ended the processes, after a pipe or an exchange has failed: that of the watching threads.

        If they notice no end soon, it is a RankError with ``error``.
        """
        deadline = monotonic() + _END_SECONDS
        while self.failure is None and monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                for process in self.processes:
                    process.wait(0.01)
        self.fail(RankError(f"the ranks of the target have lost each other ({error}); make a new Engine."))
        assert self.failure is not None
        return self.failure

    def close(self, reason: Exception | None = None) -> None:
        """End the processes. Forwards that are asked for later raise ``reason``, or a RankError."""
        if os.getpid() != self._owner:  # a fork's copy is collected
            return
        self._is_closing = True
        self.fail(reason or RankError("the processes of the target have been closed."))
        for pipe in self._pipes:
            pipe.close()
        deadline = monotonic() + _END_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.ranks is not None:
            forget(self.ranks)
            if self.ranks.native is None and distributed.is_initialized():
                distributed.destroy_process_group()
            self.ranks = None


def join_group(rank: int, num_ranks: int, folder: str, on_one_gpu: bool = False) -> None:
    """Make the default process group of the ranks, which find each other in a folder; every rank must call.

    Ranks on GPUs exchange numbers by NCCL. It refuses two ranks on one GPU, so ``on_one_gpu`` they take Gloo, which
    copies the numbers through the host.
    """
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(0 if on_one_gpu else rank)
    store = distributed.FileStore(str(Path(folder, "store")), num_ranks)
    backend = "nccl" if has_gpus else "gloo"
    if on_one_gpu:
        backend = _ONLY_GLOO
    hook = sys.excepthook  # PyTorch replaces it by one that writes "[rank0]" before every line
    try:
        distributed.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=_CONNECT_TIMEOUT)
        distributed.distributed_c10d._set_pg_timeout(_LOAD_TIMEOUT)
    finally:
        sys.excepthook = hook


@contextmanager
def first_gpu() -> Iterator[None]:
    """Let transformers take the first GPU in the process of rank 0: it reads the number of the GPU from LOCAL_RANK.

    Old versions need the variable, and what has started this process may have set it for ranks of its own.
    """
    before = os.environ.get(_GPU_VARIABLE)
    os.environ[_GPU_VARIABLE] = "0"
    try:
        yield
    finally:
        del os.environ[_GPU_VARIABLE]
        if before is not None:
            os.environ[_GPU_VARIABLE] = before


def leave_group(ranks: Ranks | None) -> None:
    """Destroy the process group, unless the ranks exchange numbers through it."""
    if distributed.is_initialized() and (ranks is None or ranks.native is not None):
        distributed.destroy_process_group()


def expect_no_group() -> None:
    """Raise a ConfigError if this process has a default process group."""
    if distributed.is_available() and distributed.is_initialized():
        raise ConfigError(
            "tp_size makes a process group for its own processes, but this process has a default one already; make the "
            "Engine in another process or after destroy_process_group(), or load the target by its plan in all "
            "processes of your group and pass the model (docs/scaling.md)."
        )
