"""A rank from 1 on of a target that ``tp_size`` shards: it computes what rank 0 says, until rank 0 ends.

``workers.py`` starts it as a process that only calls ``main``; ``messages.py`` has the messages of rank 0.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from multiprocessing.connection import Connection
from threading import Thread
from time import sleep
from typing import Any

import torch
from transformers.utils import logging

from specdec_fast.freed_memory import is_out_of_memory
from specdec_fast.kv_cache.accepted_paths import move_entries
from specdec_fast.kv_cache.page_pool import PagePool
from specdec_fast.models.sharded import whole_end
from specdec_fast.ranks.exchange import ABORTED, Ranks
from specdec_fast.ranks.messages import (
    ComputeForward,
    CopyPages,
    DropPools,
    Failure,
    GatherEnd,
    Loaded,
    LoadTarget,
    MakePool,
    MoveEntries,
    Restart,
    UseGraphs,
    UseTaps,
    on_device,
    unpacked,
)
from specdec_fast.ranks.workers import join_group, leave_group
from specdec_fast.runner.loading import load_target
from specdec_fast.runner.ragged_model import RaggedModel

_PARENT_SECONDS = 0.5  # between two looks at whether rank 0 is alive


class Follower:
    """One rank's part of the target, and of every pool of rank 0."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._ranks: Ranks | None = None
        self._target: RaggedModel | None = None
        self._pools: dict[int, PagePool] = {}
        self._failure: Failure | None = None  # of a forward; until rank 0 knows it, nothing is computed

    def load(self, message: LoadTarget) -> Loaded | Failure:
        """Load the target; return how it runs, or what failed."""
        torch.set_num_threads(message.num_threads)
        try:
            join_group(self._rank, self._num_ranks, message.folder, message.on_one_gpu)
            self._target = load_target(message.source, message.config, message.most_draft_tokens, self._connect)
        except Exception as error:
            self._abort()
            return _failure_of(error)
        finally:
            leave_group(self._ranks)
        return Loaded(self._target.has_program, self._target.row_padding)

    def answer(self, message: Any) -> tuple[bool, Failure | None]:
        """Do what rank 0 says; return whether it waits for an answer, and the answer."""
        if isinstance(message, Restart):
            failure = self._failure
            self._failure = None
            if self._ranks is not None and self._ranks.native is not None:
                self._ranks.native.restart()
            return True, failure
        try:
            if self._failure is None or isinstance(message, MakePool):
                self._do(message)
        except Exception as error:
            if isinstance(message, MakePool):
                return True, _failure_of(error)
            self._failure = _failure_of(error)
            self._abort()
        return isinstance(message, MakePool), None

    def _do(self, message: Any) -> None:
        target = self._target
        assert target is not None, "no target has been loaded"
        device = target.layout.device
        if isinstance(message, ComputeForward):
            batch, logit_rows = unpacked(message.rows, device)
            pool = self._pools[message.pool]
            if pool.states is not None:
                pool.have_slots(message.num_slots)
                pool.states.num_growths = message.num_growths
            # nobody reads them, but the same graphs are needed as in rank 0
            hidden_states = target.empty_hidden_states(len(batch.token_ids)) if message.has_taps else None
            target.forward(batch, pool, logit_rows, hidden_states)
        elif isinstance(message, UseTaps):
            target.use_taps(message.ids)
        elif isinstance(message, UseGraphs):
            target.use_graphs(message.limits)
        elif isinstance(message, GatherEnd):
            whole_end(target.model, message.is_output)
        elif isinstance(message, MakePool):
            states = target.layout.states if message.has_states else ()
            layout = replace(target.layout, states=states, most_draft_tokens=message.most_draft_tokens)
            self._pools[message.pool] = PagePool(layout, message.num_tokens, message.page_size, message.row_padding)
        elif isinstance(message, CopyPages):
            larger = self._pools[message.destination]
            larger.copy_pages(self._pools[message.source])
            larger.take_states(self._pools[message.source])
        elif isinstance(message, DropPools):
            for number in message.pools:
                self._pools.pop(number, None)
        elif isinstance(message, MoveEntries):
            table = on_device(message.table, device)
            moves = [on_device(move, device) for move in message.moves]
            move_entries(self._pools[message.pool], target.ops, table, moves)

    def _connect(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def _abort(self) -> None:
        """Let the other ranks not wait for this one, whose forward has failed."""
        if self._ranks is not None:
            if self._ranks.native is None:
                raise  # noqa: PLE0704 - the end of this process ends their waiting
            self._ranks.native.abort()


def _failure_of(error: Exception) -> Failure:
    is_memory = isinstance(error, MemoryError) or is_out_of_memory(error)
    return Failure(f"{type(error).__name__}: {error}", is_memory, ABORTED in str(error))


def _end_with(parent: int) -> None:
    """End this process when the one of rank 0 has ended, even if it waits for a forward of it."""
    while os.getppid() == parent:
        sleep(_PARENT_SECONDS)
    os._exit(1)


def main(rank: int, num_ranks: int, parent: int, descriptor: int) -> None:
    """Compute what rank 0 says until its end of the pipe is closed.

    Args:
        rank: of this process.
        num_ranks: with rank 0.
        parent: the process of rank 0.
        descriptor: of a connection to it.

    """
    os.dup2(2, 1)  # what libraries print must not come between the output of rank 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for rank 0
    Thread(target=_end_with, args=(parent,), daemon=True).start()
    logging.set_verbosity_error()  # rank 0 says it
    logging.disable_progress_bar()
    pipe = Connection(descriptor)
    follower = Follower(rank, num_ranks)
    try:
        pipe.send(None)
        pipe.send(follower.load(pipe.recv()))
        while True:
            is_asked, answer = follower.answer(pipe.recv())
            if is_asked:
                pipe.send(answer)
    except (EOFError, OSError):
        os._exit(0)  # rank 0 has closed the engine, or ended
