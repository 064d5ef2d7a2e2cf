"""Loads the target of an engine; with ``tp_size``, in every process of its ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from os import PathLike, fspath

import torch
from transformers import PreTrainedModel

from specdec_fast.config import EngineConfig
from specdec_fast.errors import RankError, SpecDecError
from specdec_fast.models.loading import load_model
from specdec_fast.models.placement import devices_of
from specdec_fast.models.probe import named_failures
from specdec_fast.models.rounded_parts import round_parts
from specdec_fast.models.sharded import expect_shardable, sharded_copy
from specdec_fast.ops import resolve_all
from specdec_fast.quantization.rounding import ROUNDINGS
from specdec_fast.ranks.exchange import ABORTED, Ranks
from specdec_fast.ranks.messages import Failure, Loaded, LoadTarget
from specdec_fast.ranks.workers import START_SECONDS, Workers, expect_no_group, first_gpu, join_group, leave_group
from specdec_fast.runner.batch_invariance import make_deterministic
from specdec_fast.runner.leader import Leader
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.torch_threads import number_of_threads

_FOLLOWER = "specdec_fast.runner.follower"


def load_target(
    source: str | PathLike[str] | PreTrainedModel,
    config: EngineConfig,
    most_draft_tokens: int,
    connect: Callable[[Ranks], None] | None = None,
) -> RaggedModel:
    """Load a target, or take a loaded one, and check that it can be served.

    Args:
        source: as for ``Engine``.
        config: of the engine.
        most_draft_tokens: of a sequence in a step.
        connect: gets the ranks, if ``tp_size`` shards the target. Every rank makes this call.

    Raises:
        ConfigError, UnsupportedModelError, BackendError, DeterminismError: see ``Engine``.

    """
    rounds_parts = connect is not None and config.quantization in ROUNDINGS
    model = load_model(
        source,
        config.dtype,  # type: ignore[arg-type]
        config.device,  # type: ignore[arg-type]
        quantization=None if rounds_parts else config.quantization,
        tp_size=config.tp_size,
        device_map=config.device_map,
    )
    ops = resolve_all(devices_of(model), config.backend, next(model.parameters()).dtype)
    ranks = None
    if connect is not None:
        model, ranks = sharded_copy(model, shares_weights=False)
        connect(ranks)
    if rounds_parts:
        assert config.quantization is not None
        round_parts(model, fspath(source), config.quantization)
    with named_failures(model):
        target = RaggedModel(model, ops, config.page_size, config.enforce_eager, most_draft_tokens, ranks)
        if config.deterministic:
            make_deterministic(target)
        target.release_memory()
    return target


def load_sharded(
    source: str | PathLike[str], config: EngineConfig, most_draft_tokens: int, on_one_gpu: bool = False
) -> RaggedModel:
    """Start the other ranks of ``config.tp_size``, and load the target in all of them; see ``load_target``.

    ``on_one_gpu`` is for checks where there are fewer GPUs than ranks: see ``join_group``.

    Raises:
        ConfigError: ``tp_size`` does not divide the heads, there are too few GPUs, or this process has a process group.
        NotYetSupportedError: the target has no plan, or the config has settings that need whole weights.
        RankError: another rank has failed or ended.

    """
    expect_no_group()
    expect_shardable(source, config, on_one_gpu)
    num_threads = torch.get_num_threads()
    if not torch.cuda.is_available():
        num_threads = max(1, num_threads // config.tp_size)
    workers = Workers(config.tp_size, _FOLLOWER, on_one_gpu)
    try:
        target = _loaded(workers, fspath(source), config, most_draft_tokens, num_threads)
    except BaseException as error:
        ended = workers.failure
        workers.close()
        if ended is None or ended is error or not isinstance(error, Exception):
            raise
        raise ended from error  # what rank 0 says of it is a consequence
    target.lead(Leader(workers, num_threads))
    return target


def _loaded(
    workers: Workers, source: str, config: EngineConfig, most_draft_tokens: int, num_threads: int
) -> RaggedModel:
    workers.answers(START_SECONDS)  # all have imported what they need, and will not keep each other waiting
    plain = replace(config, num_draft_tokens=0)  # a policy of the caller's own might not be pickled
    with tempfile.TemporaryDirectory() as folder, number_of_threads(num_threads), first_gpu():
        workers.send(LoadTarget(source, plain, most_draft_tokens, num_threads, folder, workers.on_one_gpu))
        try:
            join_group(0, workers.num_ranks, folder, workers.on_one_gpu)
            target = load_target(source, config, most_draft_tokens, workers.connect)
        except Exception as error:
            workers.abort()  # the others may wait for this rank
            if not isinstance(error, SpecDecError) or ABORTED in str(error):  # not of the model, which all would raise
                _answers_of(workers, error)
            raise
        finally:
            leave_group(workers.ranks)
        answers = _answers_of(workers)
    own = Loaded(target.has_program, target.row_padding)
    if any(answer != own for answer in answers):
        raise RankError(f"the ranks of the target run it in different ways: {[own, *answers]}.")
    return target


def _answers_of(workers: Workers, error: Exception | None = None) -> list[Loaded]:
    """Return how the other ranks run the target, or raise a RankError, with rank 0's error, if one has failed."""
    answers = workers.answers(START_SECONDS)
    for rank, answer in enumerate(answers, start=1):
        if isinstance(answer, Failure) and not answer.was_aborted:
            raise RankError(f"rank {rank} could not load the target: {answer.text}") from error
    return answers
