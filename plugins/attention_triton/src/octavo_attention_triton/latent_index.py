"""Choosing keys by an index (`kernels.index`), and making compressed entries (`kernels.compress`), over a backend's caches.

Owns the buffer of scores. Nothing is asked of the device: what may be captured has shapes from the limits alone.
"""

from __future__ import annotations

import torch
import triton
from octavo.interfaces import AttentionLayer, Limits, Step

from octavo_attention_triton.kernels.compress import compress_kernel
from octavo_attention_triton.kernels.index import choose_again_kernel, choose_kernel, score_kernel
from octavo_attention_triton.latent_chosen import Entries

SCORES = 1 << 25
"""Scores (float32) that are held at a time at most, one token's always; a step of more tokens is done in portions."""
BLOCKS = (1024, 16384)
"""Scores that a program chooses from: at least, where rows are short, and at most."""
EACH = 512
"""Scores of a warp: 16 of a thread, in registers."""


def _pow2(n: int) -> int:
    return int(triton.next_power_of_2(n))


class Index:
    """Scores and choices of index layers. One buffer serves all layers, for they run one after the other."""

    def __init__(self, limits: Limits, device: torch.device, dtype: torch.dtype, sms: int) -> None:
        self._limits, self._sms = limits, sms
        self._precision = "ieee" if dtype == torch.float32 else "tf32"
        line = limits.max_model_len
        self._scores = torch.empty(
            max(line, min(SCORES, line * limits.max_num_batched_tokens)), dtype=torch.float32, device=device
        )

    def choose(
        self, layer: AttentionLayer, entries: Entries, step: Step, q: torch.Tensor, weights: torch.Tensor, count: int
    ) -> torch.Tensor:
        """int32 [T, count], as `SparseBackend.choose` says."""
        tokens, heads = q.shape[:2]
        chosen = torch.empty(tokens, count, dtype=torch.int32, device=q.device)
        # A step of one token a row may be captured, and replayed with longer rows.
        longest = self._limits.max_model_len if step.host.max_query_len <= 1 else step.host.max_seq_len
        width = max(1, longest // entries.every)
        portion = max(1, self._scores.numel() // width)
        table = step.tables[entries.group]
        for at in range(0, tokens, portion):
            some = min(portion, tokens - at)
            part = slice(at, at + some)
            programs = max(1, min(triton.cdiv(width, 128), 4 * self._sms // some))
            score_kernel[(some, programs)](
                q[part], weights[part], entries.cache, table, step.token_rows[part], step.positions[part], self._scores,
                layer.scale * layer.k_scale, q.stride(0), q.stride(1), weights.stride(0), table.stride(0), entries.cache.stride(0), width,
                HEADS=heads, BLOCK_H=max(16, _pow2(heads)), DIM=layer.k_dim, BLOCK_D=max(16, _pow2(layer.k_dim)), BLOCK_N=64,
                PAGE=entries.page, EVERY=entries.every, PROGRAMS=programs, PRECISION=self._precision, STAGES=2, num_warps=4,
            )  # fmt: skip
            self._select(step.positions[part], chosen[part], width, count, entries.every)
        return chosen

    def _select(self, positions: torch.Tensor, chosen: torch.Tensor, width: int, count: int, every: int) -> None:
        """The best `count` of the buffer's scores, [tokens, width], for each of the tokens at `positions`."""
        tokens = len(positions)
        block = max(BLOCKS[0], min(BLOCKS[1], _pow2(width)))
        parts = triton.cdiv(width, block)
        found = torch.empty((tokens, parts, count) if parts > 1 else 1, dtype=torch.int32, device=chosen.device)
        choose_kernel[(tokens, parts)](
            self._scores, positions, chosen, found, width, COUNT=count, EVERY=every, BLOCK=block, PARTS=parts,
            BLOCK_C=min(1024, _pow2(count)), num_warps=max(4, block // EACH),
        )  # fmt: skip
        if parts > 1:
            wide = _pow2(parts * count)
            choose_again_kernel[(tokens,)](
                self._scores, positions, chosen, found, width, COUNT=count, EVERY=every, BLOCK=block, PARTS=parts, WIDE=wide,
                num_warps=max(4, min(32, wide // EACH)),
            )  # fmt: skip


def compress(entries: Entries, width: int, step: Step, places: torch.Tensor, *, overlapping: bool) -> torch.Tensor:
    """float32 [T, dim], as `SparseBackend.compress` says. width: values of an element of the cache, as many as gates."""
    rate, tokens = places.shape[0], len(step.positions)
    dim = width // 2 if overlapping else width
    out = torch.empty(tokens, dim, dtype=torch.float32, device=entries.cache.device)
    block = min(128, _pow2(dim))
    table = step.tables[entries.group]
    if tokens:
        compress_kernel[(tokens, triton.cdiv(dim, block))](
            entries.cache, table, step.token_rows, step.positions, places, out, table.stride(0), entries.cache.stride(0),
            DIM=dim, WIDTH=width, RATE=rate, OVERLAPPING=overlapping, PAGE=entries.page, BLOCK_D=block, BLOCK_T=8, num_warps=4,
        )  # fmt: skip
    return out
