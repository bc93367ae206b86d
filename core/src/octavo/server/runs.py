"""The run of one generating request: body, limits, prompt, generation, answer, in that order.

Owns the steps that every generating route shares, so that each has the same checks, the same watch
over its client, and the same account in log and metrics. A route supplies its prompts and its shape.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.async_llm import AsyncLLM
from octavo.errors import AdmissionRefused, RequestError
from octavo.request import ModelInfo, SamplingParams, check_request
from octavo.server.clients import ClientGone, Connected, EventStream
from octavo.server.errors import ApiError, DeadlineExceeded, to_api_error
from octavo.server.formats import Formed
from octavo.server.generation import Generation, Job
from octavo.server.limits import MAX_PROMPT_VALUES, MAX_PROMPTS, MAX_SAMPLES, read_body
from octavo.server.pace import Rank
from octavo.server.protocol import MAX_DEADLINE, Sampling, prompts
from octavo.server.service import Service, principal
from octavo.server.tenant_file import Limits
from octavo.server.wire import SMALL, Wire, parse
from octavo.text.output import RequestOutput

M = TypeVar("M", bound=Wire)
_MANY_IDS = 4096  # of prompts, which an answer may have to spell out
_MANY_VALUES = 1000  # of an answer: about a millisecond of work
_encode = msgspec.json.Encoder().encode


class Shape(Protocol):
    """How one endpoint spells its answers."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]: ...
    def frames(self, deltas: AsyncIterator[tuple[int, RequestOutput]]) -> AsyncIterator[bytes]: ...


async def body_of(request: Request, state: Service, model: type[M], *, optional: bool = False) -> M:
    """The request's body as `model`, in this request's turn; optional: none at all is an empty object. Raises ApiError."""
    body = await read_body(request, state.config.max_body_bytes, state.config.body_timeout)
    if optional and not body.strip():
        body = b"{}"
    request.scope["octavo.waited"] += await state.pace.turn(Rank.COMPLETE)
    return parse(model, body) if len(body) <= SMALL else await asyncio.to_thread(parse, model, body)


async def run(
    request: Request,
    state: Service,
    body: Sampling,
    prepare: Callable[[AsyncLLM], Awaitable[list[Job]]],
    shape: Callable[[str, list[Job], AsyncLLM], Shape],
) -> Response:
    """Generate and answer. `prepare` makes the prompts (off the event loop where that takes time); `shape`
    gets the request's id, the jobs and the engine. The model is held from here to the answer's end, so
    that nothing takes it away in between. Raises what `errors.to_api_error` knows, before an answer begins."""
    caller = principal(request)
    caller.check_model(state.model(body.model))
    lease = state.lease(body.model)
    llm, record = lease.llm, state.record(request, lease)
    request.scope["octavo.model"] = lease.model.name
    if state.config.log_requests_on_error:
        record.prompt = lambda: _asked(body)
    generation = None
    streaming = False
    try:
        place = caller.quota.enter()
        record.at_end.append(lambda _: place.close())
        priority, deadline = state.priority(body.priority, request, llm), deadline_of(body, request)
        async with Connected(request.receive):
            try:
                jobs = within(await prepare(llm), body, caller.limits)
            except RequestError as exc:
                raise _in_their_words(exc, body) from exc
            ids = sum(len(job.ids) for job in jobs)
            caller.quota.admit_prompt(ids)
            generation = Generation(
                llm,
                jobs,
                record,
                priority=priority,
                deadline=_left(deadline, record.arrived),
                caller=caller,
                domain=_domain(caller.domain, body.cache_salt),
                delta=bool(body.stream),
            )
            form = shape(record.id, jobs, llm) if ids < _MANY_IDS else await asyncio.to_thread(shape, record.id, jobs, llm)
            await generation.start()
            outputs = [] if body.stream else await generation.last()
        if body.stream:
            streaming = True
            return EventStream(form.frames(generation.deltas()), generation, record)
        return Response(await _written(form, outputs), media_type="application/json")
    except ClientGone:
        record.outcome = "disconnected"
        raise
    except Exception as exc:
        error = to_api_error(_about_form(exc, body), record.id)
        record.fail(error.code, exc)
        raise error from exc
    finally:
        if not streaming:
            if generation is not None:
                await generation.close()
            record.close()


def _in_their_words(error: RequestError, body: Sampling) -> RequestError:
    """The error with the name that this body's protocol has for the field at fault."""
    ours, theirs = error.param, body.rename(error.param)
    message = f"{theirs}:{error.message[len(ours) + 1 :]}" if ours and error.message.startswith(f"{ours}:") else error.message
    return RequestError(message, param=theirs, code=error.code)


def _about_form(error: Exception, body: Sampling) -> Exception:
    """An engine's refusal of a grammar knows no field of the client's."""
    if not isinstance(error, AdmissionRefused) or error.code != "invalid_grammar":
        return error
    form = body.form() if isinstance(body, Formed) else None
    param = form[0] if form else "tools" if getattr(body, "tools", None) else None
    return ApiError(400, f"{param}: {error.message}" if param else error.message, param=param, code=error.code)


async def _written(form: Shape, outputs: Sequence[RequestOutput]) -> bytes:
    """The whole answer's JSON, made off the event loop where it has many values."""
    if sum(map(_values, outputs)) <= _MANY_VALUES:
        return _encode(form.whole(outputs))
    return await asyncio.to_thread(lambda: _encode(form.whole(outputs)))


def _values(output: RequestOutput) -> int:
    """About how many objects an answer has."""
    entries = [entry for sample in output.outputs for entry in sample.token_logprobs or ()]
    prompt = output.prompt_token_logprobs or ()
    each = len(entries[0].top_ids) if entries else len(prompt[-1].top_ids) if prompt and prompt[-1] is not None else 0
    return (len(entries) + len(prompt)) * (1 + each)


def _asked(body: Sampling) -> str:
    """The prompt or the messages of a failed request as the client sent them, for a log that was asked to hold them."""
    return repr(next((found for name in ("prompt", "messages", "input") if (found := getattr(body, name, None))), None))


def deadline_of(body: Sampling, request: Request) -> float | None:
    """Seconds that the whole answer may take, from the body or the header `x-octavo-deadline`. Raises ApiError."""
    header = request.headers.get("x-octavo-deadline")
    if body.deadline is not None or header is None:
        return body.deadline
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_DEADLINE:
        name = "x-octavo-deadline"
        message = f"{name}: must be seconds above 0 and at most {MAX_DEADLINE}, got {header[:40]!r}"
        raise ApiError(400, message, param=name, code="invalid_value")
    return seconds


def _left(deadline: float | None, arrived: float) -> float | None:
    """What tokenising has left of a deadline. Raises DeadlineExceeded."""
    if deadline is None:
        return None
    left = deadline - (time.perf_counter() - arrived)
    if left <= 0:
        raise DeadlineExceeded
    return left


def within(jobs: list[Job], body: Sampling, limits: Limits) -> list[Job]:
    """The jobs as far as the caller's own limits allow: what was asked for beyond them raises ApiError, what was
    left to us is cut down to them."""
    most, longest = limits.max_tokens, limits.max_input_tokens
    if longest is not None and (length := max(len(job.ids) for job in jobs)) > longest:
        raise _beyond(body.rename("prompt"), f"{length} tokens are more than", "max_input_tokens", longest)
    if most is None:
        return jobs
    if body.asked_tokens is not None and body.asked_tokens > most:
        raise _beyond(body.rename("max_tokens"), f"{body.asked_tokens} is more than", "max_tokens", most)
    if (body.min_tokens or 0) > most:
        raise _beyond("min_tokens", f"{body.min_tokens} is more than", "max_tokens", most)
    return [Job(job.ids, job.text, _shortened(job.params, most)) for job in jobs]


def _shortened(params: SamplingParams, most: int) -> SamplingParams:
    return msgspec.structs.replace(params, max_tokens=min(params.max_tokens or most, most))


def _beyond(param: str | None, what: str, limit: str, most: int) -> ApiError:
    return ApiError(400, f"{param}: {what} this key's limit {limit} of {most}", param=param, code="limit_exceeded")


def _domain(domain: str, salt: str | None) -> str:
    """A client's salt can only narrow the sharing that its key allows."""
    return domain if salt is None else f"{domain}/{hashlib.sha256(salt.encode()).hexdigest()}"


async def raw_jobs(
    llm: AsyncLLM, prompt: Any, params: SamplingParams, *, add_special: bool = True, default_tokens: int | None = None
) -> list[Job]:
    """The jobs of a completion body's `prompt`, each checked against the model. Raises ApiError, RequestError.

    default_tokens: max_tokens where the client gave none, as far as the context allows.
    """
    given = prompts(prompt)
    check_samples(len(given), params)
    jobs = []
    for i, item in enumerate(given):
        text = item if isinstance(item, str) else None
        ids = await llm.encode(item, add_special=add_special) if isinstance(item, str) else item
        try:
            jobs.append(Job(ids, text, resolve(ids, params, llm.info, default_tokens)))
        except RequestError as exc:
            if len(given) == 1 or not (exc.param == "prompt" or exc.code == "context_length_exceeded"):
                raise
            raise RequestError(f"{exc.message} (prompt {i} of the list)", param=exc.param, code=exc.code) from exc
    return jobs


def resolve(ids: list[int], params: SamplingParams, info: ModelInfo, default_tokens: int | None = None) -> SamplingParams:
    """`params` for this prompt, max_tokens filled in. Raises RequestError."""
    if params.max_tokens is None and default_tokens is not None:
        room = max(info.max_model_len - len(ids), 1)
        params = msgspec.structs.replace(params, max_tokens=min(max(default_tokens, params.min_tokens), room))
    values = 0 if params.prompt_logprobs is None else len(ids) * (1 + params.prompt_logprobs)
    if values > MAX_PROMPT_VALUES:
        raise RequestError(
            f"prompt_logprobs: {len(ids)} prompt tokens with {params.prompt_logprobs} alternatives each are {values} values, more "
            f"than the {MAX_PROMPT_VALUES} of one prompt",
            param="prompt_logprobs",
            code="invalid_value",
        )
    return check_request(ids, params, info)


def check_samples(count: int, params: SamplingParams) -> None:
    """Raises ApiError when one request asks for too many sequences."""
    if count > MAX_PROMPTS:
        raise ApiError(
            400, f"prompt: at most {MAX_PROMPTS} prompts in one request, got {count}", param="prompt", code="invalid_value"
        )
    if count * params.samples > MAX_SAMPLES:
        raise ApiError(
            400,
            f"n: {count} prompts x {params.samples} samples are more than the {MAX_SAMPLES} of one request",
            param="n",
            code="invalid_value",
        )
