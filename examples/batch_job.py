"""A batch job: a file of prompts in, a file of results out, one JSON object per line.

``python examples/batch_job.py PROMPTS.jsonl RESULTS.jsonl`` decodes with the bundled pair. A line of the input has
``prompt`` (a text, token ids or messages) and may have ``max_new_tokens``. Results are written as they end, so their
order differs; ``line`` is the number of the input line, from 0. ``specdec-fast generate`` is a ready-made command with
more options.
"""

import argparse
import json

import specdec_fast as sd
from specdec_fast.assets import demo_pair


def main(argv: list[str] | None = None) -> int:
    """Decode a file; the exit status is 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("results")
    parser.add_argument("--target", default=str(demo_pair() / "target"))
    parser.add_argument("--draft", default=str(demo_pair() / "draft"), help='a model, or "ngram"')
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of a line that has no limit of its own")
    parser.add_argument("--max-batch-size", type=int, default=16)
    args = parser.parse_args(argv)

    with open(args.prompts, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.strip()]
    params = [sd.SamplingParams(max_new_tokens=line.get("max_new_tokens", args.max_new_tokens)) for line in lines]
    engine = sd.Engine(args.target, args.draft, max_batch_size=args.max_batch_size, num_draft_tokens="auto")
    num_failed = 0
    with open(args.results, "w", encoding="utf-8") as file:
        for output in engine.as_completed([line["prompt"] for line in lines], params):
            result = {"line": output.index, "text": output.text, "finish_reason": output.finish_reason}
            if output.error is not None:  # the other requests go on
                num_failed += 1
                result["error"] = str(output.error)
            file.write(json.dumps(result) + "\n")
            file.flush()
    run = engine.last_run
    print(f"{len(lines)} requests, {num_failed} failed, {run.num_steps} steps")
    return int(num_failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
