"""Whether a preempted sequence is swapped to host memory or computed again: the cost model, and its two rates.

Owns an estimate of seconds; decides by it and by nothing else, so that a test can say what it wants.

    swap       2 * blocks * block_bytes / bandwidth                 out now, and back in later
    recompute  (2 * parameters * n + 2 * attention * n * n / 2) / rate     n tokens in one prefill

parameters: of the model, all of which a token multiplies (a mixture of experts uses fewer: recompute is
then overestimated and swap chosen more often). attention: per pair of positions, heads * (k_dim + v_dim) over
all layers, half of the pairs being causal; a window bounds n. bandwidth and rate are measured on the
device when the engine is built.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.interfaces import AttentionLayer

if TYPE_CHECKING:
    import torch

PREFILL_EFFICIENCY = 0.5
"""Share of a plain matrix product's rate that a whole prefill reaches: norms, attention, small products."""

COPY_BYTES = 32 << 20
REPEATS = 3


@dataclass(frozen=True, slots=True)
class SwapCost:
    """bandwidth: bytes/s between pool and host memory, one way. rate: multiply-adds count twice, per second."""

    block_bytes: int
    bandwidth: float
    parameters: int
    layers: tuple[AttentionLayer, ...]
    rate: float

    def swap_seconds(self, blocks: int) -> float:
        return 2 * blocks * self.block_bytes / self.bandwidth

    def recompute_seconds(self, tokens: int) -> float:
        pairs = sum(layer.num_heads * (layer.k_dim + layer.v_dim) * _pairs(tokens, layer.window) for layer in self.layers)
        return 2.0 * (self.parameters * tokens + pairs) / self.rate

    def pays(self, tokens: int, blocks: int) -> bool:
        """Whether `blocks` blocks are sooner copied out and back than their `tokens` tokens computed again."""
        return self.swap_seconds(blocks) < self.recompute_seconds(tokens)

    def __str__(self) -> str:
        return (
            f"{self.bandwidth / 1e9:.1f} GB/s to host memory and back, {self.rate / 1e12:.2f} TFLOP/s of prefill: a sequence of "
            f"1,024 tokens is recomputed in {self.recompute_seconds(1024) * 1e3:.2f} ms"
        )


def _pairs(tokens: int, window: int | None) -> float:
    """Pairs of a query and a key that it sees."""
    if window is None or tokens <= window:
        return tokens * (tokens + 1) / 2
    return window * (window + 1) / 2 + (tokens - window) * window


def policy(mode: str, cost: SwapCost | None) -> Callable[[int, int], bool]:
    """swap_pays of a scheduler, for --preemption-mode."""
    if mode == "swap":
        return lambda tokens, blocks: True
    if mode == "recompute" or cost is None:
        return lambda tokens, blocks: False
    return cost.pays


def measure(device: torch.device, dtype: str, block_bytes: int, weight_bytes: int, layers: Sequence[AttentionLayer]) -> SwapCost:
    """Measure this device's two rates (some ten milliseconds) and return the model's costs."""
    import torch

    kind = getattr(torch, dtype)
    return SwapCost(
        block_bytes,
        _bandwidth(device),
        weight_bytes // kind.itemsize,
        tuple(layers),
        _product_rate(device, kind) * PREFILL_EFFICIENCY,
    )


def _bandwidth(device: torch.device) -> float:
    import torch

    cuda = device.type == "cuda"
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=cuda)
    pool = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)

    def there_and_back() -> None:
        host.copy_(pool, non_blocking=True)
        pool.copy_(host, non_blocking=True)

    return 2 * COPY_BYTES / _best(there_and_back, device)


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    import torch

    n = 4096 if device.type == "cuda" else 512
    a, b = torch.ones((n, n), dtype=dtype, device=device), torch.ones((n, n), dtype=dtype, device=device)
    return 2.0 * n**3 / _best(lambda: torch.mm(a, b), device)


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few runs, after one that does not count."""
    import torch

    def once() -> float:
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    return min(once() for _ in range(REPEATS))
