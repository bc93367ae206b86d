"""Log-probabilities as OpenAI's two protocols spell them.

Owns the JSON of token values. A token's name is its text, or `bytes:` and its bytes where it is only
part of a character, so that no two tokens share a name by accident. JSON has no infinity: what has
probability zero is -9999.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.request import TokenLogprobs
from octavo.text.tokenizer import Tokenizer

LOWEST = -9999.0


def token_name(tokenizer: Tokenizer, token: int) -> str:
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer, for the entries given."""

    def candidate(token: int, value: float) -> dict[str, Any]:
        return {
            "token": token_name(tokenizer, token),
            "logprob": max(value, LOWEST),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    content = []
    for entry in entries:
        top = [candidate(token, value) for token, value in zip(entry.top_ids, entry.top_logprobs, strict=True)]
        content.append({**candidate(entry.token, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None], offsets: Sequence[int]
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion: `tokens[i]` begins `offsets[i]` characters after the start of the
    prompt. An entry is None for the first token of a prompt, whose value nothing predicts."""
    top: list[dict[str, float] | None] = []
    for entry in entries:
        if entry is None:
            top.append(None)
            continue
        values = {token_name(tokenizer, entry.token): max(entry.logprob, LOWEST)}
        for token, value in zip(entry.top_ids, entry.top_logprobs, strict=True):
            values.setdefault(token_name(tokenizer, token), max(value, LOWEST))
        top.append(values)
    return {
        "tokens": [token_name(tokenizer, token) for token in tokens],
        "token_logprobs": [None if entry is None else max(entry.logprob, LOWEST) for entry in entries],
        "top_logprobs": top,
        "text_offset": list(offsets),
    }


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """The `prompt_logprobs` extension, vLLM's shape: per prompt token, id -> value, rank and text."""

    def candidates(entry: TokenLogprobs) -> dict[str, Any]:
        rows = {entry.token: (entry.logprob, entry.rank)}
        for rank, (token, value) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
            rows.setdefault(token, (value, rank))
        return {
            str(token): {"logprob": max(value, LOWEST), "rank": rank, "decoded_token": tokenizer.token_text(token)}
            for token, (value, rank) in rows.items()
        }

    return [None if entry is None else candidates(entry) for entry in entries]


def prompt_offsets(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """Where each prompt token begins in the prompt's text. A begin-of-sequence token that the text does not
    spell out takes no room."""
    hidden = bool(tokens) and tokens[0] == tokenizer.bos_id and not text.startswith(tokenizer.bos_text or "\0")
    stream = tokenizer.stream((), skip_special_tokens=False)
    offsets, at = [], 0
    for i, token in enumerate(tokens):
        offsets.append(min(at, len(text)))
        if not (hidden and i == 0):
            at += len(stream.push(token))
    return offsets
