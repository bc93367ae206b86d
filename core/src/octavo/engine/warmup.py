"""Warm-up of an engine: what happens once happens before the first client.

Owns which sizes are run. A prefix that should be found in the cache is another thing: AsyncLLM.warm.
"""

from __future__ import annotations

import contextlib

from octavo.engine.async_llm import AsyncLLM
from octavo.errors import AdmissionRefused
from octavo.request import SamplingParams

WARM_TOKENS = 4
WARM_ROWS = (2, 4, *range(8, 65, 8))
"""Sizes of decoding steps that a warm-up runs on a GPU; larger ones are captured when they come."""


async def warm_up(llm: AsyncLLM, prompts: list[str] | None = None) -> int:
    """Generate a little, so that the first clients do not pay for what happens once: on a GPU, kernels that are
    compiled and graphs that are captured at the first step of their size. Returns the prompt tokens that
    were computed. Raises what `generate` raises."""
    params = SamplingParams(max_tokens=WARM_TOKENS, temperature=0.0)
    computed = 0
    for prompt in prompts or ["hello"]:
        outputs = [output async for output in llm.generate(prompt, params)]
        computed += len(outputs[-1].prompt_token_ids) - outputs[-1].num_cached_tokens
    if llm.explain.get("device", {}).get("type") == "cuda":
        with contextlib.suppress(AdmissionRefused):  # a pool too small for so many rows will never run so many
            for rows in (n for n in WARM_ROWS if n <= llm.info.max_num_seqs):
                many = SamplingParams(n=rows, max_tokens=WARM_TOKENS, ignore_eos=True)
                _ = [output async for output in llm.generate("hello", many)]
    return computed
