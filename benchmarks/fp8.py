"""FP8 on the linear layers of Llama-3.1-8B, with what feeds them.

A figure is the median over replays of a graph that holds four layers' worth of the operation six times, weights of four layers in
turn (872 MB, past the L2), random values, divided by the number of layers. `layer` is a layer without attention in its order: norm, qkv, o,
norm, gate_up, SwiGLU, down. `beside` is the same norms and SwiGLU in bfloat16 alone, so `linear` = layer - beside is the four products with
all that quantising costs. The floor is the weights' bytes over 4.25 TB/s.
Run from the repository's root on a GPU: python3 benchmarks/fp8.py [--out FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / "plugins" / name / "src") for name in ("quant_fp8", "ops_triton"))

import torch
from octavo.bench.device_time import graph_time
from octavo.bench.kernel import cuda_device
from octavo.interfaces import Activation, OperatorParts
from octavo.testing.bare_model import DictWeights
from octavo_ops_triton.operators import TritonOperators
from octavo_ops_triton.provider import TritonOptions
from octavo_quant_fp8 import fused, numerics, products
from octavo_quant_fp8.scheme import Scheme
from octavo_quant_fp8.weights import GatheredWeights
from torch import Tensor

BF16 = torch.bfloat16
LAYERS, TURNS, REPLAYS = 4, 6, 7
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
FLOOR = {name: n * k / 4.25e6 for name, (n, k) in SHAPES.items()}
KINDS = {
    "rows": (Scheme("channel", "token"), "fp8_token"),
    "blocks": (Scheme("block", "block", scale_name="weight_scale_inv"), "fp8_block"),
    "weights only": (Scheme("channel", "none"), "plain"),
}
Linear = Callable[[str, int, Any], Tensor]


def measure(op: Callable[[int], Any], count: int = LAYERS * TURNS) -> float:
    """Microseconds of op(i), i a layer's number."""
    return graph_time(lambda i: op(i % LAYERS), count, REPLAYS)


def made(scheme: Scheme) -> dict[str, list[Any]]:
    """The products of four layers, by name."""
    found: dict[str, list[Any]] = {}
    for name, (n, k) in SHAPES.items():
        for _ in range(LAYERS):
            table = DictWeights()
            weights = GatheredWeights({"a": n}, k, scheme, bias=False, weights=table, device=torch.device("cuda"), dtype=BF16)
            data = (torch.randn(n, k) * 60).clamp(-448, 448).to(numerics.E4M3)
            blocks = scheme.weight == "block"
            shape = (-(-n // 128), -(-k // 128)) if blocks else (n, 1)
            table.fill({"a.weight": data, f"a.{scheme.scale_name}": torch.rand(shape) * 1e-4 + 1e-5}, lambda name: False)
            found.setdefault(name, []).append(products.cuda_product(weights, cuda_device(), BF16, head=False))
    return found


def layer(ops: dict[str, Any], linear: Linear, m: int, gated: Callable[[int, Any], Any] | None = None) -> Callable[[int], Tensor]:
    x0, residual, weight = torch.randn(m, 4096).to(BF16), torch.zeros(m, 4096), torch.rand(4096)

    def run(i: int) -> Tensor:
        x, _ = ops["add_rms_norm"](x0, residual, weight, 1e-5)
        qkv = linear("qkv", i, x)
        x, _ = ops["add_rms_norm"](linear("o", i, qkv[:, :4096]), residual, weight, 1e-5)
        return linear("down", i, gated(i, x) if gated else ops["silu_mul"](linear("gate_up", i, x)))

    return run


def beside(ops: dict[str, Any], m: int) -> Callable[[int], Tensor]:
    x0, residual, weight = torch.randn(m, 4096).to(BF16), torch.zeros(m, 4096), torch.rand(4096)
    gate_up = torch.randn(m, 2 * 14336).to(BF16)

    def run(i: int) -> Tensor:
        for _ in range(2):
            ops["add_rms_norm"](x0, residual, weight, 1e-5)
        return ops["silu_mul"](gate_up)

    return run


def library(kind: dict[str, list[Any]]) -> Linear:
    """`torch._scaled_mm` on the same weights at any number of rows."""
    launch = fused.launcher(cuda_device())

    def run(name: str, i: int, x: Tensor | Activation) -> Tensor:
        return kind[name][i]._scaled_mm(fused.quantise_input(launch, False, x) if isinstance(x, Tensor) else x)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="default: all (repeatable)")
    parser.add_argument(
        "--rows", type=lambda text: tuple(map(int, text.split(","))), default=(1, 2, 8, 16, 32, 64, 128, 256, 2048)
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures on a CUDA device, and torch finds none")
    out = args.out
    lines: list[str] = []

    def show(line: str) -> None:
        print(line, flush=True)
        lines.append(line)
        if out:
            out.write_text("\n".join(lines) + "\n")

    torch.set_default_device("cuda")
    torch.manual_seed(0)
    parts, floor = OperatorParts(cuda_device(), "bfloat16"), sum(FLOOR.values())
    plain = {n: op for (n, _), op in TritonOperators(TritonOptions(), parts).ops.items()}
    for kind in args.kind or KINDS:
        scheme, format = KINDS[kind]
        quantising = {n: op for (n, f), op in fused.TritonOperators(None, parts).ops.items() if f == format}
        ops = plain if format == "plain" else quantising
        weights = made(scheme)

        def linear(name: str, i: int, x: Any, weights: dict[str, list[Any]] = weights) -> Tensor:
            return weights[name][i](x)  # type: ignore[no-any-return]

        fused_gates = [getattr(one, "gated", lambda name: None)("silu") for one in weights["gate_up"]]

        def gated_mlp(i: int, x: Any, gates: list[Any] = fused_gates) -> Any:
            return gates[i](x)

        gated = gated_mlp if fused_gates[0] else None
        show(f"\n{kind} (floor {floor:.1f} us a layer: " + ", ".join(f"{n} {f:.1f}" for n, f in FLOOR.items()) + ")\n")
        extra = " `_scaled_mm` layer |" if kind == "rows" else ""
        show(f"| M | layer us | beside us | linear us | of floor | qkv | o | gate_up | down |{extra}")
        show("|---|---|---|---|---|---|---|---|---|" + ("---|" if extra else ""))
        for m in args.rows:
            if kind == "weights only" and m > 64:
                continue
            count = LAYERS if m > 256 else LAYERS * TURNS
            whole, rest = measure(layer(ops, linear, m, gated), count), measure(beside(plain, m), count)
            alone = []
            for name, (_, k) in SHAPES.items():
                x: Any = torch.randn(m, k).to(BF16)
                if format == "fp8_token" and m > fused.PLAIN_ROWS:
                    x = Activation(*numerics.quantise_rows(x))
                elif format == "fp8_block":
                    x = Activation(*numerics.quantise_groups(x))
                alone.append(measure(lambda i, name=name, x=x: linear(name, i, x), count))
            cells = [
                f"{whole:.1f}",
                f"{rest:.1f}",
                f"{whole - rest:.1f}",
                f"{(whole - rest) / floor:.2f}",
                *[f"{t:.1f}" for t in alone],
            ]
            if extra and m > fused.PLAIN_ROWS:
                cells.append(f"{measure(layer(ops, library(weights), m), count):.1f}")
            elif extra:
                cells.append("")
            show(f"| {m} | " + " | ".join(cells) + " |")
        del weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
