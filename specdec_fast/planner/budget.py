"""The bytes of an engine by term, and the largest setting within a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec_fast.errors import MemoryBudgetError

KV_TERMS = ("target KV", "drafter KV")


class EngineSetting(NamedTuple):
    """What decides an engine's memory."""

    batch_size: int  # B, sequences of a step
    num_draft_tokens: int  # N, draft tokens per sequence: K for a chain, the nodes of a tree; 0 is without a drafter
    num_resident: int  # sequences that hold KV pages and state slots at the same time
    num_positions: int  # KV positions of the pool; a drafter's pool has as many
    # largest number of rows of a prefill forward; None: as many as a forward may have
    max_prefill_tokens: int | None = None

    @property
    def num_rows(self) -> int:
        """R, the rows of a verification: the last committed token and the draft tokens of each sequence."""
        return self.batch_size * (1 + self.num_draft_tokens)


@dataclass(frozen=True)
class Part:
    """The memory of one part of an engine, the target or a drafter, in bytes."""

    weights: int  # unique storages; a drafter's without those of the target
    bytes_per_token: int  # KV entries of one position
    step_terms: Callable[[EngineSetting], dict[str, int]]  # from a setting to what its steps need beside these, by term
    # from the K for which there is room to the bytes of the recurrent states of one sequence; None: it has none
    bytes_per_sequence: Callable[[int], int] | None = None


@dataclass(frozen=True)
class EngineMemory:
    """The memory of an engine."""

    target: Part  # the target's part
    drafter: Part | None  # the drafter's part; None without a drafter
    page_size: int  # KV positions per page
    is_estimate: bool = False  # whether a term is estimated: PyTorch runs forwards, or nothing was loaded
    # K for which recurrent states have room, whatever K a setting has; None: the K of the setting
    states_for: int | None = None

    def terms(self, setting: EngineSetting) -> dict[str, int]:
        """Return the bytes of each term.

        A KV pool has one page more than its positions need, for padding rows, and one state slot more than sequences.
        """
        pages = self.num_pages(setting.num_positions) + 1
        slots = setting.num_resident + 1
        most_draft_tokens = setting.num_draft_tokens if self.states_for is None else self.states_for
        parts = self._parts(setting)
        terms = {f"{name} weights": part.weights for name, part in parts.items()}
        terms |= {f"{name} KV": pages * self.page_size * part.bytes_per_token for name, part in parts.items()}
        terms |= {
            f"{name} states": slots * part.bytes_per_sequence(most_draft_tokens)
            for name, part in parts.items()
            if part.bytes_per_sequence is not None
        }
        for part in parts.values():
            terms |= part.step_terms(setting)
        return terms

    def total(self, setting: EngineSetting) -> int:
        """Return the bytes of all terms."""
        return sum(self.terms(setting).values())

    def num_pages(self, num_positions: int) -> int:
        """Return the pages of so many positions, without the page for padding rows."""
        return -(-num_positions // self.page_size)

    def rounded(self, num_positions: int) -> int:
        """Return the positions of as many whole pages."""
        return self.num_pages(num_positions) * self.page_size

    def bytes_per_page(self, setting: EngineSetting) -> int:
        """Return the bytes of a page in all pools; 0 if no layer attends, so that positions need no memory."""
        return self.page_size * sum(part.bytes_per_token for part in self._parts(setting).values())

    def positions_within(self, budget: int, setting: EngineSetting) -> int:
        """Return how many KV positions fit beside the other terms of a setting, in whole pages; at least 0.

        If positions need no memory, those of the setting fit, provided that the other terms do.
        """
        left = budget - sum(size for name, size in self.terms(setting).items() if name not in KV_TERMS)
        per_page = self.bytes_per_page(setting)
        if not per_page:
            return setting.num_positions if left >= 0 else 0
        return max(0, left // per_page - 1) * self.page_size

    def _parts(self, setting: EngineSetting) -> dict[str, Part]:
        if self.drafter is None or not setting.num_draft_tokens:
            return {"target": self.target}
        return {"target": self.target, "drafter": self.drafter}


@dataclass(frozen=True)
class SpreadMemory(EngineMemory):
    """The memory of an engine whose target is spread over devices, each of which has the same budget.

    ``target`` is the part of the target on the device where rows enter, and ``drafter`` is there, too. Every setting
    is limited by the device on which it leaves least.
    """

    others: tuple[EngineMemory, ...] = ()  # of every other device, the target's part alone

    def terms(self, setting: EngineSetting) -> dict[str, int]:
        """Return the bytes of each term on the device with most."""
        of_each = (super().terms(setting), *(other.terms(setting) for other in self.others))
        return max(of_each, key=lambda terms: sum(terms.values()))

    def bytes_per_page(self, setting: EngineSetting) -> int:
        """Return the bytes of a page on the device where it has most."""
        return max(super().bytes_per_page(setting), *(other.bytes_per_page(setting) for other in self.others))

    def positions_within(self, budget: int, setting: EngineSetting) -> int:
        """Return how many KV positions fit on every device."""
        here = EngineMemory(self.target, self.drafter, self.page_size, self.is_estimate, self.states_for)
        return min(memory.positions_within(budget, setting) for memory in (here, *self.others))


@dataclass(frozen=True)
class Ask:
    """What is asked for, best first: what is shrunk first to fit into a budget stands last."""

    batch_size: int  # largest B
    num_draft_tokens: Sequence[int]  # values of N, the largest first. It is shrunk before B.
    # from B to the numbers of resident sequences, the largest first; shrunk before N
    num_resident: Callable[[int], Sequence[int]]
    # from the number of resident sequences and N to the KV positions of the pool
    num_positions: Callable[[int, int], int]
    max_prefill_tokens: Sequence[int | None]  # bounds of a prefill forward, the largest first; shrunk before all others

    def settings(self, batch_size: int) -> list[EngineSetting]:
        """Return the settings of one batch size, the best first."""
        return [
            EngineSetting(batch_size, nodes, resident, self.num_positions(resident, nodes), most)
            for nodes in self.num_draft_tokens
            for resident in self.num_resident(batch_size)
            for most in self.max_prefill_tokens
        ]


def largest_within(memory: EngineMemory, budget: int, ask: Ask) -> EngineSetting | None:
    """Return the best setting whose bytes are within a budget: the largest B, then N, then the rest; None if none is.

    Every term grows with every field of a setting, so the last setting of a batch size needs the least, and the batch
    sizes that fit are those up to some size.
    """
    fits = 0
    too_large = ask.batch_size + 1
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if memory.total(ask.settings(middle)[-1]) <= budget:
            fits = middle
        else:
            too_large = middle
    if not fits:
        return None
    return first_within(memory, budget, ask.settings(fits))


def first_within(memory: EngineMemory, budget: int, settings: Sequence[EngineSetting]) -> EngineSetting | None:
    """Return the first setting whose bytes are within a budget; None if none is."""
    return next((setting for setting in settings if memory.total(setting) <= budget), None)


def halved(largest: int | None, most_rows: int) -> list[int | None]:
    """Return bounds for prefill forwards: the largest, then its halves down to one row.

    ``largest`` is what the configuration asks for; None: ``most_rows``, as many as a forward without a bound has.
    """
    bounds: list[int | None] = [largest]
    rows = min(most_rows, largest or most_rows)
    while rows > 1:
        rows //= 2
        bounds.append(rows)
    return bounds


def budget_error(
    memory: EngineMemory, budget: int, least: EngineSetting, new_tokens: int | None = None
) -> MemoryBudgetError:
    """Return the error of a budget into which the least setting does not fit.

    That is a plain step of one sequence, over the KV positions asked for. ``new_tokens`` are those of the planned
    sequence; None if no traffic is planned.
    """
    terms = memory.terms(least)
    missing = sum(terms.values()) - budget
    largest = max(terms, key=terms.__getitem__)
    held = ", ".join(f"{name} {size}" for name, size in terms.items() if size)
    positions = memory.positions_within(budget, least)
    at_most = "at most " if memory.is_estimate else ""
    shorten = "shorten requests, "
    if not memory.bytes_per_page(least):
        longest = "no sequence fits, however short"
        shorten = ""
    elif new_tokens is None:
        longest = f"{positions} KV positions fit"
    else:
        prompt = longest_prompt(positions, new_tokens)
        longest = (
            f"the longest prompt that fits has {at_most}{prompt} tokens, with {new_tokens} new ones"
            if prompt
            else f"no prompt fits with {new_tokens} new tokens, because {positions} KV positions fit"
        )
    return MemoryBudgetError(
        f"a budget of {_exactly(budget)} lacks {_exactly(missing)} for a plain step of one sequence over "
        f"{least.num_positions} KV positions, which needs {held} bytes; the largest term is {largest}. "
        f"Within the budget, {longest}. Raise it, {shorten}or take a smaller model or dtype."
    )


def longest_prompt(num_positions: int, new_tokens: int) -> int:
    """Return the most prompt tokens of a sequence alone; the newest token never has a KV entry (I3). 0: none fits."""
    return max(0, num_positions + 1 - new_tokens)


def _exactly(num_bytes: int) -> str:
    exact = f"{num_bytes} bytes"
    short = shown(num_bytes)
    return exact if short == exact else f"{exact} ({short})"


def shown(num_bytes: int) -> str:
    """Show bytes in the largest unit of which there is one."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.2f} {unit}"
    return f"{num_bytes} bytes"
