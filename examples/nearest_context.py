"""A drafter fed by the target's hidden states, on the bundled target: ``python examples/nearest_context.py``.

It looks for the earlier position of a text whose hidden state is most like the present one, and proposes the tokens
that followed there: prompt lookup by what the target computed, instead of by equal tokens.
"""

import torch
from torch.nn.functional import normalize

import specdec_fast as sd
from specdec_fast.assets import demo_pair


class NearestContext(sd.Drafter):
    """The hidden state of position i is the one that chose the token at position i + 1."""

    name = "nearest context"
    taps = ("final",)  # the input of the target's output layer; numbers name layers

    def __init__(self):
        self.features = {}

    def admit(self, sequences):
        """Begin with no hidden state of a sequence."""
        self.features |= {sequence: torch.empty(0) for sequence in sequences}

    def observe(self, sequences, positions, features):
        """Keep those of a chunk of prompts, ``[T, 1, H]``."""
        for sequence, rows in zip(sequences, features.split([len(own) for own in positions]), strict=True):
            self._add(sequence, rows)

    def commit(self, sequences, result):
        """Keep those of the rows that a step has accepted."""
        for sequence, rows in zip(sequences, result.accepted_rows, strict=True):
            self._add(sequence, result.hidden_states[list(rows)])

    def release(self, sequence):
        """Forget a sequence."""
        self.features.pop(sequence, None)

    def propose(self, sequences, limits):
        """Propose what followed the nearest position."""
        proposals = []
        for sequence, limit in zip(sequences, limits, strict=True):
            features = self.features[sequence]  # of positions 0 to length - 2: none for a prompt of one token
            nearest = int((features[:-1] @ features[-1]).argmax()) if len(features) > 1 else sequence.length
            proposals.append(sequence.token_ids[nearest + 2 : nearest + 2 + limit])
        tokens = torch.tensor([token for proposal in proposals for token in proposal], dtype=torch.int64)
        return sd.Draft(tokens, [len(proposal) for proposal in proposals])

    def _add(self, sequence, rows):
        self.features[sequence] = torch.cat([self.features[sequence], normalize(rows[:, 0].float(), dim=1).cpu()])


if __name__ == "__main__":
    engine = sd.Engine(str(demo_pair() / "target"), NearestContext(), num_draft_tokens=3)
    (output,) = engine.generate(["Count from 3 to 9: 3,"], sd.SamplingParams(max_new_tokens=40))
    stats = output.stats
    print(f"{stats.num_emitted_tokens} tokens in {stats.num_steps} steps: {output.text!r}")
