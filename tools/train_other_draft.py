"""Train a small draft model with a tokenizer of its own for a target, on texts that the target writes.

    python tools/train_other_draft.py --output out/ --vocab-size 1500

The tokenizer is a byte-level BPE that is trained on these texts. `docs/performance.md` has what such drafts are worth.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from pair_corpus import save_tokenizer, token_stream, train_tokenizer
from pair_training import DRAFT_SIZE, Budget, new_model, next_token_loss, save_model, train

from specdec_fast import Engine, SamplingParams
from specdec_fast.assets import demo_pair


def written_texts(target: str, num_texts: int, seed: int) -> list[str]:
    """Return texts that a target writes: half of them from nothing, half behind the first words of the others."""
    engine = Engine(target, None, max_batch_size=64, prefix_cache=True)
    beginning = [engine.tokenizer.bos_token_id]

    def written(prompts: list[list[int]], temperature: float) -> list[str]:
        each = [SamplingParams(max_new_tokens=160, temperature=temperature, seed=seed + i) for i in range(len(prompts))]
        outputs = engine.generate(prompts, each)
        texts = zip(prompts, outputs, strict=True)
        return [engine.tokenizer.decode(p + o.token_ids, skip_special_tokens=True) for p, o in texts]

    sampled = written([beginning] * (num_texts // 2), 1.0)
    return sampled + written([engine.encode(text)[:24] for text in sampled], 0.0)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(demo_pair() / "target"), help="folder (default: the bundled one)")
    parser.add_argument("--output", type=Path, required=True, help="folder of the draft model")
    parser.add_argument("--vocab-size", type=int, default=1500, help="ids of its tokenizer")
    parser.add_argument("--num-texts", type=int, default=12000, help="texts that the target writes")
    parser.add_argument("--minutes", type=float, default=3.0, help="of training")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.output.mkdir(parents=True, exist_ok=True)
    texts = written_texts(args.target, args.num_texts, args.seed)
    tokenizer = train_tokenizer(texts, args.vocab_size)
    save_tokenizer(tokenizer, args.output)
    model = new_model(DRAFT_SIZE, args.vocab_size, args.seed)
    report = train(model, next_token_loss, token_stream(tokenizer, texts), Budget(args.minutes, 16, args.seed))
    save_model(model, args.output)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
