"""4-bit matrices on a CPU: half a byte a weight in memory, whichever product is used.

Owns two products. In bfloat16, torch's operator for 4-bit weights takes the steps of few rows (it unpacks into registers);
everything else is multiplied block of rows by block of rows, each dequantised into a buffer that stays in cache.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

OPERATOR_GROUPS = (256, 128, 64, 32)
"""Groups that torch's operator knows."""
OPERATOR_ROWS = 24
"""Rows of x up to which torch's operator is faster than dequantising (measured on SmolLM2's shapes, one thread)."""
BUFFER = 1 << 19
"""Weights that are dequantised at a time."""


class CpuMatrix:
    """interfaces.Linear's product of one matrix [rows, inputs], filled by rows with the `put` methods, then `finish`ed."""

    def __init__(self, rows: int, inputs: int, group: int, *, zeros: bool, bias: bool, dtype: torch.dtype) -> None:
        self._rows, self._inputs, self._group, self._dtype = rows, inputs, group, dtype
        self._bytes = torch.empty(rows, -(-inputs // 2), dtype=torch.uint8)
        self._scales: Tensor | None = None
        self._zeros = torch.empty(rows, inputs // group, dtype=torch.uint8) if zeros else None
        self._bias = torch.empty(rows, dtype=dtype) if bias else None
        self._pairs: Tensor | None = None  # of torch's operator: (scale, offset) [groups, rows, 2]
        self.name = ""

    def put_q(self, at: int, q: Tensor) -> None:
        """q uint8 [rows, inputs], for rows from `at` on."""
        if q.shape[1] % 2:
            q = F.pad(q, (0, 1))
        self._bytes[at : at + len(q)] = q[:, ::2] | q[:, 1::2] << 4

    def put_scales(self, at: int, scales: Tensor) -> None:
        if self._scales is None:
            self._scales = torch.empty(self._rows, self._inputs // self._group, dtype=scales.dtype)
        self._scales[at : at + len(scales)] = scales

    def put_zeros(self, at: int, zeros: Tensor) -> None:
        assert self._zeros is not None
        self._zeros[at : at + len(zeros)] = zeros

    def put_bias(self, at: int, bias: Tensor) -> None:
        assert self._bias is not None
        self._bias[at : at + len(bias)] = bias

    def finish(self) -> None:
        """Choose the product; for torch's operator, rearrange in place."""
        assert self._scales is not None
        known = next((g for g in OPERATOR_GROUPS if self._group % g == 0), None)
        if self._dtype != torch.bfloat16 or known is None or self._rows % 16 or not has_operator():
            self.name = "dequantised by rows"
            return
        self.name = "int4 operator"
        scales = self._scales.float()
        offsets = scales * (8 - self._zeros.float()) if self._zeros is not None else torch.zeros_like(scales)
        pairs = torch.stack((scales, offsets), -1).repeat_interleave(self._group // known, 1)
        self._pairs, self._group = pairs.to(torch.bfloat16).transpose(0, 1).contiguous(), known
        self._scales = self._zeros = None
        for start in range(0, self._rows, PANEL):
            part = self._bytes[start : start + PANEL]
            wide = torch.stack((part & 15, part >> 4), -1).flatten(1)[:, : self._inputs].to(torch.int32)
            part.copy_(torch.ops.aten._convert_weight_to_int4pack_for_cpu(wide, 1).view_as(part))

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, rows]."""
        if self._pairs is not None and len(x) <= OPERATOR_ROWS:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), self._bytes, self._group, self._pairs)
            return y if self._bias is None else y.add_(self._bias)
        out = x.new_empty(len(x), self._rows)
        step = max(1, BUFFER // self._inputs // PANEL) * PANEL
        for start in range(0, self._rows, step):
            stop = min(start + step, self._rows)
            bias = None if self._bias is None else self._bias[start:stop]
            out[:, start:stop] = F.linear(x, self.weights(start, stop), bias)
        return out

    def weights(self, start: int, stop: int) -> Tensor:
        """w [stop - start, inputs] in the model's dtype; start is a multiple of PANEL."""
        if self._pairs is not None:
            return self._from_panels(start, stop)
        assert self._scales is not None
        w = _lookup(self._bytes[start:stop], self._dtype).flatten(1)[:, : self._inputs]
        w = w.view(stop - start, -1, self._group)
        if self._zeros is not None:
            w = w - self._zeros[start:stop, :, None].to(self._dtype) + 8
        scaled = w * self._scales[start:stop, :, None].to(torch.float32)
        return scaled.to(self._dtype).flatten(1)

    def _from_panels(self, start: int, stop: int) -> Tensor:
        """As above, from the arrangement of torch's operator."""
        assert self._pairs is not None
        found = []
        for at in range(start, stop, PANEL):
            rows = min(PANEL, stop - at)
            order = panel_order(rows)
            assert order is not None
            panel = self._bytes[at : at + rows].view(self._inputs, rows // 2)
            w = _lookup(panel, torch.bfloat16).flatten(1).view(-1, self._group, rows)  # [groups, group, rows in order]
            scale, offset = (part[:, at : at + rows][:, order].unsqueeze(1) for part in self._pairs.unbind(-1))
            place = torch.empty_like(order)
            place[order] = torch.arange(rows)
            found.append(torch.addcmul(offset, w, scale).flatten(0, 1).T[place])
        return torch.cat(found)


PANEL = 64
"""Rows that torch's operator keeps together (fewer at the end of a matrix)."""


@cache
def _table(dtype: torch.dtype) -> Tensor:
    """[256, 2]: the two weights of a byte, q - 8, the low nibble first."""
    byte = torch.arange(256)
    return (torch.stack((byte & 15, byte >> 4), -1) - 8).to(dtype)


def _lookup(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [...] -> [..., 2] of `dtype`: q - 8."""
    return F.embedding(stored.to(torch.int32), _table(dtype))


@cache
def panel_order(rows: int) -> Tensor | None:
    """Which row of a panel of `rows` each nibble of torch's arrangement holds, low nibble first; found by arranging row
    numbers. None if the arrangement is not one line of all rows for each input, which this module could not read."""
    number = torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, 2).contiguous()
    digits = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(number >> shift & 15, 1).view(2, -1) for shift in (0, 4)]
    low, high = (torch.stack((d & 15, d >> 4), -1).flatten(1).long() for d in digits)
    lines = low + 16 * high
    good = torch.equal(lines[0], lines[1]) and torch.equal(lines[0].sort().values, torch.arange(rows))
    return lines[0] if good else None


@cache
def has_operator() -> bool:
    """Whether this torch has the operators for 4-bit weights on a CPU, in an arrangement that can be read back."""
    ops = torch.ops.aten
    if not (hasattr(ops, "_weight_int4pack_mm_for_cpu") and hasattr(ops, "_convert_weight_to_int4pack_for_cpu")):
        return False
    return all(panel_order(rows) is not None for rows in (16, 32, 48, 64))
