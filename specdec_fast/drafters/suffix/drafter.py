"""The ``"suffix"`` drafter: what followed the longest copies of a sequence's end, in the texts of all requests."""

from __future__ import annotations

from collections.abc import Iterable
from math import log
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specdec_fast.device_copy import to_device
from specdec_fast.drafters.base import DrafterContext, TreeDrafter
from specdec_fast.drafters.draft import Draft, draft_of_trees
from specdec_fast.drafters.suffix.index import Copy, SuffixIndex
from specdec_fast.errors import ConfigError
from specdec_fast.request.sequence import Sequence
from specdec_fast.trees.growing import TreeNodes
from specdec_fast.trees.parents import ROOT, depth_first, parents_among
from specdec_fast.whole_files import replaced

MOST_TOKENS = 1_000_000  # of all texts; they and their tables take some 600 bytes a token
_PER_TOKEN = 2.0  # the weight of a copy doubles with every token that agrees


class SuffixDrafter(TreeDrafter):
    """Proposes what followed the longest copies of a sequence's last tokens in the texts of all requests.

    The texts are prompts and outputs, also those of requests that run in the same batch, so repeated prompts, several
    samples of one prompt and edits of one file draft from each other (SuffixDecoding, Oliaro et al., arXiv 2411.04975).
    A copy that agrees in one token more has twice the weight, and the tokens that follow copies add up their weights.
    By default the heaviest continuation is drafted, a chain; with ``draft_tree`` the nodes of the largest weight. A
    token's score is the share of its path in the weight of all copies.

    ``save`` and the drafter ``"suffix:FILE"`` carry the texts from one engine to the next. Let no call run meanwhile.

    Raises:
        ConfigError: the file is not one that ``save`` wrote for a target of this vocabulary; or ``draft_tree`` is a
            static tree.
    """

    settings = ("draft_tree",)

    def __init__(self, context: DrafterContext, file: str | None = None, max_tokens: int = MOST_TOKENS) -> None:
        wanted = context.config.draft_tree
        if isinstance(wanted, tuple):
            raise ConfigError("draft_tree is a static tree; the drafter 'suffix' takes a number of nodes, or 'chain'.")
        self.max_nodes = wanted if isinstance(wanted, int) else 0
        self.has_scores = not isinstance(context.config.num_draft_tokens, int)  # else nothing reads them
        self.index = SuffixIndex(max_tokens)
        self._device = context.device
        self._vocab_size = context.target.vocab_size
        self._numbers: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()  # of texts that may grow
        self._file = file
        if file is not None:
            self.load(file)

    @property
    def name(self) -> str:
        return "suffix" if self._file is None else f"suffix:{self._file}"

    def describe(self) -> dict[str, Any]:
        return {"num_tokens": self.index.num_tokens, "max_tokens": self.index.max_tokens}

    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        for sequence in sequences:
            self._extend(sequence)
        chains = [
            heaviest_chain(self.index.copies(sequence.token_ids), limit) if limit else []
            for sequence, limit in zip(sequences, limits, strict=True)
        ]
        token_ids = [token for chain in chains for token, _ in chain]
        scores = torch.tensor([score for chain in chains for _, score in chain], dtype=torch.float32, device="cpu")
        counts = [len(chain) for chain in chains]
        return Draft(to_device(token_ids, self._device), counts, scores=scores if self.has_scores else None)

    def propose_trees(self, sequences: list[Sequence], limits: list[int], node_limits: list[int]) -> Draft:
        if not self.max_nodes:
            return self.propose(sequences, limits)
        for sequence in sequences:
            self._extend(sequence)
        trees = [
            heaviest_tree(self.index.copies(sequence.token_ids), depth, num_nodes) if depth else None
            for sequence, depth, num_nodes in zip(sequences, limits, node_limits, strict=True)
        ]
        return draft_of_trees(trees, self._device, self.has_scores)

    def release(self, sequence: Sequence) -> None:
        self._extend(sequence)
        self.index.end(self._numbers[sequence])
        if sequence.finish_reason is not None:  # else it gave its pages to others and comes back, or was cancelled
            del self._numbers[sequence]

    def prepare(self, num_tokens: int, page_size: int) -> None:
        for number in self._numbers.values():  # an interrupted run may have left some
            if number in self.index:
                self.index.end(number)
        self._numbers.clear()

    def clear(self) -> None:
        """Forget all texts. Let no call run meanwhile."""
        self.index = SuffixIndex(self.index.max_tokens)
        self._numbers.clear()

    def save(self, file: str | Path) -> None:
        """Write the texts of finished requests to a file of safetensors. Raises OutputError if it cannot be written."""
        texts = list(self.index.finished())
        tensors = {
            "token_ids": torch.tensor([token for text in texts for token in text], dtype=torch.int32, device="cpu"),
            "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int64, device="cpu"),
        }
        with replaced(Path(file)) as unfinished:
            save_file(tensors, unfinished)

    def load(self, file: str | Path) -> None:
        """Add the texts of a file that ``save`` wrote. Raises ConfigError if it is not such a file."""
        for text in read_texts(Path(file), self._vocab_size):
            number = self.index.begin()
            self.index.extend(number, text)
            self.index.end(number)

    def _extend(self, sequence: Sequence) -> None:
        number = self._numbers.get(sequence)
        if number is None or number not in self.index:
            number = self._numbers[sequence] = self.index.begin()
        self.index.extend(number, sequence.token_ids)


def is_texts_file(path: Path) -> bool:
    """No folder or file is taken for saved texts by what it holds: ``"suffix:FILE"`` names them."""
    return False


def read_texts(file: Path, vocab_size: int) -> Iterable[list[int]]:
    """Return the texts of a file that ``SuffixDrafter.save`` wrote.

    Raises:
        ConfigError: it cannot be read, has other tensors, or ids beyond the vocabulary.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            token_ids = tensors.get_tensor("token_ids")
            lengths = tensors.get_tensor("lengths")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"draft='suffix:{file}': not texts that SuffixDrafter.save wrote: {error}.") from None
    kinds = (token_ids.dtype, token_ids.dim(), lengths.dtype, lengths.dim())
    if kinds != (torch.int32, 1, torch.int64, 1) or bool((lengths < 0).any()) or int(lengths.sum()) != len(token_ids):
        raise ConfigError(f"draft='suffix:{file}': its lengths do not divide its token_ids into texts.")
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise ConfigError(
            f"draft='suffix:{file}': it has ids from {int(token_ids.min())} to {int(token_ids.max())}, and the target "
            f"{vocab_size} tokens; it was saved for another target."
        )
    return (text.tolist() for text in token_ids.split(lengths.tolist()))


def heaviest_chain(copies: list[Copy], limit: int) -> list[tuple[int, float]]:
    """Return up to ``limit`` tokens, each the heaviest of those that follow the copies so far, with their scores."""
    chain: list[tuple[int, float]] = []
    weights = weights_of(copies)
    total = sum(weights) + 1.0
    followed = [(copy.token_ids, copy.follows, weight) for copy, weight in zip(copies, weights, strict=True)]
    for _ in range(limit):
        sums: dict[int, float] = {}
        for text, position, weight in followed:
            if position < len(text):
                sums[text[position]] = sums.get(text[position], 0.0) + weight
        if not sums:
            break
        best = max(sums, key=sums.__getitem__)  # of equal ones that of the latest copy
        chain.append((best, log(sums[best] / total)))
        followed = [
            (text, position + 1, weight)
            for text, position, weight in followed
            if position < len(text) and text[position] == best
        ]
    return chain


def heaviest_tree(copies: list[Copy], depth: int, num_nodes: int) -> TreeNodes:
    """Return the tree of the heaviest paths that follow copies; a path's weight is the sum of its copies' weights."""
    weights = weights_of(copies)
    nodes: dict[tuple[int, int], int] = {}  # by parent and token
    sums: list[float] = []
    for copy, weight in zip(copies, weights, strict=True):
        node = ROOT
        for token in copy.token_ids[copy.follows : copy.follows + depth]:
            node = nodes.setdefault((node, token), len(sums))
            if node == len(sums):
                sums.append(0.0)
            sums[node] += weight
    parents = [parent for parent, _ in nodes]
    tokens = [token for _, token in nodes]
    heaviest = sorted(range(len(sums)), key=sums.__getitem__, reverse=True)[:num_nodes]
    kept = depth_first(heaviest, parents)
    total = sum(weights) + 1.0
    scores = [log(sums[node] / total) for node in kept]
    return TreeNodes([tokens[node] for node in kept], parents_among(kept, parents), scores)


def weights_of(copies: list[Copy]) -> list[float]:
    """Return the weight of each copy, where what no copy shows has weight 1; a copy of one token has it too."""
    return [_PER_TOKEN ** (copy.length - 1) for copy in copies]
