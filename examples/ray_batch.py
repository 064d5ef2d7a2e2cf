"""A batch job on a Ray cluster: a file of prompts in, a file of results out, in the same order.

``python examples/ray_batch.py PROMPTS.jsonl RESULTS.jsonl`` decodes with the bundled pair in two workers. A line of the
input has ``prompt`` (a text). If a worker fails, Ray starts another one, which decodes the rows again; every row has a
seed of its own, so it gets the same tokens. Run it on a cluster with ``ray job submit``, or as it is, on this machine.
"""

import argparse
import json

import ray

import specdec_fast as sd
from specdec_fast.assets import demo_pair
from specdec_fast.integrations.ray import BatchGenerator, sum_stats


def sampling_params(row: dict) -> sd.SamplingParams:
    """Return the parameters of a row."""
    return sd.SamplingParams(max_new_tokens=40, temperature=0.7, seed=int(row["line"]))


def main(argv: list[str] | None = None) -> int:
    """Decode a file; the exit status is 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("results")
    parser.add_argument("--target", default=str(demo_pair() / "target"), help="a name, or a folder that workers see")
    parser.add_argument("--draft", default=str(demo_pair() / "draft"), help='the same, or "ngram"')
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=1, help="of each worker; its engine computes with as many threads")
    parser.add_argument("--gpus", type=int, default=0, help="of each worker")
    parser.add_argument("--batch-size", type=int, default=8, help="rows that a worker gets at a time")
    args = parser.parse_args(argv)

    with open(args.prompts, encoding="utf-8") as file:
        rows = [{"line": number, "prompt": json.loads(line)["prompt"]} for number, line in enumerate(file)]
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    dataset = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // args.batch_size)).map_batches(
        BatchGenerator,
        fn_constructor_args=(args.target, args.draft),
        fn_constructor_kwargs={"params": sampling_params, "max_batch_size": 8},
        batch_size=args.batch_size,
        batch_format="pyarrow",  # keeps the types of all columns
        compute=ray.data.ActorPoolStrategy(size=args.workers),
        num_cpus=args.cpus,
        num_gpus=args.gpus,
    )
    done = dataset.take_all()
    with open(args.results, "w", encoding="utf-8") as file:
        for row in done:
            result = {"line": row["line"], "text": row["output_text"], "finish_reason": row["output_finish_reason"]}
            file.write(json.dumps(result | ({"error": row["output_error"]} if row["output_error"] else {})) + "\n")
    stats, num_failed = sum_stats(done), sum(bool(row["output_error"]) for row in done)
    print(f"{len(done)} rows, {num_failed} failed, {stats.num_emitted_tokens} tokens")
    print(f"{stats.mean_acceptance_length:.2f} tokens per step with drafts, {stats.acceptance_rate:.0%} accepted")
    return int(num_failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
