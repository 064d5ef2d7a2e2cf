"""A draft model with another tokenizer than the target's: its drafts are translated, by token or by text.

The target verifies tokens whatever proposed them, and its own choice decides. So no probability of the draft model is
needed, and a translation that is poor, or missing, costs acceptance and no token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_fast.batch.ragged_batch import Rows
from specdec_fast.device_copy import to_device
from specdec_fast.drafters.base import StepResult
from specdec_fast.drafters.draft import Draft
from specdec_fast.drafters.draft_model.draft_context import ContextReader, DraftContext
from specdec_fast.drafters.draft_model.drafter import ModelDrafter
from specdec_fast.drafters.draft_model.joint_vocabulary import Translation, join_vocabularies
from specdec_fast.drafters.draft_model.text_tokens import TextTokens
from specdec_fast.request.page_keys import ComingPages
from specdec_fast.request.sequence import Sequence
from specdec_fast.request.token_bytes import complete
from specdec_fast.runner.drafting import DraftPlan
from specdec_fast.runner.model_memory import logits_bytes
from specdec_fast.runner.ragged_model import RaggedModel

# Its pool has so many times the positions of the target's: a text may have more tokens for the draft model. A sequence
# that has still more, in a language that the draft's tokenizer splits into bytes for example, is decoded plainly.
MOST_TOKENS = 2
_NUM_PROBED = 2  # target tokens behind which a proposal is timed


class TranslatingDrafter(ModelDrafter):
    """Proposes what a draft model with its own tokenizer continues.

    * By token: the model chooses among the tokens that both vocabularies have, with the noise of the target's ids.
    * By text: it chooses any of its tokens, and the target's tokenizer encodes their text behind the last committed
      tokens. Tokens of both still have the noise of the target's ids.

    Its context is kept as draft ids (``ContextReader``). KV entries are kept up to the first id that has changed.

    Args:
        model: the draft model.
        target_tokens, draft_tokens: the tokens of both.
        target_vocab_size: width of the target's logits.
        max_prefill_tokens, max_batch_size: as for ``ModelDrafter``.

    Attributes:
        translation: by which its drafts become tokens of the target.
    """

    rows_each = 8  # the end of a context may be encoded otherwise when text is added

    def __init__(  # those of ModelDrafter, and two tokenizers
        self,
        model: RaggedModel,
        target_tokens: TextTokens,
        draft_tokens: TextTokens,
        target_vocab_size: int,
        max_prefill_tokens: int | None = None,
        max_batch_size: int = 1,
    ) -> None:
        super().__init__(model, model.vocab_size, max_prefill_tokens, max_batch_size)
        self._target = target_tokens
        self._draft = draft_tokens
        self._joint = join_vocabularies(
            target_tokens, draft_tokens, target_vocab_size, model.vocab_size, model.layout.device
        )
        self._draft_ids: list[int] = self._joint.ids.draft_ids.tolist()
        self.translation: Translation = self._joint.translation
        self._reader = ContextReader(target_tokens, draft_tokens, self._joint, self.translation)
        self._contexts: dict[Sequence, DraftContext] = {}
        self._drafted: dict[Sequence, Tensor] = {}  # joint ids of the last proposal, not read yet

    def describe(self) -> dict[str, Any]:
        return super().describe() | {
            "translation": self.translation,
            "share_of_draft_tokens": self._joint.share_of_draft,
            "share_of_target_tokens": self._joint.share_of_target,
        }

    @property
    def bytes_per_token(self) -> int:
        return MOST_TOKENS * super().bytes_per_token

    def step_bytes(self, num_sequences: int, num_draft_tokens: int, prefill_rows: int | None) -> int:
        joint = logits_bytes(self.model) // self.model.vocab_size * self._joint.ids.num_ids
        return super().step_bytes(num_sequences, num_draft_tokens, prefill_rows) + num_sequences * joint

    def prepare(self, num_tokens: int, page_size: int) -> None:
        self._contexts.clear()
        self._drafted.clear()
        super().prepare(_num_positions(num_tokens, page_size), page_size)

    def grow(self, num_tokens: int) -> None:
        super().grow(_num_positions(num_tokens, self._pool().page_size))

    def keep_prefixes(self) -> None:
        """Keep none: a page of common target tokens has no certain counterpart, and contexts change."""

    def admit(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._contexts[sequence] = context = DraftContext()
            self._reader.read(context, sequence.token_ids)
        super().admit(sequences)

    def propose(self, sequences: list[Sequence], limits: list[int]) -> Draft:
        for sequence, limit in zip(sequences, limits, strict=True):
            if limit:
                self._read(sequence)
        counts = [self._most_tokens(s, limit) if limit else 0 for s, limit in zip(sequences, limits, strict=True)]
        if self._max_prefill_tokens is not None:
            self._prefill_chunk(sequences, counts, self._max_prefill_tokens)
        drafting = {sequence: count for sequence, count in zip(sequences, counts, strict=True) if count}
        if not drafting:
            return Draft(torch.empty(0, dtype=torch.int64, device="cpu"), [0] * len(sequences))
        chosen = self._chosen(drafting)
        if self.translation == "text":
            chosen = chosen.cpu()  # in one copy: the tokens are read below
        for sequence, joint_ids in zip(drafting, chosen.split(list(drafting.values())), strict=True):
            self._drafted[sequence] = joint_ids
            self.draft_kv_length[sequence] = len(self._tokens(sequence)) - 1 + len(joint_ids)
        if self.translation == "tokens":
            return Draft(chosen, counts)
        proposals = [
            self._translated(s)[:limit] if s in drafting else [] for s, limit in zip(sequences, limits, strict=True)
        ]
        token_ids = [token for proposal in proposals for token in proposal]
        return Draft(to_device(token_ids, self.model.layout.device), [len(proposal) for proposal in proposals])

    def commit(self, sequences: list[Sequence], result: StepResult) -> None:
        """Do nothing: committed tokens are read when the next draft is wanted."""

    def commit_ended(self, sequences: list[Sequence], result: StepResult) -> None:
        """Do nothing: no pages are kept."""

    def release(self, sequence: Sequence) -> None:
        self._contexts.pop(sequence, None)
        self._drafted.pop(sequence, None)
        super().release(sequence)

    def _read(self, sequence: Sequence) -> None:
        """Bring the context of a sequence up to date; what its KV entries have of it stays."""
        context = self._contexts[sequence]
        drafted = self._drafted.pop(sequence, None)
        if drafted is not None:
            context.proposed = [self._draft_ids[joint] for joint in drafted.tolist()]
        self._reader.read(context, sequence.token_ids)
        known = min(context.num_same, len(context.token_ids) - 1)
        self.draft_kv_length[sequence] = max(0, min(self.draft_kv_length[sequence], known))

    def _chosen(self, drafting: dict[Sequence, int]) -> Tensor:
        """Return the joint ids that the model chooses, ``[sum(drafting.values())]``, sequence after sequence."""
        members = list(drafting)
        starts = self._catch_up(members)
        rows = [Rows(s, start, len(self._tokens(s)) - start) for s, start in zip(members, starts, strict=True)]
        token_ids = [token for s, start in zip(members, starts, strict=True) for token in self._tokens(s)[start:]]
        by_token = self.translation == "tokens" or any(sequence.masks is not None for sequence in members)
        most = self._joint.ids.num_target_ids if by_token else self._joint.num_choosable
        plan = DraftPlan(rows, token_ids, list(drafting.values()), most, self._joint.ids)
        return self.model.draft(self._pool(), plan)

    def _translated(self, sequence: Sequence) -> list[int]:
        """Return the target's tokens of what was drafted, up to one without text, unless the target has it, too.

        Only whole characters have tokens.
        """
        num_target_ids = self._joint.ids.num_target_ids
        text = b""
        special: list[int] = []
        for joint in self._drafted[sequence].tolist():
            piece = self._draft.bytes_by_id.get(self._draft_ids[joint])
            if piece is None:
                special = [joint] if joint < num_target_ids else []
                break
            text += piece
        end = complete(text)
        if end < len(text):
            special = []
            text = text[:end]
        if not text:
            return special
        tail = self._target.tail(sequence.token_ids)
        found = self._target.encode_behind(self._target.bytes_of(sequence.token_ids[tail:]), text)
        return [] if found is None else found + special

    def _tokens(self, sequence: Sequence) -> list[int]:
        return self._contexts[sequence].token_ids

    def _probe(self) -> list[int]:
        letters = [token for token, text in self._target.bytes_by_id.items() if text.isalpha()]  # of ASCII: whole ones
        return letters[:_NUM_PROBED] or super()._probe()

    def _max_draft_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens the positions allow; 0 if the pool may have no room for the context."""
        return self._most_tokens(sequence, 1)

    def _most_tokens(self, sequence: Sequence, limit: int) -> int:
        """Return how many tokens the model may draft, at most ``limit``.

        None behind an empty context, or within a character. The pages of a sequence are at most ``MOST_TOKENS`` times
        those that the target needs for its tokens and ``limit`` further ones.
        """
        context = self._contexts[sequence]
        length = len(context.token_ids)
        if not length or context.held:
            return 0
        pool = self._pool()
        room = MOST_TOKENS * pool.num_pages_for(sequence.length - 1 + limit) * pool.page_size - (length - 1)
        return max(0, min(limit, room, super()._max_draft_tokens(sequence)))

    def _begins(self, sequence: Sequence, stop: int, coming: ComingPages) -> bool:
        return True  # it shares no pages, so it waits for those of no other


def _num_positions(num_tokens: int, page_size: int) -> int:
    """Return the positions of its pool: with the page for padding rows, ``MOST_TOKENS`` times those of the target's.

    So the pool has the bytes that ``bytes_per_token`` predicts.
    """
    return MOST_TOKENS * (num_tokens + page_size) - page_size
