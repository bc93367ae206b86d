"""Decode over a latent cache (MLA) at FlashMLA's shapes: 128 heads, 512 + 64, pages of 64, bfloat16, random page order.

    python benchmarks/mla.py [--kernel portable] [--heads 128]

Times are medians of CUDA-graph replays over enough layers that nothing stays in the L2, a layer's share of one replay. The
conformance suite (tests/gpu/test_mla.py) says whether the numbers are right; this says only how long they take.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from octavo.bench.device_time import graph_time
from octavo.bench.kernel import cuda_device
from octavo.interfaces import AttentionLayer, AttentionParts, BoundGroup, KVGroup, KVSpec, Limits, Step, StepHost
from octavo_attention_triton.latent import TritonLatent
from octavo_attention_triton.latent_provider import LatentOptions

SHAPES = {(1, 8192): 32.0, (1, 65536): 66.4, (16, 8192): 81.4, (128, 4096): 277.2}
"""(rows, tokens): microseconds of FlashMLA on an H200, 128 heads."""
LATENT, ROPE, PAGE = 512, 64, 64


def measure(rows: int, length: int, heads: int, kernel: str) -> float:
    """Microseconds of one layer."""
    pages = -(-length // PAGE)
    entry = rows * pages * PAGE * (LATENT + ROPE) * 2
    layers = max(2, min(24, (600 << 20) // entry))
    spec = KVSpec("latent", 1, LATENT + ROPE, LATENT, "bfloat16")
    backend = TritonLatent(LatentOptions(kernel=kernel), AttentionParts(cuda_device(), "bfloat16"))
    layout = backend.layout(spec, PAGE)
    facts = [AttentionLayer(i, heads, 1, LATENT + ROPE, LATENT, (128 + 64) ** -0.5) for i in range(layers)]
    caches = [torch.randn(rows * pages, *layout.page_shape, device="cuda", dtype=torch.bfloat16) for _ in facts]
    group = KVGroup(0, spec, tuple(range(layers)), PAGE, layout.page_bytes)
    backend.bind([BoundGroup(group, layout, tuple(facts), tuple(caches))], Limits(max(rows, 16), 8192, length))
    lens = torch.full((rows,), length, dtype=torch.int32, device="cuda")
    index = torch.arange(rows, device="cuda")
    host = StepHost(lens.cpu().numpy() * 0 + 1, lens.cpu().numpy(), index.cpu().numpy(), rows, 1, length)
    table = torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
    step = Step(
        token_ids=index, positions=lens.long() - 1, query_start=torch.arange(rows + 1, dtype=torch.int32, device="cuda"),
        seq_lens=lens, rows=index, tables=(table,), slot_mapping=(torch.full_like(index, -1),), token_rows=index,
        logit_index=index, host=host,
    )  # fmt: skip
    q = torch.randn(rows, heads, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, heads, LATENT, device="cuda", dtype=torch.bfloat16)

    backend.prepare(step)
    backend.plan(step)
    return graph_time(lambda layer: backend.run(layer, step, q, out), layers, 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", default="auto", choices=("auto", "portable", "hopper"))
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures on a CUDA device, and torch finds none")
    record = []
    for (rows, length), peer in SHAPES.items():
        us = measure(rows, length, args.heads, args.kernel)
        flops = 2 * rows * length * args.heads * (2 * LATENT + ROPE)
        moved = rows * length * (LATENT + ROPE) * 2
        peer_text = f"FlashMLA {peer:.1f}, {peer / us:.2f}x" if args.heads == 128 else ""
        print(
            f"{rows:4d} x {length:6d}: {us:7.1f} us, {flops / us / 1e6:5.0f} TFLOP/s, {moved / us / 1e3:5.0f} GB/s  {peer_text}",
            flush=True,
        )
        record.append({"rows": rows, "tokens": length, "us": us})
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(
            json.dumps({"kernel": args.kernel, "heads": args.heads, "gpu": torch.cuda.get_device_name(), "rows": record})
        )


if __name__ == "__main__":
    main()
