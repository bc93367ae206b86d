"""`octavo chat MODEL`: a conversation in the terminal, with an engine of its own or, by --url, a server's.

Owns the loop: read a line, stream the answer, keep both. Ctrl-C stops an answer; at the prompt it
ends the conversation, as Ctrl-D does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any, Protocol

from octavo.cli.console import Stages
from octavo.cli.flags import add_flags, add_model, read
from octavo.cli.generate import check, quiet_engine
from octavo.cli.sampling_flags import add_sampling, read_sampling
from octavo.config import EngineConfig
from octavo.errors import ConfigError, OctavoError, RequestError
from octavo.request import SamplingParams

Messages = list[dict[str, str]]

DEFAULTS: dict[str, Any] = {"max_tokens": None}
"""What this command changes of SamplingParams: an answer may take what the context leaves."""

UNSEEN = ("n", "best_of", "logprobs", "prompt_logprobs")
"""Fields whose outcome a conversation has no place for."""

HELP = "Ctrl-C stops an answer, /new forgets the conversation, Ctrl-D or /exit leaves."


class Talk(Protocol):
    """Something that answers a conversation piece by piece."""

    def answer(self, messages: Messages) -> AsyncIterator[str]: ...

    async def close(self) -> None: ...


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chat",
        usage="octavo chat [MODEL] [--url URL] [options]",
        description=f"Talk to a model in the terminal. {HELP}",
    )
    add_model(parser)
    parser.add_argument(
        "--url", metavar="URL", help="Talk to the server at this address instead; MODEL is then its name for the model."
    )
    parser.add_argument("--api-key", dest="client_key", metavar="TEXT", help="Key for --url; default is OPENAI_API_KEY.")
    parser.add_argument("--system", metavar="TEXT", help="System message.")
    add_sampling(parser, skip=UNSEEN, **DEFAULTS)
    add_flags(parser, EngineConfig, skip=("seed",))
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    params = read_sampling(args, **DEFAULTS)
    config = read(EngineConfig, args)
    with asyncio.Runner() as runner:
        talk = runner.run(_remote(args, params) if args.url else _local(config, params))
        try:
            return _converse(runner, talk, args.system)
        finally:
            runner.run(talk.close())


def _converse(runner: asyncio.Runner, talk: Talk, system: str | None) -> int:
    start: Messages = [{"role": "system", "content": system}] if system is not None else []
    messages = list(start)
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing in input())
        print(HELP, file=sys.stderr)
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except EOFError:
            if terminal:
                print()  # what comes next begins a line
            return 0
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input is not text in {error.encoding}: {error.reason} at byte {error.start}") from error
        if line == "/new":
            messages = list(start)
        elif line in ("/exit", "/quit"):
            return 0
        elif line == "/help":
            print(HELP, file=sys.stderr)
        elif line.startswith("/"):
            print(f"no command {line.split()[0]!r}. {HELP}", file=sys.stderr)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(runner, talk, messages)
            if answer:
                messages.append({"role": "assistant", "content": answer})
            else:
                messages.pop()


def _answer(runner: asyncio.Runner, talk: Talk, messages: Messages) -> str:
    """Stream one answer to stdout and return what came of it, all or the part before Ctrl-C or an error."""
    pieces: list[str] = []

    async def stream() -> None:
        async for piece in talk.answer(messages):
            pieces.append(piece)
            print(piece, end="", flush=True)

    try:
        runner.run(stream())
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except RequestError as error:
        hint = " (/new starts afresh)" if error.code == "context_length_exceeded" else ""
        print(f"octavo: {error.message}{hint}", file=sys.stderr)
    print()
    return "".join(pieces)


class _Local:
    """An engine in a process of its own."""

    def __init__(self, llm: Any, params: SamplingParams) -> None:
        self._llm, self._params = llm, params

    async def answer(self, messages: Messages) -> AsyncIterator[str]:
        from octavo.text.chat import render_chat

        prompt = render_chat(self._llm.tokenizer, messages)
        async with contextlib.aclosing(self._llm.generate(prompt, self._params, delta=True)) as pieces:
            async for piece in pieces:
                if piece.outputs:
                    yield piece.outputs[0].text
                check(piece)

    async def close(self) -> None:
        await self._llm.close()


async def _local(config: EngineConfig, params: SamplingParams) -> Talk:
    from octavo.engine.async_llm import AsyncLLM

    quiet_engine()
    with Stages() as stages:
        llm = await AsyncLLM.start(config, on_progress=stages.update)
    if llm.tokenizer.chat_template is None:
        await llm.close()
        raise ConfigError(f"{config.model} has no chat template; name one with --chat-template, or use `octavo generate --raw`")
    return _Local(llm, params)


class _Remote:
    """A server that speaks OpenAI's chat completions."""

    def __init__(self, client: Any, model: str, params: SamplingParams) -> None:
        import msgspec

        self._client, self._model = client, model
        # Only what the user changed travels: other servers do not know every field.
        self._fields = {k: v for k, v in msgspec.to_builtins(params, str_keys=True).items() if v is not None}

    async def answer(self, messages: Messages) -> AsyncIterator[str]:
        import httpx

        body = self._fields | {"model": self._model, "messages": messages, "stream": True}
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if line.startswith("data:") and (text := _piece(line[5:].strip())):
                        yield text
        except httpx.ConnectError as error:
            raise OctavoError(f"--url {self._client.base_url}: nobody answers there ({error}); is the server running?") from error
        except httpx.HTTPError as error:
            raise OctavoError(f"--url {self._client.base_url}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        await self._client.aclose()


async def _remote(args: argparse.Namespace, params: SamplingParams) -> Talk:
    import httpx

    from octavo.bench.serve import served_model

    url = args.url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {args.url}: must begin with http:// or https://, as in http://127.0.0.1:8000")
    key = args.client_key or os.environ.get("OPENAI_API_KEY")
    model = args.positional_model or await asyncio.to_thread(served_model, url, key)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return _Remote(httpx.AsyncClient(base_url=url, headers=headers, timeout=600), model, params)


def _piece(data: str) -> str:
    if data == "[DONE]":
        return ""
    chunk = json.loads(data)
    if "error" in chunk:
        raise OctavoError(f"the server ended the answer: {chunk['error'].get('message', chunk['error'])}")
    return "".join(choice.get("delta", {}).get("content") or "" for choice in chunk.get("choices", ()))


def _refusal(status: int, body: bytes) -> OctavoError:
    try:
        error = json.loads(body)["error"]
        return RequestError(f"HTTP {status}: {error['message']}", param=error.get("param"), code=error.get("code"))
    except (ValueError, LookupError, TypeError):
        return OctavoError(f"HTTP {status}")
