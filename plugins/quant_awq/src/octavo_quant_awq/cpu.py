"""4-bit matrices on a CPU: half a byte a weight in memory, whichever product is used.

Owns two products. In bfloat16, torch's operator for 4-bit weights takes the steps of few rows (it unpacks into registers);
everything else is multiplied block by block, each dequantised into a buffer of bounded size.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

OPERATOR_GROUPS = (256, 128, 64, 32)
"""Groups that torch's operator knows."""
OPERATOR_ROWS = 48
"""Rows of x up to which torch's operator is faster than dequantising (SmolLM2's shapes, one thread)."""
PANEL = 64
"""Rows that torch's operator keeps together (fewer at the end of a matrix)."""
BUFFER = 1 << 20
"""Weights that are dequantised at a time."""


class CpuMatrix:
    """interfaces.Linear's product of one matrix [rows, inputs], filled by rows with the `put` methods, then `finish`ed.

    A byte holds two weights of a group, i and i + half of it. Once torch's operator is chosen, bytes lie as that wants them."""

    def __init__(self, rows: int, inputs: int, group: int, *, zeros: bool, bias: bool, dtype: torch.dtype) -> None:
        self._rows, self._inputs, self._group, self._dtype = rows, inputs, group, dtype
        groups = inputs // group
        self._bytes = torch.empty(rows, groups, -(-group // 2), dtype=torch.uint8)
        self._scales: Tensor | None = None
        self._zeros = torch.empty(rows, groups, dtype=torch.uint8) if zeros else None
        self._bias = torch.empty(rows, dtype=dtype) if bias else None
        self._panels: _Panels | None = None
        self.name = ""

    def put_q(self, at: int, q: Tensor) -> None:
        """q uint8 [rows, inputs], for rows from `at` on."""
        grouped = q.unflatten(1, (-1, self._group))
        if self._group % 2:
            grouped = F.pad(grouped, (0, 1))
        low, high = grouped.chunk(2, -1)
        self._bytes[at : at + len(q)] = low | high << 4

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
        for start in range(0, self._rows, PANEL):
            part = self._bytes[start : start + PANEL]
            wide = torch.cat((part & 15, part >> 4), -1).flatten(1).to(torch.int32)
            part.copy_(torch.ops.aten._convert_weight_to_int4pack_for_cpu(wide, 1).view_as(part))
        flat = self._bytes.view(self._rows, self._inputs // 2)
        self._panels = _Panels(flat, pairs.to(torch.bfloat16).transpose(0, 1).contiguous(), known)
        self._scales = self._zeros = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, rows]."""
        if self._panels is not None:
            y = self._panels(x.contiguous())
            return y if self._bias is None else y.add_(self._bias)
        out = x.new_empty(len(x), self._rows)
        step = max(1, BUFFER // self._inputs)
        for start in range(0, self._rows, step):
            stop = min(start + step, self._rows)
            bias = None if self._bias is None else self._bias[start:stop]
            out[:, start:stop] = F.linear(x, self.weights(start, stop), bias)
        return out

    def weights(self, start: int, stop: int) -> Tensor:
        """w [stop - start, inputs] in the model's dtype; start is a multiple of PANEL."""
        if self._panels is not None:
            return self._panels.weights(start, stop)
        assert self._scales is not None
        stored = self._bytes[start:stop]
        w = torch.empty(*stored.shape[:2], 2 * stored.shape[2], dtype=torch.float32)
        half = stored.shape[2]
        w[..., :half], w[..., half:] = stored & 15, stored >> 4
        w.sub_(8.0 if self._zeros is None else self._zeros[start:stop, :, None])
        w.mul_(self._scales[start:stop, :, None].float())
        return w[..., : self._group].flatten(1).to(self._dtype)


class _Panels:
    """Weights as torch's operator arranges them: PANEL rows at a time, for each input a line of their nibbles."""

    def __init__(self, stored: Tensor, pairs: Tensor, group: int) -> None:
        """stored uint8 [rows, inputs / 2]; pairs bfloat16 [groups, rows, 2]: (scale, offset) of (q - 8) * scale + offset."""
        self._stored, self._pairs, self._group = stored, pairs, group

    def __call__(self, x: Tensor) -> Tensor:
        rows, inputs = self._stored.shape[0], x.shape[1]
        if len(x) <= OPERATOR_ROWS:
            return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._stored, self._group, self._pairs)  # type: ignore[no-any-return]
        out = x.new_empty(len(x), rows)
        whole = rows // PANEL * PANEL
        step = max(1, BUFFER // inputs // PANEL) * PANEL
        for start, stop, width in [
            *((at, min(at + step, whole), PANEL) for at in range(0, whole, step)),
            *([(whole, rows, rows - whole)] if whole < rows else []),
        ]:
            w, order = self._lines(start, stop, width)
            y = x @ w.transpose(0, 1).flatten(1)  # [T, panels * width]
            place = torch.empty_like(order)
            place[order] = torch.arange(width)
            out[:, start:stop] = y.unflatten(1, (-1, width)).index_select(2, place).flatten(1)
        return out

    def _lines(self, start: int, stop: int, width: int) -> tuple[Tensor, Tensor]:
        """Panels of `width` rows: bfloat16 [panels, inputs, width], and which row of a panel each column is."""
        order = panel_order(width)
        assert order is not None
        stored = self._stored[start:stop].view((stop - start) // width, -1, width // 2)  # [panels, inputs, bytes]
        w = torch.empty(*stored.shape[:2], width, dtype=torch.bfloat16)
        w[..., : width // 2], w[..., width // 2 :] = stored & 15, stored >> 4
        columns = torch.cat((order[::2], order[1::2]))
        pairs = self._pairs[:, start:stop].unflatten(1, (-1, width))[:, :, columns]  # [groups, panels, width, 2]
        scale, offset = (part.transpose(0, 1).unsqueeze(2) for part in pairs.unbind(-1))
        grouped = w.sub_(8).unflatten(1, (-1, self._group))  # [panels, groups, group, width]
        return torch.addcmul(offset, grouped, scale).flatten(1, 2), columns

    def weights(self, start: int, stop: int) -> Tensor:
        """w [stop - start, inputs]; start is a multiple of PANEL."""
        found = []
        for at in range(start, stop, PANEL):
            width = min(PANEL, stop - at, self._stored.shape[0] - at)
            w, order = self._lines(at, at + width, width)
            place = torch.empty_like(order)
            place[order] = torch.arange(width)
            found.append(w[0].T[place])
        return torch.cat(found)


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
