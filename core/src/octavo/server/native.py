"""Octavo's own routes: liveness, load, metrics, versions, tokenizer and /generate.

Owns their shapes. Liveness routes must answer while everything else is busy: nothing here computes
on the event loop.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

import octavo
from octavo.engine.async_llm import AsyncLLM
from octavo.server import openapi
from octavo.server.answers import GenerateAnswer
from octavo.server.clients import Connected
from octavo.server.errors import ApiError
from octavo.server.generation import Job
from octavo.server.logprobs import token_name
from octavo.server.native_bodies import DetokenizeRequest, GenerateRequest, TokenizeRequest
from octavo.server.protocol import DEFAULT_COMPLETION_TOKENS, conversation
from octavo.server.runs import body_of, raw_jobs, run
from octavo.server.service import Service, State, principal
from octavo.server.tools import template_tools
from octavo.text.chat import render_chat

router = APIRouter()
_encode = msgspec.json.Encoder().encode


@router.head("/health", include_in_schema=False)
@router.get("/health", tags=["liveness"])
async def health(state: State) -> Response:
    """Empty 200 while the server is worth keeping, also while it drains or an engine starts again after a
    crash; 503 until the first model serves, once an engine is given up, and while one that hung is replaced."""
    return Response(status_code=200 if state.alive else 503)


@router.head("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
@router.get("/ping", tags=["liveness"])
async def ping(state: State) -> Response:
    """The same as /health, under the name that SageMaker asks for."""
    return Response(status_code=200 if state.alive else 503)


@router.head("/ready", include_in_schema=False)
@router.get("/ready", tags=["liveness"])
async def ready(state: State) -> Response:
    """200 when new requests are taken; 503 while loading, starting again, draining or dead."""
    return Response(status_code=200 if state.ready else 503)


@router.get("/version", tags=["state"])
async def version() -> dict[str, str]:
    """The version of this server."""
    return {"version": octavo.__version__}


@router.get("/load", tags=["state"])
async def load(state: State) -> dict[str, Any]:
    """HTTP requests being answered, sequences running and waiting, and the used part of the fullest KV cache."""
    return state.load()


@router.get("/metrics", tags=["state"])
async def metrics(request: Request, state: State) -> Response:
    """Prometheus' text format. A tenant sees its own share alone, an admin key everybody's."""
    await asyncio.to_thread(state.gpus.read)  # so that the page finds a fresh look and does not wait for the driver
    caller = principal(request)
    page = state.metrics.render(only=None if caller.admin else caller.tenant)
    return Response(page, media_type=CONTENT_TYPE_LATEST)


@router.post("/generate", tags=["generation"], openapi_extra=openapi.body(GenerateRequest))
async def generate(request: Request, state: State) -> Response:
    """Continue prompts, with a short answer."""
    body = await body_of(request, state, GenerateRequest)
    model = state.model(body.model)

    async def prepare(llm: AsyncLLM) -> list[Job]:
        return await raw_jobs(llm, body.prompt, body.to_params(), default_tokens=DEFAULT_COMPLETION_TOKENS)

    return await run(request, state, body, prepare, lambda rid, jobs, llm: GenerateAnswer(rid, model, jobs))


def _tokenizer_of(request: Request, state: Service, name: str | None) -> AsyncLLM:
    """The engine whose tokenizer a request wants. Raises what refuses it."""
    principal(request).check_model(state.model(name))
    return state.open(name)


@router.post("/tokenize", tags=["tokenizer"], openapi_extra=openapi.body(TokenizeRequest))
async def tokenize(request: Request, state: State) -> Response:
    """Token ids of a text or of a conversation."""
    body = await body_of(request, state, TokenizeRequest)
    llm = _tokenizer_of(request, state, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: send either `prompt` or `messages`", param="prompt", code="invalid_value")
    with principal(request).quota.enter():
        async with Connected(request.receive):
            answer = await asyncio.to_thread(_tokenized, llm, body)
    return Response(answer, media_type="application/json")


def _tokenized(llm: AsyncLLM, body: TokenizeRequest) -> bytes:
    """The answer's JSON: a long text has millions of tokens, and none of this is for the event loop."""
    ids = _ids(llm, body)
    names = [token_name(llm.tokenizer, i) for i in ids] if body.return_token_strs else None
    return _encode({"count": len(ids), "max_model_len": llm.info.max_model_len, "tokens": ids, "token_strs": names})


def _ids(llm: AsyncLLM, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        return llm.tokenizer.encode(body.prompt or "", add_special=body.add_special_tokens is not False)
    return render_chat(
        llm.tokenizer,
        conversation(body.messages),
        add_generation_prompt=body.add_generation_prompt is not False,
        tools=template_tools(body.tools, llm),
        template_kwargs=body.chat_template_kwargs,
    )


@router.post("/detokenize", tags=["tokenizer"], openapi_extra=openapi.body(DetokenizeRequest))
async def detokenize(request: Request, state: State) -> dict[str, Any]:
    """The text of token ids, control tokens included."""
    body = await body_of(request, state, DetokenizeRequest)
    llm = _tokenizer_of(request, state, body.model)
    with principal(request).quota.enter():
        async with Connected(request.receive):
            text = await asyncio.to_thread(_text, llm, body.tokens)
    return {"prompt": text}


def _text(llm: AsyncLLM, tokens: list[int]) -> str:
    vocab = llm.info.vocab_size
    wrong = next((i for i in tokens if not 0 <= i < vocab), None)
    if wrong is not None:
        raise ApiError(400, f"tokens: {wrong} is outside the vocabulary [0, {vocab})", param="tokens", code="invalid_value")
    return llm.tokenizer.decode(tokens, skip_special_tokens=False)
