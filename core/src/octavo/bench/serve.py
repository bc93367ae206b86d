"""Load on any OpenAI-compatible address: requests at a rate, latencies, errors, goodput.

Owns the client side of a serving measurement. Bounded in requests, connections and time; an error
is counted and named, never retried and never part of a latency.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from octavo.bench.latency import Timeline, report
from octavo.bench.record import surroundings
from octavo.bench.workloads import Ask
from octavo.errors import ConfigError, OctavoError

Tell = Callable[..., None]
"""tell(stage, done=0, total=0)"""

WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
]


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent where. rate: requests a second with exponential gaps (infinite: all at once).
    goodput: limits in milliseconds by "ttft", "tpot" and "e2el"; a request is good if it keeps all."""

    base_url: str
    model: str
    asks: Sequence[Ask]
    endpoint: str = "/v1/completions"
    rate: float = float("inf")
    concurrency: int = 256
    timeout: float = 600.0
    api_key: str | None = None
    temperature: float = 1.0
    ignore_eos: bool = True
    seed: int = 0
    goodput: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    """One request's fate: a timeline, or an error's kind. `prompt_tokens` is what the server counted."""

    timeline: Timeline
    prompt_tokens: int = 0
    error: str | None = None
    finished: float = 0.0


def measure(load: Load, tell: Tell = lambda *_: None) -> dict[str, Any]:
    """Send the load and return the whole record. Raises OctavoError if nobody answers at the address."""
    record = surroundings()
    answers, wall = asyncio.run(_run(load, tell))
    good = [a for a in answers if a.error is None]
    errors = Counter(a.error for a in answers if a.error is not None)
    output = sum(a.timeline.tokens for a in good)
    return record | {
        "benchmark": "serve",
        "settings": {
            "base_url": load.base_url,
            "endpoint": load.endpoint,
            "model": load.model,
            "request_rate": load.rate if load.rate != float("inf") else "inf",
            "max_concurrency": load.concurrency,
            "num_prompts": len(load.asks),
            "prompt_tokens_asked": sum(len(a.prompt) for a in load.asks),
            "output_tokens_asked": sum(a.output for a in load.asks),
            "temperature": load.temperature,
            "ignore_eos": load.ignore_eos,
            "seed": load.seed,
        },
        "wall_s": round(wall, 4),
        "completed": len(good),
        "errors": {"count": sum(errors.values()), "kinds": dict(errors)},
        "requests_per_s": round(len(good) / wall, 3),
        "input_tok_s": round(sum(a.prompt_tokens for a in good) / wall, 3),
        "output_tok_s": round(output / wall, 3),
        "prompt_tokens": sum(a.prompt_tokens for a in good),
        "output_tokens": output,
        "latency": report([a.timeline for a in good]),
        "goodput": _goodput(load, good, wall),
    }


def _goodput(load: Load, answers: Sequence[Answer], wall: float) -> dict[str, Any] | None:
    """Requests a second that kept every limit."""
    if not load.goodput:
        return None

    def kept(t: Timeline) -> bool:
        seen = {"ttft": t.ttft, "tpot": t.tpot or 0.0, "e2el": t.e2e}
        return all(seen[name] * 1000 <= limit for name, limit in load.goodput.items())

    count = sum(kept(a.timeline) for a in answers)
    return {"limits_ms": load.goodput, "requests": count, "requests_per_s": round(count / wall, 3)}


async def _run(load: Load, tell: Tell) -> tuple[list[Answer], float]:
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=load.concurrency, max_keepalive_connections=load.concurrency)
    gate = asyncio.Semaphore(load.concurrency)
    gaps = random.Random(load.seed)
    done = 0

    async with httpx.AsyncClient(base_url=load.base_url, headers=headers, limits=limits, timeout=load.timeout) as client:
        await _check(client, load)

        async def one(ask: Ask) -> Answer:
            nonlocal done
            async with gate:
                answer = await _send(client, load, ask)
            done += 1
            tell("requests", done, len(load.asks))
            return answer

        began = time.perf_counter()
        tasks = []
        for ask in load.asks:
            tasks.append(asyncio.create_task(one(ask)))
            if load.rate != float("inf"):
                await asyncio.sleep(gaps.expovariate(load.rate))
        answers = await asyncio.gather(*tasks)
    return answers, max(a.finished for a in answers) - began


async def _check(client: httpx.AsyncClient, load: Load) -> None:
    """One request before the clock starts: a wrong address, key or model is an error, not a column of zeros."""
    answer = await _send(client, load, Ask(load.asks[0].prompt[:8], 1))
    if answer.error is not None:
        raise OctavoError(f"{load.base_url}{load.endpoint} does not answer a first request: {answer.error}")


async def _send(client: httpx.AsyncClient, load: Load, ask: Ask) -> Answer:
    answer = Answer(Timeline(time.perf_counter()))
    try:
        async with client.stream("POST", load.endpoint, json=_body(load, ask)) as response:
            if response.status_code != 200:
                answer.error = _reason(response.status_code, await response.aread())
            else:
                await _read(response, answer)
    except (httpx.HTTPError, ValueError, AttributeError) as error:  # the latter two: events that are not OpenAI's
        answer.error = f"{type(error).__name__}: {error}".rstrip(": ")
    answer.finished = time.perf_counter()
    return answer


async def _read(response: httpx.Response, answer: Answer) -> None:
    """Read the events. An error event, a stream without [DONE] or without a token is an error."""
    finished, counted = False, None
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            finished = True
            break
        chunk = json.loads(data)
        if "error" in chunk:
            answer.error = f"error event: {chunk['error'].get('message', chunk['error'])}"[:200]
            return
        if usage := chunk.get("usage"):
            counted, answer.prompt_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens", 0)
        if any(_text(choice) for choice in chunk.get("choices", ())):
            answer.timeline.arrivals.append(time.perf_counter())
    if not finished:
        answer.error = "the stream ended without [DONE]"
    elif not answer.timeline.arrivals:
        answer.error = "the stream brought no text"
    answer.timeline.tokens = counted if counted is not None else len(answer.timeline.arrivals)


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    return (delta.get("content") or delta.get("reasoning_content") or "") if delta is not None else choice.get("text") or ""


def _reason(status: int, body: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        return f"HTTP {status}: {json.loads(body)['error']['message']}"[:200]
    return f"HTTP {status}"


def _body(load: Load, ask: Ask) -> dict[str, Any]:
    """Completions take the token ids themselves; a chat gets as many common words as there are ids."""
    body: dict[str, Any] = {
        "model": load.model,
        "max_tokens": ask.output,
        "temperature": load.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.ignore_eos:
        body["ignore_eos"] = True
    if load.endpoint.endswith("/chat/completions"):
        return body | {"messages": [{"role": "user", "content": " ".join(WORDS[i % len(WORDS)] for i in ask.prompt)}]}
    return body | {"prompt": ask.prompt}


def random_asks(count: int, prompt: int, output: int, *, spread: float = 0.0, vocab: int = 40_000, seed: int = 0) -> list[Ask]:
    """Uniform lengths within `spread` (0 to 1) around prompt and output, uniform ids."""
    draw = random.Random(seed)

    def length(middle: int) -> int:
        return max(1, draw.randint(round(middle * (1 - spread)), round(middle * (1 + spread))))

    return [Ask([draw.randrange(10, vocab) for _ in range(length(prompt))], length(output)) for _ in range(count)]


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """["ttft:500", "tpot:50"] -> {"ttft": 500.0, "tpot": 50.0} in milliseconds. Raises ConfigError."""
    limits: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if name not in ("ttft", "tpot", "e2el") or not limits[name] > 0:
            raise ConfigError(
                f"--goodput: {word!r} is not allowed; it must be ttft, tpot or e2el, a colon, and milliseconds (ttft:500)"
            )
    return limits


def served_model(base_url: str, api_key: str | None) -> str:
    """The first model that the server lists. Raises OctavoError when it cannot be asked."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{base_url.rstrip('/')}/v1/models", headers=headers, timeout=30)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.TransportError as error:
        raise OctavoError(f"{base_url}: nobody answers there ({error}); is the server running?") from error
    except httpx.HTTPStatusError as error:
        raise OctavoError(f"{base_url}/v1/models answers {error.response.status_code}; --api-key is the server's key") from error
    except (ValueError, LookupError) as error:
        raise OctavoError(f"{base_url}/v1/models does not name a model: is this an OpenAI-compatible server?") from error
