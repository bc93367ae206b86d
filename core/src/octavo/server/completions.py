"""OpenAI's routes: chat completions, completions, responses and models.

Owns how their bodies become jobs; checks are in `protocol`, the run in `runs`, the JSON in `answers`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from octavo.engine.async_llm import AsyncLLM
from octavo.server import openapi
from octavo.server.answers import ChatAnswer, CompletionAnswer
from octavo.server.errors import ApiError
from octavo.server.generation import Job
from octavo.server.protocol import DEFAULT_COMPLETION_TOKENS, ChatRequest, CompletionRequest, conversation
from octavo.server.responses_answer import ResponsesAnswer
from octavo.server.responses_body import ResponsesRequest
from octavo.server.runs import body_of, check_samples, raw_jobs, resolve, run
from octavo.server.service import Service, State, principal
from octavo.server.tools import Tooling
from octavo.text.chat import render_chat

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/chat/completions", openapi_extra=openapi.body(ChatRequest))
async def chat_completions(request: Request, state: State) -> Response:
    """Answer a conversation."""
    body = await body_of(request, state, ChatRequest)
    model = state.model(body.model)
    tooling: Tooling | None = None

    async def prepare(llm: AsyncLLM) -> list[Job]:
        nonlocal tooling
        params = body.to_params()
        check_samples(1, params)
        tooling = body.tooling(llm, formed=params.grammar is not None)
        if tooling is not None and tooling.offered:
            special = params.skip_special_tokens and not tooling.format.control
            params = msgspec.structs.replace(params, grammar=tooling.grammar, skip_special_tokens=special)
        ids = await asyncio.to_thread(
            render_chat,
            llm.tokenizer,
            conversation(body.messages),
            add_generation_prompt=body.add_generation_prompt is not False,
            tools=None if tooling is None else tooling.shown,
            template_kwargs=body.chat_template_kwargs,
        )
        return [Job(ids, None, resolve(ids, params, llm.info))]

    def shape(request_id: str, jobs: list[Job], llm: AsyncLLM) -> ChatAnswer:
        return ChatAnswer(request_id, model, jobs, llm.tokenizer, body, tooling)

    return await run(request, state, body, prepare, shape)


@router.post("/completions", openapi_extra=openapi.body(CompletionRequest))
async def completions(request: Request, state: State) -> Response:
    """Continue text or token ids."""
    body = await body_of(request, state, CompletionRequest)
    model = state.model(body.model)

    async def prepare(llm: AsyncLLM) -> list[Job]:
        return await raw_jobs(
            llm,
            body.prompt,
            body.to_params(),
            add_special=body.add_special_tokens is not False,
            default_tokens=DEFAULT_COMPLETION_TOKENS,
        )

    return await run(
        request, state, body, prepare, lambda rid, jobs, llm: CompletionAnswer(rid, model, jobs, llm.tokenizer, body)
    )


@router.post("/responses", openapi_extra=openapi.body(ResponsesRequest))
async def responses(request: Request, state: State) -> Response:
    """Answer a conversation, in the shape of OpenAI's newer protocol. Nothing is stored."""
    body = await body_of(request, state, ResponsesRequest)
    model = state.model(body.model)

    async def prepare(llm: AsyncLLM) -> list[Job]:
        params = body.to_params()
        ids = await asyncio.to_thread(lambda: render_chat(llm.tokenizer, body.conversation(), add_generation_prompt=True))
        return [Job(ids, None, resolve(ids, params, llm.info))]

    return await run(request, state, body, prepare, lambda rid, jobs, llm: ResponsesAnswer(rid, model, jobs, llm.tokenizer, body))


@router.post("/embeddings", include_in_schema=False)
async def embeddings() -> Response:
    """Known by name, so that a client learns why."""
    raise ApiError(400, "The models of this server generate text; none makes embeddings.", code="unsupported")


def _card(state: Service, name: str) -> dict[str, Any]:
    limit = state.engine(name).info.max_model_len
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "octavo",
        "root": state.models.find(name).name,
        "max_model_len": limit,
    }


@router.get("/models")
async def models(request: Request, state: State) -> dict[str, Any]:
    """The served names that the caller may use."""
    state.engine(None)  # 503 while nothing serves
    names = filter(principal(request).may_use, state.names)
    return {"object": "list", "data": [_card(state, name) for name in names if state.models.find(name).present]}


@router.get("/models/{name:path}")
async def model(name: str, request: Request, state: State) -> dict[str, Any]:
    """One served name; names may contain slashes."""
    if not name:
        raise HTTPException(404)
    principal(request).check_model(state.model(name))
    return _card(state, state.model(name))
