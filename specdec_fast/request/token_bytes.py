"""The bytes of every token of a tokenizer, so that tokens of two tokenizers can be compared and cut exactly."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from specdec_fast.request.token_decoders import steps_of

_SPACE = "\u2581"  # SentencePiece's mark for a space
_NO_FIRST_BYTES = {0xC0, 0xC1, *range(0xF5, 0x100)}  # of a character, although their bits look so
_BYTE_TOKENS = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}  # of byte fallback


def bytes_of_tokens(tokenizer: Any) -> dict[int, bytes] | None:
    """Return the UTF-8 bytes of every token that stands for text, in the order of ids; None if the kind is not known.

    Known are fast tokenizers of transformers over bytes (GPT-2, Llama 3, Qwen), and those of SentencePiece, which mark
    spaces (Llama 2, Gemma). Special tokens stand for no text. A token may be part of a character.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder()
    words = {word: token for word, token in backend.get_vocab(with_added_tokens=True).items() if token not in added}
    found = _decoded(words, steps_of(backend.decoder))
    if found is None:
        return None
    for token, each in added.items():
        if not each.special:
            found[token] = each.content.encode(errors="ignore")
    return {token: text for token, text in sorted(found.items()) if text}  # a vocabulary comes in any order


def character_length(first: int) -> int:
    """Return how many bytes a character of UTF-8 has that begins with this byte, of those with more than one."""
    return 2 + (first >= 0xE0) + (first >= 0xF0)


def complete(text: bytes) -> int:
    """Return how many bytes of a UTF-8 text there are without a character at its end that further bytes may complete.

    Bytes of no character count as whole.
    """
    for behind in range(1, min(3, len(text)) + 1):
        byte = text[-behind]
        if byte < 0x80:
            break
        if byte >= 0xC0:  # the first byte of a character, but for those that UTF-8 never has
            length = 0 if byte in _NO_FIRST_BYTES else character_length(byte)
            return len(text) - (behind if behind < length else 0)
    return len(text)


def _decoded(words: dict[str, int], steps: list[dict[str, Any]]) -> dict[int, bytes] | None:
    names = {step["type"] for step in steps}
    if "ByteLevel" in names:
        of = _bytes_of_marks()
        known = {token: word for word, token in words.items() if all(mark in of for mark in word)}
        return {token: bytes(of[mark] for mark in word) for token, word in known.items()}
    replaces_mark = any(
        step["type"] == "Replace" and step["pattern"].get("String") == _SPACE and step["content"] == " "
        for step in steps
    )
    marks_spaces = replaces_mark or any(step["type"] == "Metaspace" and step["replacement"] == _SPACE for step in steps)
    if not marks_spaces:
        return None
    byte_tokens = _BYTE_TOKENS if "ByteFallback" in names else {}
    return {
        token: byte_tokens.get(word) or word.replace(_SPACE, " ").encode(errors="ignore")
        for word, token in words.items()
    }


def _bytes_of_marks() -> dict[str, int]:
    """Return the byte for which each character of a byte-level vocabulary stands.

    Printable characters of Latin-1 stand for their own codes, the characters from 256 on for the other bytes in turn.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}
