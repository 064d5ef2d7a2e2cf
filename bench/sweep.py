"""``make sweep``: every causal architecture of transformers as a tiny random model, served and compared.

Every model decodes greedily in fp32, four prompts in one batch with prompt lookup. It must emit the tokens of
``model.generate()`` at batch 1, with the log-probability bits of the engine's own plain decoding at batch 1. Every
architecture gets a process of its own, because some crash and some hang.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import logging

import specdec_fast as sd
from bench.common.tiny_models import ARCHITECTURES, SPECIAL, NotTinyError, tiny_model, varied
from specdec_fast.equivalence.compare import transformers_greedy
from specdec_fast.errors import DeterminismError
from specdec_fast.ops.registry import AUTO

PROMPTS = [[(7 * i + 3 * n) % SPECIAL for i in range(n)] for n in (2, 9, 21, 40)]
NEW_TOKENS = 12
# The possible verdicts on an architecture, in the order of the table.
VERDICTS = {
    "program": "served as a forward program",
    "pytorch": "served by PyTorch",
    "refused": "refused",
    "unbuilt": "no tiny model",
    "reference": "no reference",
    "wrong": "WRONG",
    "untyped": "CRASHED",
}
HEAD = """# Architectures

`make sweep` writes this page. It covers the {total} architectures that `AutoModelForCausalLM` of
transformers {transformers} knows, with torch {torch}. For each architecture, the sweep builds a
tiny random model from the defaults of its config and decodes greedily in fp32: four prompts in
one batch, with drafts by prompt lookup. It compares the tokens with `model.generate()` at batch
1, and the bits of the log-probabilities with the engine's own plain decoding at batch 1.

A tiny model has the layers of its architecture, but not the options of every checkpoint. Where an
encoder can also be a decoder (BERT), the model is one (`is_decoder=True`). The engine checks each
model again when it loads it.

{counts}

The verdicts mean:

* Served as a forward program: on a CPU the whole forward is one C++ call.
* Served by PyTorch: the model's own code runs, over the paged KV cache.
* Refused: `Engine()` raises `UnsupportedModelError` or `DeterminismError` with the reason given.
* No tiny model: the sweep could not build one.
* No reference: `model.generate()` itself cannot decode the tiny model.
* WRONG and CRASHED, if there are any, are defects.

| architecture | verdict | reason |
|---|---|---|
"""


def examine(architecture: str, device: str = "cpu") -> tuple[str, str]:
    """Return the verdict on an architecture, a key of ``VERDICTS``, and the reason, which may be empty."""
    try:
        model = varied(tiny_model(architecture)).to(device)
        expected = [transformers_greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    except NotTinyError as error:
        return "unbuilt", str(error)
    except Exception as error:  # the code of an architecture may raise anything
        return "reference", f"{type(error).__name__}: {error}"
    try:
        return _compare(model, expected)
    except (sd.UnsupportedModelError, DeterminismError) as error:
        return "refused", str(error)
    except Exception as error:
        return "untyped", f"{type(error).__name__}: {error}"


def _compare(model: PreTrainedModel, expected: list[list[int]]) -> tuple[str, str]:
    params = sd.SamplingParams(max_new_tokens=NEW_TOKENS, logprobs=True)
    backend = "triton" if model.device.type == "cuda" else AUTO  # there in fp32, too, so that forwards are programs
    engine = sd.Engine(model, "ngram", num_draft_tokens=3, max_batch_size=len(PROMPTS), backend=backend)
    outputs = engine.generate(PROMPTS, params)
    plain = sd.Engine(model, None, max_batch_size=1, backend=backend)
    alone = [plain.generate([prompt], params)[0] for prompt in PROMPTS]
    failed = [str(output.error) for output in outputs if output.error]
    same = sum(output.token_ids == tokens for output, tokens in zip(outputs, expected, strict=True))
    bits = sum(logprobs_of(a) == logprobs_of(b) for a, b in zip(outputs, alone, strict=True))
    if failed:
        return "wrong", f"{len(failed)} of {len(PROMPTS)} outputs failed: {failed[0]}"
    if min(same, bits) < len(PROMPTS):
        return "wrong", f"of {len(PROMPTS)} outputs {same} have generate()'s tokens, {bits} the bits of plain decoding"
    return ("program", "") if engine.target.has_program else ("pytorch", engine.describe()["why_no_program"] or "")


def logprobs_of(output: sd.GenerationOutput) -> object:
    """Return what must equal plain decoding: tokens, and the bits of their log-probabilities."""
    return output.token_ids, output.logprobs


def _in_child(architecture: str, device: str, result: Path) -> int:
    """Fork a process that examines one architecture; return its id. The parent has already imported everything."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        torch.set_num_threads(1)
        result.write_text(json.dumps(examine(architecture, device)))
        code = 0
    finally:
        os._exit(code)


def sweep(
    architectures: list[str], folder: Path, processes: int, limit: float, device: str = "cpu"
) -> dict[str, tuple[str, str]]:
    """Examine architectures on a device, several at a time, each for at most ``limit`` seconds."""
    found: dict[str, tuple[str, str]] = {}
    waiting, running = list(architectures), dict[int, tuple[str, float]]()
    while waiting or running:
        while waiting and len(running) < processes:
            name = waiting.pop(0)
            running[_in_child(name, device, folder / name)] = (name, time.monotonic())
        for child, (name, started) in list(running.items()):
            if time.monotonic() - started > limit:
                os.kill(child, signal.SIGKILL)
            done, status = os.waitpid(child, os.WNOHANG)
            if not done:
                continue
            del running[child]
            result = folder / name
            code = os.waitstatus_to_exitcode(status)
            late = time.monotonic() - started > limit
            lost = ("untyped", f"no end within {limit:.0f} s" if late else f"the process ended with {code}")
            found[name] = tuple(json.loads(result.read_text())) if code == 0 else lost  # type: ignore[assignment]
            print(f"{len(found):4}/{len(architectures)} {name}: {' '.join(found[name])[:150]}", flush=True)
        time.sleep(0.05)
    return {name: found[name] for name in architectures}


def document(found: dict[str, tuple[str, str]], versions: dict[str, str]) -> str:
    """Return the text of docs/models.md."""
    counts = Counter(verdict for verdict, _ in found.values())
    lines = "\n".join(f"* {text}: {counts[verdict]}" for verdict, text in VERDICTS.items() if counts[verdict])
    head = HEAD.format(total=len(found), counts=lines, **versions)
    order = list(VERDICTS)
    rows = sorted(found.items(), key=lambda item: (order.index(item[1][0]), item[0]))
    return head + "".join(f"| {name} | {VERDICTS[verdict]} | {_cell(why)} |\n" for name, (verdict, why) in rows)


def _cell(text: str) -> str:
    short = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return short if len(short) <= 260 else short[:257] + "..."


def main(arguments: list[str] | None = None) -> int:
    """Examine the named architectures, by default all; write JSON and table; return 1 if any is wrong or crashed.

    The table is that of a CPU.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="*", help="default: all")
    parser.add_argument("--device", default="cpu", help="such as cuda, where every op is Triton's (default: cpu)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one architecture")
    parser.add_argument("--json", type=Path, default=Path("bench/results/models.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs/models.md"))
    parser.add_argument("--scratch", type=Path, default=Path("build/sweep"))
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()
    options.scratch.mkdir(parents=True, exist_ok=True)
    names = options.architectures or ARCHITECTURES
    found = sweep(names, options.scratch, options.processes, options.limit, options.device)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    counts = Counter(verdict for verdict, _ in found.values())
    rows = {name: {"verdict": verdict, "why": why} for name, (verdict, why) in found.items()}
    options.json.write_text(json.dumps({**versions, "counts": counts, "architectures": rows}, indent=1) + "\n")
    if options.device == "cpu":
        options.docs.write_text(document(found, versions))
    print(json.dumps({**versions, **counts}))
    return 1 if counts["wrong"] or counts["untyped"] else 0


if __name__ == "__main__":
    sys.exit(main())
