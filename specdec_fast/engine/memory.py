"""An engine within ``memory_bytes``: its settings are lowered until it fits; a checkpoint that cannot is refused."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from specdec_fast.config import EngineConfig
from specdec_fast.drafters import Drafter, copied_quantization, is_draft_model
from specdec_fast.engine.prefixes import why_no_prefixes
from specdec_fast.errors import ConfigError
from specdec_fast.models.placement import devices_of
from specdec_fast.planner.budget import Ask, EngineMemory, EngineSetting, budget_error, halved, largest_within
from specdec_fast.planner.checkpoint import copy_sizes, least_memory, without_pages
from specdec_fast.planner.loaded import loaded_memory
from specdec_fast.runner.ragged_model import RaggedModel
from specdec_fast.schedulers import make_scheduler
from specdec_fast.speculation_length import LENGTH_POLICIES, LengthPolicy

# KV positions that every resident sequence should be able to have before the batch is made smaller: nothing is known of
# the requests yet. A smaller pool serves them too, with preemptions.
_POSITIONS_EACH = 1024
# Prompt tokens that a step should be able to prefill before the batch is made smaller: with fewer, requests join so
# slowly that a smaller batch emits more tokens.
_LEAST_PREFILL = 64


class MemoryPlan(NamedTuple):
    """What an engine does within its budget."""

    config: EngineConfig  # the settings with which it runs
    has_drafter: bool  # whether it drafts; plain decoding is the last resort
    terms: dict[str, int]  # bytes by term
    is_estimate: bool  # whether some of them are estimates
    max_nodes: int  # largest number of nodes of the drafter's trees; 0 if the budget has no room for more than K

    def describe(self) -> dict[str, Any]:
        """Return the entry of ``Engine.describe()``."""
        config = self.config
        return {
            "memory_bytes": config.memory_bytes,
            "planned_bytes": sum(self.terms.values()),
            "is_estimate": self.is_estimate,
            "terms": dict(self.terms),
            "max_batch_size": config.max_batch_size,
            "has_drafter": self.has_drafter,
            "most_draft_tokens": config.most_draft_tokens if self.has_drafter else 0,
            "max_nodes": self.max_nodes,
            "kv_cache_tokens": config.kv_cache_tokens,
            "max_prefill_tokens": config.max_prefill_tokens,
        }


def affordable_draft(target: Any, draft: Any, config: EngineConfig) -> Any:
    """Return ``draft`` (from ``checked_draft``), or None if it does not fit beside the target.

    This is known from the checkpoints' configs, before any is loaded; not of a target that is spread over devices.
    Recurrent states need more memory with a drafter, even with one without a model.

    Raises MemoryBudgetError if the target's weights, the KV entries asked for, the states of one sequence and a plain
    step of one row do not fit.
    """
    if config.memory_bytes is None or _is_spread(target, config):
        return draft
    least = EngineSetting(1, 0, 1, config.kv_cache_tokens or 1)
    try:
        plain = least_memory(target, None, config)
    except ConfigError:  # loading says what is wrong with it, or its config does not give a size
        return draft
    if plain.total(least) > config.memory_bytes:
        raise budget_error(plain, config.memory_bytes, least)
    if draft is None:
        return None
    drafting = replace(plain, states_for=config.most_draft_tokens)
    try:
        if is_draft_model(draft):
            drafting = least_memory(target, draft, config)
        elif (quantization := copied_quantization(draft)) is not None:
            dtype: Any = config.dtype
            drafting = least_memory(target, without_pages(copy_sizes(target, dtype, quantization)), config)
    except ConfigError:
        return draft
    return draft if drafting.total(least._replace(num_draft_tokens=1)) <= config.memory_bytes else None


def _is_spread(target: Any, config: EngineConfig) -> bool:
    return config.device_map is not None or (isinstance(target, nn.Module) and len(devices_of(target)) > 1)


def plan_memory(target: RaggedModel, drafter: Drafter, config: EngineConfig, *, drafts: bool) -> MemoryPlan | None:
    """Choose the largest settings within ``memory_bytes``; None without a budget. ``drafts``: whether it proposes.

    If the target is spread over devices, each of them has this budget.

    What is lowered first: the rows of a prefill forward to ``_LEAST_PREFILL``, the sequences beyond the batch that
    exspec keeps resident, the nodes of a tree to K, K down to 1, the batch; then these rows to 1. If one sequence with
    K 1 does not fit, the engine decodes plainly.

    Raises MemoryBudgetError if a plain step of one sequence does not fit, with ``kv_cache_tokens`` or one page.
    """
    budget = config.memory_bytes
    if budget is None:
        return None
    gc.collect()  # the tensors of recorded forwards lie in reference cycles
    memory = loaded_memory(target, drafter, config.page_size, target.layout.most_draft_tokens)
    each = memory.rounded(min(_POSITIONS_EACH, target.max_positions or _POSITIONS_EACH))
    lengths = _numbers_of_nodes(drafter, config) if drafts else [0]
    asks = [
        _ask(config, target, nodes, each, least_rows)
        for nodes in ((lengths, [0]) if lengths != [0] else ([0],))
        for least_rows in (_LEAST_PREFILL, 1)
    ]
    asks.append(replace(_ask(config, target, [0], 1, 1), batch_size=1))  # one page, if the budget holds no more
    for ask in asks:
        setting = largest_within(memory, budget, ask)
        if setting is not None:
            return _plan(memory, setting, _most_positions(target, drafter, config, setting, memory), config)
    raise budget_error(memory, budget, EngineSetting(1, 0, 1, config.kv_cache_tokens or 1, 1))


def _numbers_of_nodes(drafter: Drafter, config: EngineConfig) -> list[int]:
    """Return the numbers of draft tokens per sequence that are tried, the largest first: the nodes of a tree, then K.

    K is lowered down to 1, unless the caller's own policy chooses it. A tree that does not fit is no tree of fewer
    nodes: most drafters of trees draft a chain then.
    """
    most = config.most_draft_tokens
    is_own = not isinstance(config.num_draft_tokens, (int, str))
    lengths = [most] if is_own or not most else list(range(most, 0, -1))
    return [drafter.max_nodes, *lengths] if drafter.max_nodes > most > 0 else lengths


def _ask(config: EngineConfig, target: RaggedModel, lengths: list[int], positions_each: int, least_rows: int) -> Ask:
    def num_resident(batch_size: int) -> list[int]:
        windows = [_with_batch(config, batch_size, window) for window in (None, batch_size)]
        return list(dict.fromkeys(make_scheduler(each).checked_max_resident() for each in windows))

    def num_positions(resident: int, _: int) -> int:
        return config.kv_cache_tokens or resident * positions_each

    bounds = halved(config.max_prefill_tokens, target.row_padding.largest)
    bounds = [rows for i, rows in enumerate(bounds) if not i or rows is None or rows >= least_rows]
    return Ask(config.max_batch_size, lengths, num_resident, num_positions, bounds)


def _most_positions(
    target: RaggedModel, drafter: Drafter, config: EngineConfig, setting: EngineSetting, memory: EngineMemory
) -> int | None:
    """Return how many KV positions are of use; None: any number.

    Those that the resident sequences can have at most. If pages are kept for later requests, further ones keep more.
    """
    if target.max_positions is None or why_no_prefixes(target, drafter, config) is None:
        return None
    return setting.num_resident * memory.rounded(target.max_positions)


def _plan(memory: EngineMemory, setting: EngineSetting, most_positions: int | None, config: EngineConfig) -> MemoryPlan:
    """Take what is left of the budget for KV positions, at most ``most_positions``.

    If positions need no memory, their number is left to the requests.
    """
    budget = config.memory_bytes or 0
    num_positions = config.kv_cache_tokens
    if num_positions is None:
        num_positions = memory.positions_within(budget, setting)
        if most_positions is not None:
            num_positions = min(num_positions, most_positions)
    setting = setting._replace(num_positions=num_positions)
    num_nodes = setting.num_draft_tokens
    max_nodes = num_nodes if num_nodes > config.most_draft_tokens else 0
    planned = replace(
        _with_batch(config, setting.batch_size, setting.num_resident),
        num_draft_tokens=config.num_draft_tokens if max_nodes else _shortened(config, num_nodes),
        kv_cache_tokens=num_positions if memory.bytes_per_page(setting) else config.kv_cache_tokens,
        max_prefill_tokens=setting.max_prefill_tokens,
    )
    return MemoryPlan(planned, num_nodes > 0, memory.terms(setting), memory.is_estimate, max_nodes)


def _shortened(config: EngineConfig, most: int) -> int | str | LengthPolicy:
    """Return ``num_draft_tokens`` with a largest K: as it is, an integer, or the named policy with another limit."""
    if most in (0, config.most_draft_tokens):  # without a drafter K stays, so that requests may still name theirs
        return config.num_draft_tokens
    return LENGTH_POLICIES[config.num_draft_tokens](most) if isinstance(config.num_draft_tokens, str) else most


def _with_batch(config: EngineConfig, batch_size: int, num_resident: int | None) -> EngineConfig:
    """Return the settings with a smaller batch; the window is as asked for, but not larger than it may be."""
    largest = batch_size * (config.max_wait_steps + 1)
    if num_resident is not None:
        window: int | None = min(largest, max(batch_size, num_resident))
    elif config.window_size is not None:
        window = min(largest, max(batch_size, config.window_size))
    else:
        window = None
    return replace(config, max_batch_size=batch_size, window_size=window)
