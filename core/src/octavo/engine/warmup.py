"""Warm-up of an engine: what happens once happens before the first client.

Owns which steps are run: on a GPU, decoding steps of many sizes (a graph is captured for each), with and without a
shared prefix, prompts of several lengths beside rows that decode, and the ways of sampling, so that no client waits
for a kernel to be compiled. Its prompts are in a domain of their own: no request finds them in the prefix cache. A
prefix that should be found there is another thing: AsyncLLM.warm.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import cast

import msgspec

from octavo.engine.async_llm import AsyncLLM
from octavo.engine.messages import Progress
from octavo.errors import AdmissionRefused
from octavo.request import SamplingParams
from octavo.text.output import RequestOutput

OnProgress = Callable[[Progress], None]

DOMAIN = "warm-up"
WARM_TOKENS = 4
WARM_ROWS = (2, 4, *range(8, 65, 8))
"""Sizes of decoding steps that a warm-up runs on a GPU; larger ones are captured when they come."""
SHARED_ROWS, SHARED_TOKENS = 16, 2048
"""From how many rows on a size is also run with a shared prefix, of how many tokens."""
PROMPT_LENGTHS = (1, 16, 100, 200, 300, 1024, 4096)
"""Prompts that are computed beside decoding rows. The shortest run from captured graphs (octavo.engine.rows)."""
BURSTS = ((12, 40), (6, 100))
"""Prompts that arrive together, so many of so many tokens: a step that holds more than any captured graph, in short pieces."""
PROMPT_ENDS = (20, 100, 200)
"""Ends of prompts that begin with the shared prefix: they too have graphs of their own."""

# A seed of its own, so that a warm-up draws nothing from the stream that unseeded requests draw from.
_PLAIN = SamplingParams(max_tokens=WARM_TOKENS, ignore_eos=True, seed=0)
_WAYS = (
    msgspec.structs.replace(_PLAIN, temperature=0.0),
    msgspec.structs.replace(_PLAIN, top_p=0.9, top_k=20),
    msgspec.structs.replace(_PLAIN, logprobs=1, repetition_penalty=1.1, presence_penalty=0.1),
)


async def warm_up(llm: AsyncLLM, prompts: list[str] | None = None, *, on_progress: OnProgress | None = None) -> int:
    """Generate a little, so that the first clients do not pay for what happens once. Returns the prompt tokens that
    were computed of `prompts`, which (unlike what is run without any) stay in the prefix cache. Raises what
    `generate` raises."""
    computed = 0
    for prompt in prompts or ():
        outputs = [output async for output in llm.generate(prompt, msgspec.structs.replace(_PLAIN, temperature=0.0))]
        computed += len(outputs[-1].prompt_token_ids) - outputs[-1].num_cached_tokens
    work = list(_work(llm))
    for done, (ids, params) in enumerate(work):
        if on_progress is not None:
            on_progress(Progress("warm-up", done, len(work)))
        with contextlib.suppress(AdmissionRefused):  # a cache too small for so many rows will never run so many
            async for _ in _run(llm, ids, params):
                pass
    if _on_gpu(llm):
        await _prompts_beside_rows(llm)
    return computed


def _work(llm: AsyncLLM) -> Iterator[tuple[list[int], SamplingParams]]:
    """Prompt and sampling of what is run alone, one after the other."""
    yield _ids(llm, 16), _WAYS[0]
    if not _on_gpu(llm):
        return
    for params in _WAYS[1:]:
        yield _ids(llm, 16), params
    for rows in (n for n in WARM_ROWS if n <= llm.info.max_num_seqs):
        yield _ids(llm, 16), msgspec.structs.replace(_PLAIN, n=rows)
        if rows >= SHARED_ROWS:
            yield _ids(llm, SHARED_TOKENS), msgspec.structs.replace(_PLAIN, n=rows)
    for end in PROMPT_ENDS:
        yield _ids(llm, SHARED_TOKENS + end), _PLAIN


async def _prompts_beside_rows(llm: AsyncLLM) -> None:
    """Steps that hold both decoding rows and a prompt, of several lengths."""
    room = llm.info.max_model_len - 16
    rows = _run(
        llm, _ids(llm, 16), msgspec.structs.replace(_PLAIN, n=min(8, llm.info.max_num_seqs), max_tokens=max(1, min(512, room)))
    )
    try:
        with contextlib.suppress(AdmissionRefused):
            await anext(rows)  # they run from here on, whoever reads
            for salt, length in enumerate(PROMPT_LENGTHS):
                async for _ in _run(llm, _ids(llm, length, salt + 1), _PLAIN):
                    pass
            for head in ([], _ids(llm, SHARED_TOKENS)):
                for count, length in BURSTS:
                    await _together(llm, [[*head, *_ids(llm, length, 100 * length + i)] for i in range(count)])
    finally:
        await rows.aclose()


async def _together(llm: AsyncLLM, prompts: list[list[int]]) -> None:
    async def one(prompt: list[int]) -> None:
        with contextlib.suppress(AdmissionRefused):
            async for _ in _run(llm, prompt, _PLAIN):
                pass

    fitting = [prompt for prompt in prompts if len(prompt) + WARM_TOKENS <= llm.info.max_model_len]
    await asyncio.gather(*map(one, fitting))


def _run(llm: AsyncLLM, ids: list[int], params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
    return cast(AsyncGenerator[RequestOutput, None], llm.generate(ids, params, domain=DOMAIN))


def _ids(llm: AsyncLLM, length: int, salt: int = 0) -> list[int]:
    """A prompt of that many tokens, or of as many as the context has room for, that begins unlike those of other salts."""
    length = max(1, min(length, llm.info.max_model_len - WARM_TOKENS))
    return [(97 * salt + 31 * i) % llm.info.vocab_size for i in range(length)]


def _on_gpu(llm: AsyncLLM) -> bool:
    return bool(llm.explain.get("device", {}).get("type") == "cuda")
