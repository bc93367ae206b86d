"""Decode with chosen keys (DeepSeek V3.2): 64 index heads of 128 score every key, the 2048 best are attended to by 128 heads of 512 + 64.

    python benchmarks/mla_sparse.py [--heads 128] [--count 2048] [--json FILE]

Times are medians of CUDA-graph replays over enough layers that nothing stays in the L2, a layer's share of one replay, in
microseconds: the scores and the choice of the index, attention over the chosen keys, and the dense attention that both stand for.
bytes/us of a part are those that it must read at least, in TB/s. The conformance suite (tests/gpu/test_mla_sparse.py) says whether
the numbers are right.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from octavo.bench.device_time import graph_time
from octavo.bench.kernel import cuda_device
from octavo.interfaces import AttentionLayer, AttentionParts, BoundGroup, KVGroup, KVSpec, Limits, Step, StepHost
from octavo_attention_triton.latent import TritonLatent
from octavo_attention_triton.latent_provider import LatentOptions

SHAPES = ((1, 8192), (1, 65536), (16, 8192), (64, 16384))
LATENT, ROPE, PAGE = 512, 64, 64
INDEX_HEADS, INDEX_DIM, INDEX_PAGE = 64, 128, 288


def captured(work: Callable[[], None], layers: int) -> float:
    """Microseconds of a layer's share of one replay."""
    return graph_time(lambda _: work(), 1, 12) / layers


class Decode:
    """A decode step of `rows` rows of `length` tokens over layers whose caches exceed the L2."""

    def __init__(self, rows: int, length: int, heads: int) -> None:
        self.rows, self.length = rows, length
        entry = rows * length * (LATENT + ROPE + INDEX_DIM) * 2
        self.layers = max(2, min(12, (600 << 20) // entry))
        self.backend = TritonLatent(LatentOptions(), AttentionParts(cuda_device(), "bfloat16"))
        bound, tables = [], []
        for number, (size, key, value, many) in enumerate(
            ((PAGE, LATENT + ROPE, LATENT, heads), (INDEX_PAGE, INDEX_DIM, INDEX_DIM, INDEX_HEADS))
        ):
            pages = -(-length // size)
            spec = KVSpec("latent", 1, key, value, "bfloat16")
            layout = self.backend.layout(spec, size)
            first = number * self.layers
            facts = tuple(AttentionLayer(first + i, many, 1, key, value, key**-0.5) for i in range(self.layers))
            caches = tuple(torch.randn(rows * pages, *layout.page_shape, device="cuda", dtype=torch.bfloat16) for _ in facts)
            group = KVGroup(number, spec, tuple(fact.index for fact in facts), size, layout.page_bytes)
            bound.append(BoundGroup(group, layout, facts, caches))
            tables.append(torch.randperm(rows * pages, device="cuda").int().view(rows, pages))
        self.backend.bind(bound, Limits(max(rows, 16), 8192, length))
        index = torch.arange(rows, device="cuda")
        lens = torch.full((rows,), length, dtype=torch.int32, device="cuda")
        host = StepHost(lens.cpu().numpy() * 0 + 1, lens.cpu().numpy(), index.cpu().numpy(), rows, 1, length)
        self.step = Step(
            token_ids=index, positions=lens.long() - 1, query_start=torch.arange(rows + 1, dtype=torch.int32, device="cuda"),
            seq_lens=lens, rows=index, tables=tuple(tables), slot_mapping=(torch.full_like(index, -1),) * 2, token_rows=index,
            logit_index=index, host=host,
        )  # fmt: skip
        self.q = torch.randn(rows, heads, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(rows, heads, LATENT, device="cuda", dtype=torch.bfloat16)
        self.index_q = torch.randn(rows, INDEX_HEADS, INDEX_DIM, device="cuda", dtype=torch.bfloat16)
        self.weights = torch.randn(rows, INDEX_HEADS, device="cuda")
        self.backend.prepare(self.step)
        self.backend.plan(self.step)

    def choose(self, count: int) -> float:
        def work() -> None:
            for layer in range(self.layers, 2 * self.layers):
                self.backend.choose(layer, self.step, self.index_q, self.weights, count)

        return captured(work, self.layers)

    def attend(self, count: int) -> float:
        chosen = torch.stack([torch.randperm(self.length, device="cuda")[:count] for _ in range(self.rows)]).int()

        def work() -> None:
            for layer in range(self.layers):
                self.backend.run(layer, self.step, self.q, self.out, select=chosen)

        return captured(work, self.layers)

    def dense(self) -> float:
        def work() -> None:
            for layer in range(self.layers):
                self.backend.run(layer, self.step, self.q, self.out)

        return captured(work, self.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--count", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures on a CUDA device, and torch finds none")
    record = []
    for rows, length in SHAPES:
        step = Decode(rows, length, args.heads)
        index, chosen, dense = step.choose(args.count), step.attend(args.count), step.dense()
        read = rows * length * INDEX_DIM * 2 / index / 1e6, rows * args.count * (LATENT + ROPE) * 2 / chosen / 1e6
        print(
            f"{rows:4d} x {length:6d}: index {index:7.1f} us ({read[0]:.2f} TB/s), chosen {chosen:7.1f} us ({read[1]:.2f} TB/s), "
            f"dense {dense:7.1f} us, {dense / (index + chosen):.2f}x",
            flush=True,
        )
        record.append({"rows": rows, "tokens": length, "index_us": index, "chosen_us": chosen, "dense_us": dense})
        del step
        torch.cuda.empty_cache()
    if args.json:
        found = {"heads": args.heads, "count": args.count, "gpu": torch.cuda.get_device_name(), "rows": record}
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
