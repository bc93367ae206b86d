"""What the two-level trim of a sliding window saves: 128K of context, a window of 4K, eight sequences, a 7B shape, random weights.

    python benchmarks/window_trim.py [--layers 32] [--context 130000] [--batch 8]

One workload three ways on one GPU, the cache in FP8, because without the trim a 16-bit one would not fit:
    both   blocks out of the window go back to the pool, and the kernel reads the window: what the engine does
    kernel the kernel reads the window, and every block stays: the tokens must be those of `both`
    none   every block stays and the kernel reads all of them (its tokens are another model's: nothing masks them)

The last two exist here only, one after the other in one engine: its allocator takes every window group for a full one, and
its backend has a second decode work map, without a window. Both are plugged in as providers, as anybody's would be.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from octavo.cache.allocator import BlockAllocator
from octavo.catalog import Entry, Origin, Provider
from octavo.config import EngineConfig
from octavo.engine.build import build_from_plan
from octavo.engine.engine import Engine
from octavo.engine.plan import plan_engine
from octavo.interfaces import AllocatorParts
from octavo.plugins import discover
from octavo.request import Request, SamplingParams
from octavo_attention_triton.backend import TritonAttention
from octavo_attention_triton.provider import TritonOptions
from octavo_attention_triton.provider import provider as triton

SHAPE: dict[str, Any] = {
    "architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 102400, "rms_norm_eps": 1e-6, "sliding_window": 4096,
    "max_position_embeddings": 4096, "rope_theta": 1e6, "rope_scaling": {"rope_type": "dynamic", "factor": 32.0},
    "torch_dtype": "bfloat16",
}  # fmt: skip


class KeepEverything(BlockAllocator):
    """Every window group is a full one: nothing is given back before its sequence ends."""

    def __init__(self, options: Any, parts: AllocatorParts) -> None:
        full = tuple(replace(g, spec=replace(g.spec, kind="full", window=None)) for g in parts.groups)
        super().__init__(options, replace(parts, groups=full))


class TwoWays(TritonAttention):
    """Decodes over the window, or, after `read_everything`, over every key: with a work map that has no window. Prompts are
    computed as ever."""

    def bind(self, groups: Any, limits: Any) -> None:
        super().bind(groups, limits)
        by_index = {group.group.index: group for group in groups}
        self._whole = {
            index: self._work(by_index[bound.group], replace(bound.layer, window=None), bound.geometry, limits.max_num_seqs)
            for index, bound in self._layers.items()
        }

    def read_everything(self) -> None:
        for index, bound in self._layers.items():
            bound.work = self._whole[index]


def build(folder: Path, args: argparse.Namespace, *, keep: bool) -> Engine:
    here = Origin("window-trim", "0", __name__)
    made = (
        Provider("keep", "allocator", "window_trim:KeepEverything"),
        Provider("two_ways", "attention", "window_trim:TwoWays", accepts=triton.accepts, options=TritonOptions),
    )
    catalog = discover()
    catalog = replace(catalog, entries=(*catalog.entries, *(Entry(p.kind, p.name, here, provider=p) for p in made)))
    per_row = -(-131072 // 64) if keep else (4096 + 8192) // 64 + 4
    config = EngineConfig(
        model=str(folder), load_format="dummy", dtype="bfloat16", kv_cache_dtype="fp8", block_size=64, max_num_seqs=args.batch,
        enable_prefix_caching=False, num_gpu_blocks_override=args.batch * per_row, max_model_len=131072,
        allocator="keep" if keep else "auto", attention_backend="two_ways" if keep else "triton",
    )  # fmt: skip
    return build_from_plan(plan_engine(config, catalog))


class Workload:
    """Sequences that decode, once their prompts are in the cache."""

    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        self.engine, self.tokens = engine, {str(i): [] for i in range(args.batch)}
        self._batch, self._steps = args.batch, args.steps
        draw, began = random.Random(0), time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=131072 - args.context, ignore_eos=True)
        for name in self.tokens:
            prompt = [draw.randrange(10, SHAPE["vocab_size"]) for _ in range(args.context)]
            engine.add(Request(id=name, prompt=prompt, params=params))
        while not all(self.tokens.values()):
            self._step()
        print(f"{args.batch * args.context / (time.perf_counter() - began):,.0f} prompt tokens/s", flush=True)

    def _step(self) -> int:
        got = 0
        for event in self.engine.step().events:
            self.tokens[event.request_id].extend(event.tokens)
            got += len(event.tokens)
        return got

    def measure(self, name: str) -> dict[str, Any]:
        """Decode steps of all sequences: milliseconds, and what the cache holds."""
        for _ in range(6):  # the graph is captured
            self._step()
        walls = []
        for _ in range(self._steps):
            at = time.perf_counter()
            assert self._step() == self._batch
            walls.append((time.perf_counter() - at) * 1e3)
        used = self.engine.allocator.usage().used
        record = {
            "run": name, "step_ms_p50": round(statistics.median(walls), 3), "step_ms_p99": round(sorted(walls)[int(0.99 * len(walls))], 3),
            "resident_gib": round(used * self.engine.explain["kv_cache"]["block_bytes"] / 2**30, 2), "blocks": used,
        }  # fmt: skip
        print(json.dumps(record), flush=True)
        return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--context", type=int, default=130000, help="tokens of each prompt")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures on a CUDA device, and torch finds none")
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        (folder / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": args.layers}))
        trimmed = Workload(build(folder, args, keep=False), args)
        both = trimmed.measure("both")
        trimmed.engine.close()
        del trimmed.engine
        gc.collect()
        torch.cuda.empty_cache()
        kept = Workload(build(folder, args, keep=True), args)
        kernel = kept.measure("kernel")
        counts = [sum(map(len, run.tokens.values())) for run in (trimmed, kept)]
        print(
            f"tokens equal whether blocks are given back or kept: {trimmed.tokens == kept.tokens} ({counts[0]} and {counts[1]} tokens)",
            flush=True,
        )
        runner: Any = kept.engine._executor._runner  # type: ignore[attr-defined]
        runner._attention.read_everything()
        runner.use_graphs()
        none = kept.measure("none")
    for way in (kernel, both):
        print(f"none -> {way['run']}: p50 {none['step_ms_p50']} -> {way['step_ms_p50']} ms, p99 {none['step_ms_p99']} -> {way['step_ms_p99']} ms "
              f"({1 - way['step_ms_p99'] / none['step_ms_p99']:.0%} less), resident KV {none['resident_gib']} -> {way['resident_gib']} GiB")  # fmt: skip


if __name__ == "__main__":
    main()
