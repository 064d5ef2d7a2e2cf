"""GRPO with TRL, whose rollouts an engine decodes: with and without speculation the same texts for the same seeds.

``python examples/grpo.py`` trains the bundled target for some steps with each drafter of ``--drafts``, from the same
weights, and compares all completions and the trained weights. The reward is the share of different words.
"""

import argparse
import os
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL may still change what it passes to a rollout_func

from trl import GRPOConfig, GRPOTrainer

from specdec_fast.assets import demo_pair
from specdec_fast.integrations.trl import rollout_func

PROMPTS = ["Once upon a time", "One day, a little bird", "Tim had a big red", "The dog and the cat"]
TARGET = str(demo_pair() / "target")


def reward(completions, **columns):
    """Return the share of different words of each completion."""
    return [len(set(text.split())) / max(1, len(text.split())) for text in completions]


def train(draft, steps):
    """Train; return the completions of all rollouts, the trained weights, and the seconds that the rollouts took."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    decode = rollout_func(draft, seed=1)
    completions = []
    seconds = []

    def timed_rollout(prompts, trainer):
        started = time.perf_counter()
        rollout = decode(prompts, trainer)
        seconds.append(time.perf_counter() - started)
        completions.append(rollout["completion_ids"])
        return rollout

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            max_steps=steps,
            learning_rate=1e-3,
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=64,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=AutoTokenizer.from_pretrained(TARGET),
            rollout_func=timed_rollout,
        )
        trainer.train()
    return completions, {name: tensor.cpu() for name, tensor in model.state_dict().items()}, seconds


def main(argv=None):
    """Train with each drafter; the exit status is 1 if texts or weights differ from those of plain decoding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--drafts", default="model,self,suffix", help='comma-separated; "model" is the bundled one')
    args = parser.parse_args(argv)
    plain, weights, _ = train(None, args.steps)
    differ = False
    for name in args.drafts.split(","):
        texts, trained, seconds = train(str(demo_pair() / "draft") if name == "model" else name, args.steps)
        same_weights = all(torch.equal(trained[key], tensor) for key, tensor in weights.items())
        differ |= texts != plain or not same_weights
        num_tokens = sum(len(ids) for rollout in texts[1:] for ids in rollout)
        print(
            f"{name}: {'the same' if texts == plain else 'OTHER'} completions, "
            f"{'the same' if same_weights else 'OTHER'} weights after {args.steps} steps; "
            f"{num_tokens / max(sum(seconds[1:]), 1e-9):.0f} tokens/s after the first rollout"
        )
    return int(differ)


if __name__ == "__main__":
    raise SystemExit(main())
