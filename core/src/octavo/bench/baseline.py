"""transformers on the same weights, at the best of its threads and dtypes on this machine.

Owns the other side of `--against transformers`: `generate` for one stream, or `forward` where the
workload is prompts alone. Loads transformers only when asked.
"""

from __future__ import annotations

import copy
import io
import os
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from typing import TYPE_CHECKING, Any

from octavo.bench.workloads import Ask
from octavo.config import EngineConfig

if TYPE_CHECKING:
    import torch

    from octavo.bench.offline import Run

TRIAL_TOKENS, TRIAL_PROMPT, TRIAL_ROUNDS = 12, 512, 2
"""Each variant is tried twice, round by round, and its better try counts: a busy moment must not choose the baseline."""

FLOAT32_LIMIT = 2_000_000_000


class Transformers:
    """forward: the workload has prompts alone (one output token each), and one forward pass over each
    prompt is timed, logits of the last position only. Otherwise the first request, alone, through
    `generate` at temperature 1."""

    def __init__(self, config: EngineConfig, asks: Sequence[Ask], tell: Callable[..., None]) -> None:
        self._asks = asks
        self.forward = all(ask.output == 1 for ask in asks)
        self.what = (
            "transformers' forward over the same prompts" if self.forward else "transformers' generate of its first request alone"
        )
        tell("transformers: loading")
        self._models = _load(config)
        self._threads, self._dtype, trials = self._best(tell)
        for name in set(self._models) - {self._dtype}:
            del self._models[name]
        self.settings: dict[str, Any] = {
            "engine": "transformers",
            "call": "forward" if self.forward else "generate",
            "threads": self._threads,
            "dtype": self._dtype,
            "trials_tok_s": trials,
        }

    def run(self) -> Run:
        return self._time(self._threads, self._dtype, self._asks if self.forward else self._asks[:1])

    def _best(self, tell: Callable[..., None]) -> tuple[int, str, dict[str, float]]:
        """Try threads and dtypes on a short piece of the work and keep the fastest."""
        first = self._asks[0]
        piece = Ask(first.prompt[:TRIAL_PROMPT], min(first.output, TRIAL_TOKENS))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        variants = [(threads, dtype) for dtype in self._models for threads in sorted({1, 2, cores} & set(range(1, cores + 1)))]
        rates = dict.fromkeys(variants, 0.0)
        for _ in range(TRIAL_ROUNDS):
            for threads, dtype in variants:
                tell(f"transformers: trying {dtype} on {threads} thread{'s' * (threads > 1)}")
                self._time(threads, dtype, [Ask(piece.prompt[:16], min(piece.output, 2))])
                rate = self._time(threads, dtype, [piece]).rates["input_tok_s" if self.forward else "output_tok_s"]
                rates[threads, dtype] = max(rates[threads, dtype], rate)
        threads, dtype = max(variants, key=lambda v: rates[v])
        return threads, dtype, {f"{d} x {t}": round(rate, 3) for (t, d), rate in rates.items()}

    def _time(self, threads: int, dtype: str, asks: Sequence[Ask]) -> Run:
        import torch

        from octavo.bench.offline import Run

        torch.set_num_threads(threads)
        model = self._models[dtype]
        wall = 0.0
        for ask in asks:
            ids = torch.tensor([ask.prompt], device=model.device)
            began = time.perf_counter()
            with torch.inference_mode():
                if self.forward:
                    model(input_ids=ids, use_cache=False, logits_to_keep=1)
                else:
                    done = model.generate(
                        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=_sampling(ask.output)
                    )
                    assert done.shape[1] == len(ask.prompt) + ask.output
                if model.device.type == "cuda":
                    torch.cuda.synchronize()
            wall += time.perf_counter() - began
        return Run(wall, sum(len(a.prompt) for a in asks), sum(a.output for a in asks))


def _sampling(tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0
    )


def _load(config: EngineConfig) -> dict[str, Any]:
    """The model by dtype name: float32 and bfloat16 on a CPU, bfloat16 alone on a GPU or past FLOAT32_LIMIT parameters."""
    import torch
    import transformers

    from octavo.model.source import resolve_source

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = resolve_source(config.model, config.revision).path
    cuda = config.device != "cpu" and torch.cuda.is_available()

    def load(dtype: torch.dtype) -> Any:
        if config.load_format == "dummy":
            shape = transformers.AutoConfig.from_pretrained(path)
            model = transformers.AutoModelForCausalLM.from_config(shape, dtype=dtype)
        elif path.is_file():
            model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        return model.to("cuda" if cuda else "cpu").eval()

    with redirect_stderr(io.StringIO()):  # transformers draws bars of its own there while it reads GGUF; errors still raise
        first = load(torch.bfloat16 if cuda else torch.float32)
    if cuda:
        return {"bfloat16": first}
    half = copy.deepcopy(first).to(torch.bfloat16)
    return {"bfloat16": half} if first.num_parameters() > FLOAT32_LIMIT else {"float32": first, "bfloat16": half}
