"""Rollouts of TRL's GRPOTrainer: tokens/s of its own generation, and of an engine with several drafters, in fp32."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.common import report
from bench.common.timing import median_ratio
from specdec_fast.assets import demo_pair
from specdec_fast.commands.common import format_table
from specdec_fast.integrations.trl import rollout_func

ALONE = "transformers"  # TRL without rollout_func
PLAIN = "plain"


@dataclass
class Rollouts:
    """The completions and the times of one training run.

    Attributes:
        completions: ``[steps][rows]`` lists of token ids.
        seconds: of each rollout, from prompts to the decoded texts.
    """

    completions: list[list[list[int]]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Of the rollouts after the first, in which the engine is made."""
        return sum(len(row) for rows in self.completions[1:] for row in rows) / sum(self.seconds[1:])


def trained(name: str, args: argparse.Namespace) -> Rollouts:
    """Train the bundled target for some steps; a step trains on one rollout, and changes the weights."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    found = Rollouts()

    class TimedTrainer(GRPOTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            started = perf_counter()
            result = super()._generate(prompts)
            found.seconds.append(perf_counter() - started)
            found.completions.append(result[1])
            return result

    pair = demo_pair()
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    draft = {PLAIN: None, "model": str(pair / "draft")}.get(name, name)
    rollout = None if name == ALONE else rollout_func(draft, seed=1, num_draft_tokens=args.num_draft_tokens)
    lines = (pair / "prompts.jsonl").read_text().splitlines()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_steps=args.steps + 1,
            learning_rate=1e-5,
            temperature=args.temperature,
            per_device_train_batch_size=args.rows,
            num_generations=args.num_generations,
            max_completion_length=args.max_completion_length,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
        )
        TimedTrainer(
            model=target,
            reward_funcs=_reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [json.loads(line)["prompt"] for line in lines]}),
            processing_class=AutoTokenizer.from_pretrained(pair / "target"),
            rollout_func=rollout,
        ).train()
    return found


def _reward(completions: list[str], **columns: Any) -> list[float]:
    return [len(set(text.split())) / max(1, len(text.split())) for text in completions]


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, end in one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m bench.rollouts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--drafts", type=report.names, default=["model", "ngram", "suffix", "self"])
    parser.add_argument("--num-draft-tokens", type=lambda text: report.draft_tokens(text)[0], default=3, metavar="K")
    parser.add_argument("--rows", type=int, default=32, help="completions of a step")
    parser.add_argument("--num-generations", type=int, default=16, help="completions of a prompt")
    parser.add_argument("--max-completion-length", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=4, help="that are timed, after a first one")
    report.add_report_options(parser)
    parser.set_defaults(repeats=3)
    args = parser.parse_args(argv)
    report.prepare(args)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    names = [PLAIN, ALONE, *args.drafts]
    speeds: dict[str, list[float]] = {name: [] for name in names}
    first: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(args.repeats):
        runs = {name: trained(name, args) for name in (names if repeat % 2 else names[::-1])}
        for name, run in runs.items():
            if name != ALONE and run.completions != runs[PLAIN].completions:
                raise SystemExit(f"{name}: the completions differ from those of plain decoding; no times are reported")
            speeds[name].append(run.tokens_per_second)
            first[name].append(run.seconds[0])
    rows = [
        (
            name,
            f"{median(speeds[name]):.0f}",
            f"{median_ratio(speeds[name], speeds[ALONE]):.1f}x",
            f"{median_ratio(speeds[name], speeds[PLAIN]):.2f}x",
            f"{median(first[name]):.2f}",
        )
        for name in names
    ]
    print(format_table(("rollouts by", "tokens/s", "to transformers", "to plain", "first rollout, s"), rows))
    kept = ("num_draft_tokens", "rows", "num_generations", "max_completion_length", "temperature", "steps", "repeats")
    settings = {name: getattr(args, name) for name in kept}
    result = {"machine": report.machine(torch.device("cpu")), "settings": settings, "tokens_per_second": speeds}
    report.write_json(result | {"seconds_of_first_rollout": first}, args.json)


if __name__ == "__main__":
    main()
