"""Log-probabilities in the shapes of the OpenAI API.

Owns the two formats (chat and completions) and the text offsets of a prompt. Never decides whether
they were asked for. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.request import TokenLogprobs
from octavo.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""JSON has no -inf: a token that could not happen gets this."""


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat choice: per token {token, logprob, bytes, top_logprobs}; top_logprobs has the
    `top` best, [] for 0. bytes are the token's own, which need not be valid UTF-8."""
    return [
        {
            **_chat(tokenizer, entry.token, entry.logprob),
            "top_logprobs": [_chat(tokenizer, t, v) for t, v in zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True)],
        }
        for entry in entries
    ]


def completion_logprobs(
    tokenizer: Tokenizer,
    entries: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
    top: int,
    *,
    shift: int = 0,
    first: int = 0,
) -> dict[str, Any]:
    """`logprobs` of a completion choice: tokens, token_logprobs, top_logprobs, text_offset.

    offsets are those of the entries in their own text; `shift` (the prompt's length in characters) is
    added, because text_offset counts from the start of the prompt. The chosen token is always among
    top_logprobs. An entry of None (a prompt's first token, whose id is `first`) has no values.
    """  # fmt: skip
    names = [_name(tokenizer, first if entry is None else entry.token) for entry in entries]
    return {
        "tokens": names,
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            None if entry is None else _named(tokenizer, entry, top, name) for entry, name in zip(entries, names, strict=True)
        ],
        "text_offset": [offset + shift for offset in offsets],
    }


def prompt_offsets(tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> tuple[list[int], int]:
    """Where each prompt token starts in the prompt's text, in characters, and the length of that text."""
    stream = tokenizer.stream((), skip_special_tokens=skip_special_tokens)
    offsets, at = [], 0
    for token in prompt:
        offsets.append(at)
        at += len(stream.push(token))
    return offsets, at + len(stream.flush())


def _chat(tokenizer: Tokenizer, token: int, value: float) -> dict[str, Any]:
    return {"token": tokenizer.token_text(token), "logprob": _finite(value), "bytes": list(tokenizer.token_bytes(token))}


def _named(tokenizer: Tokenizer, entry: TokenLogprobs, top: int, name: str) -> dict[str, float]:
    named = {name: _finite(entry.logprob)}
    for token, value in zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True):
        named.setdefault(_name(tokenizer, token), _finite(value))
    return named


def _name(tokenizer: Tokenizer, token: int) -> str:
    """The token's text; where that is no text, its bytes written out, so that two tokens keep two names."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(value: float) -> float:
    return max(value, LOWEST)
