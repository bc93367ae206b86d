"""The Triton operators against core's torch operators and cuBLAS, on the shapes of public models.

Every figure is the median over replays of a captured graph that holds the operator REPEATS times, over rotating inputs
of random values, divided by REPEATS: so a kernel is paid for as it is in a decode step, with the gap before it. Columns:
torch, Triton launched plainly, Triton with programmatic dependent launch; microseconds. `layer` is all of a decoder layer but
attention in its order, once with cuBLAS and once with `small_linear`. `host` is the time to launch, outside a graph.
Run from the repository's root on a GPU: python3 benchmarks/operators.py [--out FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "ops_triton" / "src"))

import torch
import torch.nn.functional as F
from octavo.bench.device_time import graph_time
from octavo.bench.kernel import cuda_device
from octavo.interfaces import OperatorParts
from octavo.model.operators import OPERATORS
from octavo.sampling.truncation import BLOCK
from octavo.sampling.truncation import draw as draw_sorted
from octavo_ops_triton.operators import TritonOperators
from octavo_ops_triton.provider import TritonOptions
from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32
REPEATS, REPLAYS = 24, 9
# hidden, q heads, kv heads, head dim, inner, vocab
MODELS = {"qwen3-0.6b": (1024, 16, 8, 128, 3072, 151_936), "llama-3.1-8b": (4096, 32, 8, 128, 14336, 128_256)}


def measure(op: Callable[[int], Any], repeats: int = REPEATS) -> float:
    """Microseconds of op(i) in a graph of `repeats` of them, i ascending."""
    return graph_time(op, repeats, REPLAYS)


def host(op: Callable[[int], Any]) -> float:
    """Microseconds that the host spends to launch op."""
    op(0)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for i in range(50):
        op(i)
    spent = time.perf_counter() - began
    torch.cuda.synchronize()
    return spent / 50 * 1e6


def sample_torch(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """What core's sampler runs for rows at temperature 1: see octavo.sampling.sampler."""
    failed = ~torch.isfinite(logits.sum(-1))
    best = logits.amax(-1, keepdim=True)
    x = logits.new_full((len(logits), -(-logits.shape[1] // BLOCK) * BLOCK), float("-inf"))
    torch.sub(logits, best, out=x[:, : logits.shape[1]])
    return draw_sorted(x, uniform), failed


def cases(model: str, tokens: int) -> dict[str, Callable[[dict[str, Any]], Callable[[int], Any]]]:
    """By name: from a set of operators to a function of i."""
    hidden, heads, kv, dim, inner, vocab = MODELS[model]
    n = 4
    x = torch.randn(n, tokens, hidden).to(BF16)
    residual, weight = torch.randn(n, tokens, hidden), torch.randn(hidden)
    qkv = torch.randn(n, tokens, heads + 2 * kv, dim).to(BF16)
    head_weight = torch.randn(heads + kv, dim).to(BF16)
    cos, sin = (torch.randn(tokens, 1, dim).to(BF16) for _ in range(2))
    gate_up = torch.randn(n, tokens, 2 * inner).to(BF16)
    table, ids = torch.randn(vocab, hidden).to(BF16), torch.randint(vocab, (tokens,))
    found: dict[str, Callable[[dict[str, Any]], Callable[[int], Any]]] = {
        "add_rms_norm": lambda ops: lambda i: ops["add_rms_norm"](x[i % n], residual[i % n], weight, 1e-6),
        "qk_norm_rope": lambda ops: lambda i: ops["qk_norm_rope"](qkv[i % n, :, : heads + kv], head_weight, 1e-6, cos, sin),
        "silu_mul": lambda ops: lambda i: ops["silu_mul"](gate_up[i % n]),
        "embedding": lambda ops: lambda i: ops["embedding"](ids, table),
    }
    if tokens <= 256:
        logits = torch.randn(2, tokens, vocab) * 2
        heat, seed = torch.ones(tokens), torch.arange(tokens)
        uniform = torch.rand(tokens, dtype=torch.float64)

        def draw(ops: dict[str, Any]) -> Callable[[int], Any]:
            if "draw" in ops:
                return lambda i: ops["draw"](logits[i % 2], heat, seed, seed, vocab)
            return lambda i: sample_torch(logits[i % 2], uniform)

        found["draw"] = draw
    return found


def linears(triton: dict[str, Any], show: Callable[[str], None]) -> None:
    show("| linear | M | N | K | floor us | cuBLAS | Triton, PDL |\n|---|---|---|---|---|---|---|")
    for model, (hidden, heads, kv, dim, inner, vocab) in MODELS.items():
        shapes = {
            "qkv": ((heads + 2 * kv) * dim, hidden), "o": (hidden, heads * dim), "gate_up": (2 * inner, hidden),
            "down": (hidden, inner), "head": (vocab, hidden),
        }  # fmt: skip
        for name, (n, k) in shapes.items():
            copies = max(2, min(8, 300_000_000 // (n * k * 2)))  # together past the L2
            weights = [(torch.randn(n, k) / 64).to(BF16) for _ in range(copies)]
            wide = FP32 if name == "head" else BF16
            for m in (1, 2, 4):
                x = torch.randn(m, k).to(BF16)

                def blas(i: int, x: Tensor = x, weights: list[Tensor] = weights, wide: torch.dtype = wide) -> Tensor:
                    w = weights[i % len(weights)]
                    return F.linear(x, w) if wide == BF16 else torch.mm(x, w.t(), out_dtype=FP32)

                def ours(ops: dict[str, Any], x: Tensor = x, weights: list[Tensor] = weights, wide: torch.dtype = wide) -> Any:
                    return lambda i: ops["small_linear"](x, weights[i % len(weights)], wide)

                repeats = 8 if name == "head" else REPEATS
                times = [measure(blas, repeats), measure(ours(triton), repeats)]
                show(
                    f"| {model} {name} | {m} | {n} | {k} | {n * k * 2 / 4.25e6:.1f} | "
                    + " | ".join(f"{t:.1f}" for t in times)
                    + " |"
                )
            del weights


def layers(triton: list[dict[str, Any]], torch_ops: dict[str, Any], show: Callable[[str], None]) -> None:
    """All of Qwen3-0.6B's layer but attention, for one token, over eight layers' weights."""
    hidden, heads, kv, dim, inner, _ = MODELS["qwen3-0.6b"]
    made = [
        [(torch.randn(n, k) / 64).to(BF16) for n, k in
         (((heads + 2 * kv) * dim, hidden), (hidden, heads * dim), (2 * inner, hidden), (hidden, inner))]
        for _ in range(8)
    ]  # fmt: skip
    weight, head_weight = torch.randn(hidden), torch.randn(heads + kv, dim).to(BF16)
    cos, sin = (torch.randn(1, 1, dim).to(BF16) for _ in range(2))
    start, residual = torch.randn(1, hidden).to(BF16), torch.zeros(1, hidden)

    def layer(ops: dict[str, Any], linear: Callable[[Tensor, Tensor], Tensor]) -> Callable[[int], Any]:
        def run(i: int) -> Tensor:
            qkv, out, gate_up, down = made[i % 8]
            x, _ = ops["add_rms_norm"](start, residual, weight, 1e-6)
            heads_of = linear(x, qkv).view(1, heads + 2 * kv, dim)
            q = ops["qk_norm_rope"](heads_of[:, : heads + kv], head_weight, 1e-6, cos, sin)[:, :heads]
            x, _ = ops["add_rms_norm"](linear(q.reshape(1, -1), out), residual, weight, 1e-6)
            return linear(ops["silu_mul"](linear(x, gate_up)), down)

        return run

    rows = {
        "torch + cuBLAS": layer(torch_ops, F.linear),
        "Triton + cuBLAS": layer(triton[0], F.linear),
        "Triton, PDL + cuBLAS": layer(triton[1], F.linear),
        "Triton + small_linear": layer(triton[0], triton[0]["small_linear"]),
        "Triton, PDL + small_linear, PDL": layer(triton[1], triton[1]["small_linear"]),
    }
    show("\n| Qwen3-0.6B layer without attention, 1 token | us | host us |\n|---|---|---|")
    for name, run in rows.items():
        show(f"| {name} | {measure(run):.1f} | {host(run):.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        parser.error("this measures on a CUDA device, and torch finds none")
    lines: list[str] = []

    def show(line: str) -> None:
        print(line, flush=True)
        lines.append(line)
        if out:
            out.write_text("\n".join(lines) + "\n")

    torch.set_default_device("cuda")
    torch.manual_seed(0)
    parts = OperatorParts(cuda_device(), "bfloat16")
    triton = [{n: op for (n, _), op in TritonOperators(TritonOptions(pdl=pdl), parts).ops.items()} for pdl in (False, True)]
    torch_ops = {name: op for (name, _), op in OPERATORS.items()}
    with torch.inference_mode():
        layers(triton, torch_ops, show)
        show(
            "\n| model | tokens | operator | torch | Triton | Triton, PDL | host: torch | host: Triton |\n|---|---|---|---|---|---|---|---|"
        )
        for model, counts in (("qwen3-0.6b", (1, 256, 2048)), ("llama-3.1-8b", (1, 256))):
            for tokens in counts:
                for name, make in cases(model, tokens).items():
                    repeats = 6 if name == "draw" and tokens > 32 else REPEATS
                    sets = (torch_ops, *triton)
                    times = [measure(make(ops), repeats) for ops in sets]
                    spent = [host(make(ops)) for ops in (torch_ops, triton[1])] if tokens == 1 else [float("nan")] * 2
                    columns = [f"{t:.1f}" for t in times] + ["" if t != t else f"{t:.0f}" for t in spent]
                    show(f"| {model} | {tokens} | {name} | " + " | ".join(columns) + " |")
        show("")
        linears(triton[1], show)


if __name__ == "__main__":
    main()
