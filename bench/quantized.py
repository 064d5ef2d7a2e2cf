"""Plain decoding with quantised weights, ``draft="self"``, and other libraries' quantised files, in one process.

Every setting decodes the same prompts twice in a repeat: one token for each prompt, which is the time of the prompts,
and ``--max-new-tokens``, whose further time is that of decoding. Repeats are interleaved.

Shapes are those of published models with random weights (``--pair``). Their drafts would agree less than those of a
trained model, so ``self`` replays a chosen acceptance: of every draft token, the probability that it is the target's
own. Every setting's tokens must be those of plain decoding with its own weights at batch 1; a library's need not.

``--peer-models`` names a folder of ``bench.export_pair`` with the files of other libraries: ``*.gguf`` for llama.cpp,
``*-openvino*`` for OpenVINO.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch
from tqdm import trange
from transformers import PreTrainedModel

from bench.common import report
from bench.common.pairs import PAIRS, SEED, random_model, random_prompts
from bench.common.replay import ReplayDrafter
from bench.common.timing import median_ratio
from bench.common.workload import Workload
from bench.engine_.peers import LlamaCpp, OpenVino
from specdec_fast import Engine, SamplingParams
from specdec_fast.commands.common import format_table
from specdec_fast.quantization.rounding import ROUNDINGS

WHOLE = "as loaded"
SELF = "self"

Tokens = list[list[int]]


class Decoder(Protocol):
    """What decodes prompts, all in one batch."""

    def __call__(self, workload: Workload) -> tuple[Tokens, float]:
        """Return the tokens of each prompt, and the seconds."""


class Ours:
    """An engine; its weights may be quantised, its draft may be ``"self"``."""

    def __init__(self, model: PreTrainedModel, quantization: str | None, num_draft_tokens: int, most: int) -> None:
        self.engine = Engine(
            model,
            SELF if num_draft_tokens else None,
            max_batch_size=most,
            quantization=quantization,
            num_draft_tokens=num_draft_tokens,
        )

    def __call__(self, workload: Workload) -> tuple[Tokens, float]:
        """Decode."""
        params = SamplingParams(max_new_tokens=workload.max_new_tokens, ignore_eos=True)
        started = perf_counter()
        outputs = self.engine.generate(workload.prompts, params, progress=False)
        seconds = perf_counter() - started
        return [output.raise_for_error().token_ids for output in outputs], seconds

    def one_by_one(self, workload: Workload) -> Tokens:
        """Decode plainly, every prompt alone."""
        alone = [replace(workload, prompts=[prompt]) for prompt in workload.prompts]
        return [self(each)[0][0] for each in alone]

    def replays(self, wanted: Tokens, acceptance: float, vocab_size: int) -> None:
        """Let the drafter propose the target's own tokens, each with a probability."""
        drafting = self.engine.core.drafting
        device = self.engine.target.layout.device
        drafting.drafter = ReplayDrafter(drafting.drafter, wanted, acceptance, vocab_size, device)

    @property
    def linear_bytes(self) -> int:
        """The bytes of its linears."""
        return sum(self.engine.describe()["linear_bytes"].values())


class Peer:
    """Another library's model."""

    def __init__(self, run: OpenVino | LlamaCpp, file: Path) -> None:
        self._run = run
        self.linear_bytes = sum(each.stat().st_size for each in ([file] if file.is_file() else file.glob("*.bin")))

    def __call__(self, workload: Workload) -> tuple[Tokens, float]:
        """Decode."""
        self._run.workload = workload
        found = self._run(len(workload.prompts), None)
        return found.outputs, found.seconds


@dataclass
class Times:
    """What was measured of one setting at one batch size."""

    name: str
    workload: Workload
    decoder: Decoder
    linear_bytes: int
    wanted: Tokens | None  # None: its tokens are free
    rates: list[float] = field(default_factory=list)  # tokens per second after the prompts, one for each repeat
    prompt_seconds: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Decode twice."""
        _, of_prompts = self.decoder(replace(self.workload, max_new_tokens=1))
        tokens, seconds = self.decoder(self.workload)
        if self.wanted is not None and tokens != self.wanted:
            sys.exit(f"{self.name}, batch {len(tokens)}: other tokens than plain decoding with these weights")
        self.rates.append((sum(map(len, tokens)) - len(tokens)) / (seconds - of_prompts))
        self.prompt_seconds.append(of_prompts)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.quantized", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pair", choices=list(PAIRS), default="qwen3-0.6b", help="its target (default: qwen3-0.6b)")
    parser.add_argument("--dtype", choices=list(report.DTYPES), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--quantizations", type=report.names, default=list(ROUNDINGS), help="default: all")
    parser.add_argument("--batch-sizes", type=report.integers, default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=33)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--self-draft-tokens", type=report.integers, default=[4], metavar="K", help="0: without it")
    parser.add_argument("--acceptance", type=float, default=0.94, help="of draft='self' (default: 0.94)")
    parser.add_argument("--peer-models", type=Path, metavar="FOLDER", help="files of other libraries")
    report.add_report_options(parser)
    parser.set_defaults(repeats=5)
    args = parser.parse_args(argv)
    if unknown := set(args.quantizations) - set(ROUNDINGS):
        parser.error(f"--quantizations: {', '.join(sorted(unknown))}; expected some of {', '.join(ROUNDINGS)}")
    if args.max_new_tokens < 2 or args.repeats < 1:
        parser.error("--max-new-tokens: expected 2 or more; --repeats: 1 or more")
    return args


def settings_of(args: argparse.Namespace, workload: Workload) -> Iterator[tuple[str, Decoder, int, Tokens | None]]:
    """Yield the name, the decoder, its bytes and its wanted tokens of every setting; the weights as loaded first."""
    most = len(workload.prompts)
    wanted_of_whole: Tokens = []
    for quantization in (None, *args.quantizations):
        ours = Ours(workload.target, quantization, 0, most)
        wanted = ours.one_by_one(workload)
        wanted_of_whole = wanted_of_whole or wanted
        yield quantization or WHOLE, ours, ours.linear_bytes, wanted
    for count in filter(None, args.self_draft_tokens):
        ours = Ours(workload.target, None, count, most)
        ours.replays(wanted_of_whole, args.acceptance, PAIRS[args.pair].vocab_size)
        yield f"{WHOLE}, self, K {count}", ours, ours.linear_bytes, wanted_of_whole
    for file in sorted(args.peer_models.iterdir()) if args.peer_models else ():
        if file.suffix == ".gguf":
            peer = Peer(LlamaCpp(workload, args.peer_models, file.name), file)
            yield f"llama.cpp {file.stem}", peer, peer.linear_bytes, None
        if "-openvino" in file.name:
            peer = Peer(OpenVino(workload, args.peer_models, target=file.name), file)
            yield f"OpenVINO {file.name}", peer, peer.linear_bytes, None


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, end in one JSON line."""
    args = parse_args(argv)
    report.prepare(args)
    pair = PAIRS[args.pair]
    model = random_model(pair.target, pair.vocab_size, report.DTYPES[args.dtype], torch.device("cpu"), SEED)
    prompts = random_prompts(max(args.batch_sizes), args.prompt_tokens, pair.vocab_size)
    workload = Workload(args.pair, model, model, prompts, args.max_new_tokens)
    times = [
        Times(name, replace(workload, prompts=prompts[:size]), decoder, held, wanted and wanted[:size])
        for name, decoder, held, wanted in settings_of(args, workload)
        for size in args.batch_sizes
    ]
    for repeat in trange(args.repeats + 1, desc="repeats"):
        for each in times:
            each.measure()
            if repeat == 0:  # it warms up
                each.rates.clear()
                each.prompt_seconds.clear()
    times.sort(key=lambda each: len(each.workload.prompts))
    whole = {len(each.workload.prompts): each for each in reversed(times) if each.name == WHOLE}
    rows = [row_of(each, whole[len(each.workload.prompts)]) for each in times]
    header = ("batch", "weights", "tokens/s", "x as loaded", "prompts, ms", "x as loaded", "weights, MB")
    print(format_table(header, [tuple(row.values()) for row in map(report.rounded, rows)]))
    machine = report.machine(torch.device("cpu"))
    options = {name: getattr(args, name) for name in ("pair", "dtype", "prompt_tokens", "max_new_tokens", "acceptance")}
    report.write_json({"machine": machine, **options, "repeats": args.repeats, "rows": rows}, args.json)


def row_of(times: Times, whole: Times) -> dict[str, Any]:
    """Summarise one setting; ratios above 1 say that it is faster than the weights as they are."""
    return {
        "batch_size": len(times.workload.prompts),
        "name": times.name,
        "tokens_per_second": median(times.rates),
        "speedup": median_ratio(times.rates, whole.rates),
        "prompt_ms": 1e3 * median(times.prompt_seconds),
        "prompt_speedup": median_ratio(whole.prompt_seconds, times.prompt_seconds),
        "megabytes": times.linear_bytes / 1e6,
    }


if __name__ == "__main__":
    main()
