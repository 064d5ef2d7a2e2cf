"""Two vocabularies joined by the bytes of their tokens, and the way in which a draft model with its own one drafts."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from specdec_fast.batch.joint_ids import JointIds
from specdec_fast.drafters.draft_model.text_tokens import TextTokens

Translation = Literal["tokens", "text"]

# Of both vocabularies, the share that the other one has, from which on drafts are restricted to common tokens: where
# each model seldom wants a token that the other lacks. At shares of .70, text emitted 3.2 tokens per step and common
# tokens 2.4 (docs/performance.md has other shares); at 1 both emit the same, and tokens cost less time.
LEAST_COMMON = 0.95


class JointVocabulary(NamedTuple):
    """The tokens of a target and of a draft model, joined by their text.

    Attributes:
        ids: of both, for the draft model's forwards.
        draft_of_target: the draft id of every target id that both have; common special tokens included.
        num_choosable: joint ids below it stand for text, or for tokens that the target has.
        share_of_draft: share of the draft's tokens of text that the target has.
        share_of_target: share of the target's tokens of text that the draft has.
    """

    ids: JointIds
    draft_of_target: dict[int, int]
    num_choosable: int
    share_of_draft: float
    share_of_target: float

    @property
    def translation(self) -> Translation:
        """How drafts are best translated: token by token, or as text that is encoded again."""
        return "tokens" if min(self.share_of_draft, self.share_of_target) >= LEAST_COMMON else "text"


def join_vocabularies(
    target: TextTokens, draft: TextTokens, num_target_ids: int, num_draft_ids: int, device: torch.device
) -> JointVocabulary:
    """Join two vocabularies.

    Args:
        target: the target's tokens.
        draft: the draft model's.
        num_target_ids: width of the target's logits.
        num_draft_ids: width of the draft model's logits.
        device: of the draft model.
    """
    # Of several tokens with the same bytes the last: SentencePiece has byte tokens first, and seldom uses them.
    of_draft = {text: token for token, text in draft.bytes_by_id.items()}
    of_target = {text: token for token, text in target.bytes_by_id.items()}
    draft_of_target = {of_target[text]: token for text, token in of_draft.items() if text in of_target}
    num_common = len(draft_of_target)
    draft_of_target |= _common_specials(target, draft)
    joint_ids = [-1] * num_draft_ids
    for joint, token in draft_of_target.items():
        joint_ids[token] = joint
    rest = [token for token in range(num_draft_ids) if joint_ids[token] < 0]
    rest.sort(key=lambda token: token not in draft.bytes_by_id)  # text first
    for joint, token in enumerate(rest, start=num_target_ids):
        joint_ids[token] = joint
    num_ids = num_target_ids + len(rest)
    draft_ids = [0] * num_ids
    for token, joint in enumerate(joint_ids):
        draft_ids[joint] = token
    ids = JointIds(
        torch.tensor(joint_ids, dtype=torch.int64, device=device),
        torch.tensor(draft_ids, dtype=torch.int64, device=device),
        num_ids,
        num_target_ids,
    )
    num_text = sum(token in draft.bytes_by_id for token in rest)
    return JointVocabulary(
        ids=ids,
        draft_of_target=draft_of_target,
        num_choosable=num_target_ids + num_text,
        share_of_draft=num_common / max(1, len(of_draft)),
        share_of_target=num_common / max(1, len(of_target)),
    )


def _common_specials(target: TextTokens, draft: TextTokens) -> dict[int, int]:
    """Return the draft ids of the target's special tokens that have the same content, or begin or end a text in both.

    No draft token stands for two of the target's.
    """
    by_role = {token: draft.roles[role] for role, token in target.roles.items() if role in draft.roles}
    by_content = {token: draft.added[content] for content, token in target.added.items() if content in draft.added}
    draft_of_target: dict[int, int] = {}
    taken: set[int] = set()
    for token, of_draft in (by_role | by_content).items():
        is_text = token in target.bytes_by_id or of_draft in draft.bytes_by_id
        if not is_text and of_draft not in taken:
            draft_of_target[token] = of_draft
            taken.add(of_draft)
    return draft_of_target
