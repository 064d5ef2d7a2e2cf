"""An EAGLE-3 drafter with random weights for any target: one layer of the target's hidden size, whose costs are timed.

Its own proposals are worthless, so ``bench/common/replay.py`` replaces them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from bench.common.pairs import SEED
from specdec_fast.drafters.eagle3.training import new_module, save_drafter
from specdec_fast.drafters.shared.new_drafter import DrafterSize
from specdec_fast.errors import ConfigError
from specdec_fast.models.hidden_states import default_taps

# Standard deviation of logits. With it the likeliest child of a node often has most of the probability, as with a
# trained drafter, so that trees that follow the drafter's confidence are deep.
_LOGITS_DEVIATION = 5.0
_LAYERS_OF_DEFAULT_TAPS = 7  # the least number of layers of a target that has default taps


def write_random_eagle3(target: PreTrainedModel, num_draft_ids: int, folder: Path) -> None:
    """Write a checkpoint whose layer has random weights, the target's embedding, and a multiple of its output layer.

    Args:
        target: the model that it drafts for; its embeddings are not stored again.
        num_draft_ids: number of ids that it can propose, the first ones. Published checkpoints often have 32,000.
        folder: exists.

    Raises:
        ConfigError: there are no or more ids than the target's, or it has sizes that no drafter can have.

    """
    config = target.config.get_text_config(decoder=True)
    if not 0 < num_draft_ids <= config.vocab_size:
        raise ConfigError(f"{num_draft_ids} ids; expected 1 to {config.vocab_size}, the ids of the target.")
    num_layers = config.num_hidden_layers
    taps = default_taps(num_layers) if num_layers >= _LAYERS_OF_DEFAULT_TAPS else tuple(range(min(3, num_layers)))
    ids = None if num_draft_ids == config.vocab_size else torch.arange(num_draft_ids, device="cpu")
    torch.manual_seed(SEED)
    module = new_module(target, DrafterSize(tap_layers=taps), num_draft_ids, ids)
    weight = module.lm_head.weight
    with torch.no_grad():  # of rows whose numbers have a mean square of 1
        weight *= _LOGITS_DEVIATION / (weight.float().std() * weight.shape[1] ** 0.5)
    save_drafter(module, folder, target, taps, ids)
