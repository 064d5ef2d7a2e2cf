"""The committed tokens of a sequence as a draft model with another tokenizer reads them."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec_fast.drafters.draft_model.joint_vocabulary import JointVocabulary, Translation
from specdec_fast.drafters.draft_model.text_tokens import TextTokens
from specdec_fast.request.token_bytes import complete


@dataclass
class DraftContext:
    """The state of one sequence.

    Attributes:
        token_ids: draft ids of the committed text.
        num_read: number of committed tokens of the target that they stand for.
        num_same: since the last call of ``ContextReader.read``, as many first ids are those that were there, followed
            by ``proposed``.
        held: bytes of a character that is not complete, and that no draft token stands for.
        proposed: draft ids that were drafted behind ``token_ids``, whether or not they were accepted.
    """

    token_ids: list[int] = field(default_factory=list)
    num_read: int = 0
    num_same: int = 0
    held: bytes = b""
    proposed: list[int] = field(default_factory=list)


class ContextReader:
    """Reads committed tokens of the target into contexts.

    The first tokens, a prompt, are encoded by the draft model's tokenizer as a whole. Later ones are translated token
    by token if both vocabularies have them; if not, or with ``translation="text"``, the last tokens of the context are
    encoded again with the new text. What the draft model drafted itself stays as it drafted it, as far as the target
    accepted its text.
    """

    def __init__(self, target: TextTokens, draft: TextTokens, joint: JointVocabulary, translation: Translation) -> None:
        self._target = target
        self._draft = draft
        self._joint = joint
        self._by_token = translation == "tokens"

    def read(self, context: DraftContext, token_ids: list[int]) -> None:
        """Bring a context up to date with all committed tokens, to which more may have been added."""
        context.num_same = len(context.token_ids)
        new = token_ids[context.num_read :]
        if not new:
            return
        if context.num_read == 0:
            self._begin(context, new)
        elif self._by_token and not context.held and all(token in self._joint.draft_of_target for token in new):
            before = len(context.token_ids)
            context.token_ids += [self._joint.draft_of_target[token] for token in new]
            context.num_same = before + _num_equal(context.token_ids[before:], context.proposed)
        else:
            self._append(context, new)
        context.num_read = len(token_ids)
        context.proposed = []

    def _begin(self, context: DraftContext, prompt: list[int]) -> None:
        context.token_ids = list(self._draft.first)
        begins = self._target.roles.get("bos")
        pieces = self._pieces(prompt[1:] if prompt[0] == begins and context.token_ids else prompt)
        for number, piece in enumerate(pieces):
            if isinstance(piece, int):
                context.token_ids.append(piece)
                continue
            text = context.held + piece
            context.held = b""
            end = complete(text) if number == len(pieces) - 1 else len(text)
            words = text[:end].decode(errors="replace")
            if self._target.adds_space and words[:1] == " ":
                words = words[1:]
            context.token_ids += self._draft.encode_beginning(words)
            context.held = text[end:]

    def _append(self, context: DraftContext, new: list[int]) -> None:
        before = list(context.token_ids[-_LONGEST_CHANGE:])
        start = len(context.token_ids) - len(before)
        had = before + context.proposed
        for piece in self._pieces(new):
            if isinstance(piece, int):
                context.held = b""
                context.proposed = context.proposed[1:] if context.proposed[:1] == [piece] else []
                context.token_ids.append(piece)
            else:
                self._append_text(context, context.held + piece)
        context.num_same = start + _num_equal(context.token_ids[start:], had)

    def _append_text(self, context: DraftContext, text: bytes) -> None:
        draft = self._draft
        num_accepted = self._num_accepted(context.proposed, text)
        text = text[len(draft.bytes_of(context.proposed[:num_accepted])) :]
        context.token_ids += context.proposed[:num_accepted]
        context.proposed = [] if text else context.proposed[num_accepted:]
        context.held = b""
        if not text:
            return
        tail = draft.tail(context.token_ids, len(draft.first))
        again = draft.bytes_of(context.token_ids[tail:]) + text  # the last tokens may end within a character
        end = complete(again)
        found = draft.encode(again[:end])
        if found is None:  # bytes of no text, or a tokenizer that changes texts: the tokens before stay
            tail = len(context.token_ids)
            again = text
            end = complete(again)
            found = draft.encode(again[:end])
        if found is None:
            found = draft.encode_beginning(again[:end].decode(errors="replace"))
        context.token_ids[tail:] = found
        context.held = again[end:]

    def _num_accepted(self, proposed: list[int], text: bytes) -> int:
        """Return how many first tokens of a proposal a text begins with; the last one ends a character."""
        num_accepted = 0
        length = 0
        for number, token in enumerate(proposed, start=1):
            piece = self._draft.bytes_by_id.get(token)
            if piece is None or not text.startswith(piece, length):
                break
            length += len(piece)
            if complete(text[:length]) == length:
                num_accepted = number
        return num_accepted

    def _pieces(self, token_ids: list[int]) -> list[bytes | int]:
        """Return the text of target tokens, and the draft ids of special ones between; others have no text."""
        pieces: list[bytes | int] = []
        for token in token_ids:
            text = self._target.bytes_by_id.get(token)
            if text is None:
                if token in self._joint.draft_of_target:
                    pieces.append(self._joint.draft_of_target[token])
            elif pieces and isinstance(pieces[-1], bytes):
                pieces[-1] += text
            else:
                pieces.append(text)
        return pieces


_LONGEST_CHANGE = 64  # tokens at the end of a context that new text may change, more than TextTokens.tail returns


def _num_equal(first: list[int], second: list[int]) -> int:
    """Return the length of the longest common beginning."""
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return number
    return min(len(first), len(second))
