"""From a text file to what training needs: documents, a tokenizer, a token stream, held-out prompts.

Everything here is decided by the text and a seed, before any model exists. The order matters: documents are
held out *first*, so neither the tokenizer nor a model has ever seen the text that the report measures on.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = "<s>", "</s>", "<pad>"  # ids 0, 1, 2: the trainer numbers special tokens first, in this order
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
CONTEXT = 512
SHORT_WINDOW = 256  # what training begins with; see `pair_training.train`
SHORTEST_PROMPT, LONGEST_PROMPT = 7, 200

MIN_CHARACTERS = 20_000  # less text than this cannot fill a useful vocabulary, let alone train a model
MIN_DOCUMENTS = 20
MIN_HELD_OUT = 8
MERGED_CHARACTERS = 700  # about 250 tokens: long enough for a 200-token prompt, short enough to meet its eos


class InputError(ValueError):
    """What the user gave cannot be used; the message is the one line they get to read."""


@dataclass(frozen=True)
class TokenStream:
    """All training documents as one row of token ids, and the places where a training window may begin.

    A window begins at a document's first token, so that position 0 holds bos as it will in use; inside a
    longer document it may also begin every `SHORT_WINDOW` tokens, or the rest would go unseen.
    """

    ids: torch.Tensor  # [num_tokens + CONTEXT], int64; the head again at the end, so every window is full
    starts: torch.Tensor  # [num_starts], int64
    num_tokens: int

    def batch(self, batch_size: int, window: int, generator: torch.Generator) -> torch.Tensor:
        """Windows that begin at places drawn uniformly from the starts, `[batch_size, window]`."""
        chosen = torch.randint(len(self.starts), (batch_size,), generator=generator)
        return self.ids[self.starts[chosen][:, None] + torch.arange(window)]


def read_text(path: Path) -> str:
    """The file's text, or an `InputError` that says why it cannot be had."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def split_documents(text: str, separator: str | None) -> list[str]:
    """Cut the text at `separator`, or by default merge paragraphs until they have `MERGED_CHARACTERS`.

    A paragraph alone makes a poor document: most are shorter than a prompt, and a model trained on them ends
    everything after a sentence or two. The first paragraph to reach the length closes its document.
    """
    if separator is not None:
        return [document for piece in text.split(separator) if (document := piece.strip())]
    documents, pending = [], ""
    for piece in text.split("\n\n"):
        if not (paragraph := piece.strip()):
            continue
        pending = f"{pending}\n\n{paragraph}" if pending else paragraph
        if len(pending) >= MERGED_CHARACTERS:
            documents.append(pending)
            pending = ""
    return [*documents, pending] if pending else documents


def hold_out(documents: list[str], share: float, seed: int) -> tuple[list[str], list[str]]:
    """Split documents at random into training and held-out text, refusing what is too little to train on.

    At least `MIN_HELD_OUT` documents are held out, so that prompts do not all continue the same page.
    Training documents that repeat a held-out one word for word are dropped.
    """
    if (characters := sum(map(len, documents))) < MIN_CHARACTERS:
        raise InputError(
            f"the text is too short to train on: {characters:,} characters, at least {MIN_CHARACTERS:,} needed"
        )
    if len(documents) < MIN_DOCUMENTS:
        raise InputError(
            f"the text splits into {len(documents)} documents, at least {MIN_DOCUMENTS} needed; "
            "give the --separator that stands between its documents"
        )
    count = max(MIN_HELD_OUT, round(share * len(documents)))
    shuffled = random.Random(seed).sample(documents, len(documents))
    held_out = shuffled[:count]
    excluded = set(held_out)
    training = [document for document in shuffled if document not in excluded]
    if sum(map(len, training)) < MIN_CHARACTERS // 2:
        raise InputError("the text is too short to train on: most of it is held out, or repeats what is")
    return training, held_out


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` tokens that puts bos in front of every text by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BOS, EOS, PAD],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes: no text is unknown
            show_progress=False,
        ),
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise InputError(
            f"the text is too uniform to train on: only {tokenizer.get_vocab_size()} "
            f"of {vocab_size} tokens could be learnt from it"
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the two files from which `AutoTokenizer.from_pretrained` rebuilds the tokenizer.

    The configuration is written by hand because its class name must be one that every transformers release
    knows; release 5 would write a name that release 4 does not.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": CONTEXT,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def encode_documents(tokenizer: Tokenizer, documents: list[str]) -> list[list[int]]:
    """Token ids of every document, bos in front and eos behind.

    A text that spells out `</s>` means those four characters; only the tool itself may end a document.
    """
    tokenizer.encode_special_tokens = True
    encoded = [[*encoding.ids, EOS_ID] for encoding in tokenizer.encode_batch(documents)]
    tokenizer.encode_special_tokens = False
    return encoded


def token_stream(tokenizer: Tokenizer, documents: list[str]) -> TokenStream:
    """Lay all documents end to end and note where windows may begin."""
    ids: list[int] = []
    starts: list[int] = []
    for document_ids in encode_documents(tokenizer, documents):
        starts.extend(range(len(ids), len(ids) + len(document_ids), SHORT_WINDOW))
        ids.extend(document_ids)
    return TokenStream(torch.tensor(ids + ids[:CONTEXT]), torch.tensor(starts), len(ids))


def choose_prompts(tokenizer: Tokenizer, held_out: list[str], count: int, task: str, seed: int) -> list[dict]:
    """Beginnings of held-out documents, from 7 to 200 tokens in geometric steps, in random order.

    Very unequal lengths are the point: a batch of equal prompts hides every mistake in ragged bookkeeping.
    `n_tokens` does not count bos. Documents serve in turn, the longest prompts choosing first.
    """
    rng = random.Random(seed)
    encodings = [
        (document, tokenizer.encode(document, add_special_tokens=False))
        for document in held_out
        if not any(token in document for token in (BOS, EOS, PAD))
    ]
    uses = [0] * len(encodings)
    ratio = LONGEST_PROMPT / SHORTEST_PROMPT
    prompts: dict[str, dict] = {}
    for step in reversed(range(count)):
        wanted = round(SHORTEST_PROMPT * ratio ** (step / max(count - 1, 1)))
        fitting = [i for i, (_, encoding) in enumerate(encodings) if len(encoding.ids) > wanted]
        if not fitting:
            continue  # the held-out documents are all shorter; the next, shorter prompt may fit
        index = min(fitting, key=lambda i: (uses[i], rng.random()))
        document, encoding = encodings[index]
        text = document[: encoding.offsets[wanted - 1][1]].rstrip()
        # Cut inside a word, a text can be tokenized otherwise than the whole: count what it really has.
        n_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
        if SHORTEST_PROMPT <= n_tokens <= LONGEST_PROMPT and text not in prompts:
            uses[index] += 1
            prompts[text] = {"prompt": text, "task": task, "n_tokens": n_tokens}
    if not prompts:
        raise InputError("the held-out documents are too short for prompts; give another --separator")
    return rng.sample(list(prompts.values()), len(prompts))
