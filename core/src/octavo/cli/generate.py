"""`octavo generate MODEL PROMPT`: one answer on stdout, as it comes.

Owns how a prompt on the command line becomes a request: through the model's chat template where it
has one, as it stands with --raw. The engine runs in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo.cli.console import Stages, is_utf8
from octavo.cli.flags import add_flags, add_model, read
from octavo.cli.sampling_flags import add_sampling, read_sampling
from octavo.config import EngineConfig
from octavo.errors import ConfigError, OctavoError
from octavo.request import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.text.output import Logprob, RequestOutput

DEFAULTS: dict[str, Any] = {"max_tokens": 256}
"""What this command changes of SamplingParams: an answer of 16 tokens helps nobody at a prompt."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        usage="octavo generate MODEL PROMPT [options]",
        description="Answer one prompt and exit. The prompt goes through the model's chat template where it has one.",
    )
    add_model(parser, required=True)
    parser.add_argument("prompt", metavar="PROMPT", help="The text; `-` reads it from standard input.")
    parser.add_argument("--system", metavar="TEXT", help="System message of the chat template.")
    parser.add_argument("--raw", action="store_true", help="No chat template: the model continues the prompt.")
    parser.add_argument(
        "--json", action="store_true", help="Print text, token ids, counts and what --logprobs asks for as JSON, when done."
    )
    add_sampling(parser, **DEFAULTS)
    add_flags(parser, EngineConfig, skip=("seed",))  # --seed is the answer's, not the engine's
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    config, params = read(EngineConfig, args), read_sampling(args, **DEFAULTS)
    if args.raw and args.system is not None:
        raise ConfigError("--system: has no place in a --raw prompt; leave one of them out")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None and not args.json:
            raise ConfigError(f"--{name.replace('_', '-')}: its values are printed with --json alone; add that, or leave it out")
    try:
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"PROMPT: standard input is not text in {error.encoding}: {error.reason} at byte {error.start}"
        ) from error
    if not prompt.isprintable() and any(
        "\udc80" <= char <= "\udcff" for char in prompt
    ):  # how Python keeps bytes that it cannot read
        raise ConfigError(f"PROMPT: is not text in {sys.stdin.encoding or 'UTF-8'}: {prompt[:60]!r}")
    quiet_engine()
    asyncio.run(_generate(config, params, prompt, args))
    return 0


def quiet_engine() -> None:
    """Unless the user chose a level, the engine's process says only what is wrong."""
    os.environ.setdefault("OCTAVO_LOG_LEVEL", "warning")


async def _generate(config: EngineConfig, params: SamplingParams, text: str, args: argparse.Namespace) -> None:
    from octavo.engine.async_llm import AsyncLLM

    with Stages() as stages:
        llm = await AsyncLLM.start(config, on_progress=stages.update)
    try:
        prompt = text if args.raw else _templated(llm, text, args.system)
        if args.json or params.n > 1:
            await _whole(llm, prompt, params, as_json=args.json)
        else:
            async for piece in llm.generate(prompt, params, delta=True):
                print(piece.outputs[0].text if piece.outputs else "", end="", flush=True)
                check(piece)
            print()
    finally:
        await llm.close()


def _templated(llm: AsyncLLM, text: str, system: str | None) -> Any:
    """The prompt through the chat template, or as it is for a model that has none."""
    from octavo.text.chat import render_chat

    if llm.tokenizer.chat_template is None:
        if system is not None:
            raise ConfigError("--system: this model has no chat template; leave it out, or name a template with --chat-template")
        return text
    messages = [{"role": "system", "content": system}] if system is not None else []
    return render_chat(llm.tokenizer, [*messages, {"role": "user", "content": text}])


def check(output: RequestOutput) -> None:
    """OctavoError where the engine could not go on with a request: its logits were not finite, say."""
    if output.error:
        raise OctavoError(f"the answer failed: {output.error}")


async def _whole(llm: AsyncLLM, prompt: Any, params: SamplingParams, *, as_json: bool) -> None:
    last: RequestOutput | None = None
    async for output in llm.generate(prompt, params):
        last = output
        check(output)
    assert last is not None
    if not as_json:
        for sample in last.outputs:
            print(f"[{sample.index}] {sample.text}")
        return
    answers: list[dict[str, Any]] = [
        {"index": o.index, "text": o.text, "token_ids": list(o.token_ids), "finish_reason": o.finish_reason}
        | ({} if o.logprobs is None else {"logprobs": [_likely(token) for token in o.logprobs]})
        for o in last.outputs
    ]
    counts = {"prompt_tokens": len(last.prompt_token_ids), "completion_tokens": sum(len(o.token_ids) for o in last.outputs)}
    found: dict[str, Any] = {"outputs": answers, "usage": counts}
    if last.prompt_logprobs is not None:
        found["prompt_logprobs"] = [None if token is None else _likely(token) for token in last.prompt_logprobs]
    print(json.dumps(found, ensure_ascii=not is_utf8(sys.stdout)))


def _likely(candidates: Mapping[int, Logprob]) -> list[dict[str, Any]]:
    """One position's tokens, the one that stands there first."""
    return [{"token_id": token, "logprob": c.logprob, "text": c.decoded_token} for token, c in candidates.items()]
