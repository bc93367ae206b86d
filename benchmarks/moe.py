"""One mixture-of-experts layer of a public model: router, routing, routed experts and shared expert, against its memory floor.

The floor is the bytes of every weight that the step must read (the router, the shared expert, and each routed expert that some
token takes, once) at the device's copy speed as measured in the same run. `loop` is a loop over those experts through cuBLAS, with the
assignment known to the host beforehand, which no engine knows: what it would cost without the waiting. Every figure is the median
over replays of a captured graph, in microseconds; weights and inputs are random, tokens are routed by random logits.

Run from the repository's root on a GPU: python3 benchmarks/moe.py [--shape v3] [--rows 1 8 64] [--weights fp8]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "ops_triton" / "src"))

import torch
import torch.nn.functional as F
from octavo.bench.device_time import graph_time
from octavo.bench.kernel import cuda_device
from octavo.interfaces import Gate, OperatorParts, Routing
from octavo.model.matrix import CublasMatrix, Offers, head_matrix, layer_matrix
from octavo_ops_triton.operators import TritonOperators
from octavo_ops_triton.provider import TritonOptions
from torch import Tensor

V3 = Routing(8, "sigmoid", groups=8, kept_groups=4, group_score="sum2", renormalise=True, scale=2.5)
SHAPES: dict[str, tuple[int, int, int, int, Routing]] = {  # hidden, inner, experts, shared inner, routing
    "v3": (7168, 2048, 256, 2048, V3),
    "qwen3-30b-a3b": (2048, 768, 128, 0, Routing(8, renormalise=True)),
    "gpt-oss-20b": (2880, 2880, 32, 0, Routing(4, "softmax_chosen")),
}


def timed(run: Callable[[], Any]) -> float:
    """Median microseconds of a replay of run, captured."""
    return graph_time(lambda _: run(), 1, 15)


def copy_speed() -> float:
    """Bytes a microsecond, read and written, of a copy of 4 GB; not captured, because a graph hands it to the copy engine."""
    a = torch.empty(2 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    b = torch.empty_like(a)
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return 2 * a.nbytes / statistics.median(times[2:])


class Layer:
    """Random weights of a shape, with what Octavo's MoE block runs."""

    def __init__(self, shape: str, weights: str = "bf16") -> None:
        """weights "fp8": experts are e4m3 with a scale for every 128 x 128; router and shared expert stay bfloat16."""
        hidden, inner, count, shared, self.routing = SHAPES[shape]

        def weight(*size: int) -> Tensor:
            return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(std=size[-1] ** -0.5)

        ops = TritonOperators(TritonOptions(), OperatorParts(cuda_device(), "bfloat16")).ops
        self.ops = {name: op for (name, _), op in ops.items()}
        self.hidden, self.count = hidden, count
        self.router = weight(count, hidden)
        self.gate_up, self.down = weight(count, 2 * inner, hidden), weight(count, hidden, inner)
        self.scales: dict[str, Any] = {}
        if weights == "fp8":
            self.gate_up, self.down = (w.mul_(w.shape[-1] ** 0.5).to(torch.float8_e4m3fn) for w in (self.gate_up, self.down))
            grid = lambda rows, columns: (-(-rows // 128), -(-columns // 128))  # noqa: E731
            sizes = ((count, 2, *grid(inner, hidden)), (count, *grid(hidden, inner)))
            self.scales = {"scales": tuple(torch.rand(size, device="cuda").add_(0.5).div_(64) for size in sizes)}
        self.experts = self.ops["experts_fp8" if weights == "fp8" else "experts"]
        self.shared = (weight(2 * shared, hidden), weight(hidden, shared)) if shared else None
        offers = Offers(small=self.ops["small_linear"])  # as the engine multiplies what is not quantised
        self.logits = head_matrix(self.router, None, offers)
        self.shared_matrices = [layer_matrix(w, None, offers) for w in self.shared or ()]

    def floor_bytes(self, ids: Tensor) -> int:
        used = len(ids.unique())
        shared = sum(w.nbytes for w in self.shared) if self.shared else 0
        return used * (self.gate_up[0].nbytes + self.down[0].nbytes) + shared + self.router.nbytes

    def shared_part(self, x: Tensor) -> Tensor | None:
        if self.shared is None:
            return None
        gate_up, down = self.shared_matrices
        return down(self.ops["silu_mul"](gate_up(x)))

    def run(self, x: Tensor) -> Tensor:
        weights, ids = self.ops["route"](self.logits(x), self.routing)
        out: Tensor = self.experts(x, weights, ids, self.gate_up, self.down, Gate(), base=self.shared_part(x), **self.scales)
        return out

    def loop(self, x: Tensor, ids: Tensor) -> Callable[[], Tensor]:
        work = [(e, *(ids == e).nonzero(as_tuple=True)) for e in ids.unique().tolist()]

        def run() -> Tensor:
            weights, _ = self.ops["route"](CublasMatrix(self.router, None)(x), self.routing)
            out = torch.zeros(x.shape, dtype=torch.float32, device="cuda") if self.shared is None else self.shared_part(x).float()
            for expert, token, place in work:
                middle = self.ops["silu_mul"](F.linear(x[token], self.gate_up[expert]))
                out.index_add_(0, token, F.linear(middle, self.down[expert]).float() * weights[token, place, None])
            return out.to(x.dtype)

        return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["v3"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 256, 1024])
    parser.add_argument("--weights", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--loop-rows", type=int, default=64, help="largest number of rows to run the loop at")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures on a CUDA device, and torch finds none")
    torch.manual_seed(0)
    speed = copy_speed()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {speed / 1e6:.2f} TB/s")
    print(
        "| shape | rows | experts used | floor us | layer us | layer / floor | loop us | TFLOP/s |\n|---|---|---|---|---|---|---|---|"
    )
    for shape in args.shape:
        layer = Layer(shape, args.weights)
        for rows in args.rows:
            x = torch.randn(rows, layer.hidden, device="cuda").to(torch.bfloat16)
            _, ids = layer.ops["route"](CublasMatrix(layer.router, None)(x), layer.routing)
            floor = layer.floor_bytes(ids) / speed
            mine = timed(partial(layer.run, x))
            loop = f"{timed(layer.loop(x, ids)):.0f}" if rows <= args.loop_rows and args.weights == "bf16" else ""
            flops = (
                2
                * rows
                * (ids.shape[1] * layer.gate_up[0].numel() * 1.5 + (layer.shared[0].numel() * 1.5 if layer.shared else 0))
            )
            used = len(ids.unique())
            print(
                f"| {shape} | {rows} | {used} | {floor:.1f} | {mine:.1f} | {mine / floor:.2f} | {loop} | {flops / mine / 1e6:.1f} |",
                flush=True,
            )
        del layer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
