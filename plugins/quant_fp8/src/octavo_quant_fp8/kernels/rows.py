"""y = x W^T, both e4m3, in CUDA: the launches of rows.cu, and which of its shapes serves which product.

Owns compiled variants, one for each shape of a block, and the tensor maps of inputs that were seen before. Compiling happens when a
variant is first asked for, which must be before a graph is captured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from importlib.util import find_spec

import torch
from octavo.cuda import Function, TensorMap, compile_source, tensor_map
from octavo.interfaces import Activation
from torch import Tensor

OUT = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
TOKENS = (8, 16, 32, 64, 128, 256)
"""Rows of x that an instruction may take; more are more blocks."""
ROOM = 224 << 10
"""Bytes of shared memory that a block may take, its barriers not counted."""


@dataclass(frozen=True, slots=True)
class Shape:
    """tokens: rows of x that an instruction takes; groups: warpgroups of 64 outputs; chunks of 128 inputs a tile; stages and x_stages: tiles
    of weights and of x in flight; split: blocks that divide K among them; min_blocks that a multiprocessor must hold; box: rows that one copy
    takes."""

    tokens: int
    groups: int
    chunks: int
    stages: int
    x_stages: int
    split: int = 1
    min_blocks: int = 1
    box: int = 64

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def shared(self) -> int:
        """Bytes: tiles in flight, and the sums that other blocks send, or afterwards the block's own."""
        sums = 4 * self.tokens * self.rows
        if self.split == 1:
            return max(self._tiles, sums + 16 * self.tokens)
        return max(self._tiles, sums) if self.reuse else self._tiles + sums

    @property
    def reuse(self) -> bool:
        """Whether sums that are sent take the room of tiles, since both do not fit."""
        return self.split > 1 and self._tiles + 4 * self.tokens * self.rows > ROOM

    @property
    def _tiles(self) -> int:
        return 128 * self.chunks * (self.stages * self.rows + self.x_stages * self.tokens)


@cache
def function(shape: Shape, dtype: torch.dtype, bias: bool, device: torch.device) -> Function:
    """The compiled kernel for results of dtype; the first call compiles."""
    module = compile_source(source(shape.tokens), macros(shape, dtype, bias), device, features="a")
    return Function(
        module,
        "rows",
        threads=128 * shape.groups + 32,
        cluster=shape.split,
        shared=shape.shared,
        dependent=True,
        prefer_shared=True,
    )


def macros(shape: Shape, dtype: torch.dtype, bias: bool) -> dict[str, int]:
    """What rows.cu is compiled with."""
    return {
        "TOKENS": shape.tokens, "GROUPS": shape.groups, "STAGES": shape.stages, "X_STAGES": shape.x_stages, "SPLIT": shape.split,
        "REUSE": int(shape.reuse), "MIN_BLOCKS": shape.min_blocks, "CHUNKS": shape.chunks, "BOX": shape.box, "OUT": OUT[dtype],
        "BIAS": int(bias),
    }  # fmt: skip


def choose_shape(m: int, n: int, k: int, *, alone: bool = False) -> Shape | None:
    """The block for m rows times weights [n, k]; None where another kernel is faster. alone: there is no other for many rows. From sweeps of a
    whole layer on an H200: for few rows the fastest leave room beside them for a block of the next product, whose weights are then in flight
    before it begins; for more, x itself needs the room."""
    tokens = next((t for t in TOKENS if t >= m), 0)
    wide, narrow, long = n >= 16384, n <= 4096, k >= 8192
    if alone and m > 64:
        return Shape(128, 2, 1, 5, 4) if m <= 128 else Shape(256, 2, 1, 4, 4)
    if not 1 < m <= TOKENS[-1] or k < 1024:
        return None
    if tokens == 256:  # enough tiles for the library, but where K is long or outputs are few
        return Shape(tokens, 1, 1, 8, 4, 2) if not wide and (long or (narrow and k >= 4096)) else None
    if tokens == 128:
        if wide:
            return None
        return Shape(tokens, 1, 1, 8, 6, 2) if long else Shape(tokens, 1, 1, 8, 4, 2) if narrow else Shape(tokens, 1, 1, 8, 6)
    for_wide, for_long, for_narrow, otherwise = _FEW[tokens]
    if wide:
        return for_wide
    if long:  # of many outputs there are blocks enough
        return for_long if narrow else replace(for_long, split=for_long.split // 2)
    return for_narrow if narrow else otherwise


_FEW = {
    8: (Shape(8, 2, 1, 6, 4), Shape(8, 1, 2, 4, 3, 4), Shape(8, 1, 2, 4, 3, 4), Shape(8, 1, 2, 5, 3, 2)),
    16: (Shape(16, 2, 1, 5, 4), Shape(16, 1, 2, 7, 3, 2), Shape(16, 1, 2, 4, 3, 2), Shape(16, 1, 2, 4, 3, 2)),
    32: (Shape(32, 2, 1, 6, 4), Shape(32, 1, 1, 16, 6, 2), Shape(32, 1, 1, 5, 6, 4), Shape(32, 1, 2, 5, 3, 2)),
    64: (Shape(64, 2, 1, 5, 4), Shape(64, 1, 2, 6, 6, 2), Shape(64, 1, 2, 5, 4, 2), Shape(64, 1, 2, 6, 6)),
}
"""By rows of x: for weights with many outputs, for long ones, for others with few outputs, and between."""


def source(tokens: int) -> str:
    """rows.cu behind the function wgmma: c [64, tokens] += a b, both in shared memory, 32 inputs."""
    count = tokens // 2
    listed = ", ".join(f"%{i}" for i in range(count))
    results = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    instruction = (
        "typedef unsigned int u32;\n"
        f"__device__ __forceinline__ void wgmma(float (&c)[{count}], unsigned long long a, unsigned long long b) {{\n"
        f'    asm volatile("wgmma.mma_async.sync.aligned.m64n{tokens}k32.f32.e4m3.e4m3 {{{listed}}}, %{count}, %{count + 1}, 1, 1, 1;"\n'
        f'        : {results} : "l"(a), "l"(b));\n}}\n'
    )
    return instruction + resources.files(__package__).joinpath("rows.cu").read_text()


def launch(
    call: Function, shape: Shape, weights: TensorMap, inputs: TensorMap, x_scale: Tensor, scale: Tensor, bias: Tensor | None,
    out: Tensor, k: int,
) -> Tensor:  # fmt: skip
    """out [M, N] = x [M, k] W^T, times scale [N] and x_scale [M], plus bias [N] of out's dtype. The maps are of W with `shape.box` and of
    x with `shape.tokens` rows."""
    m, n = out.shape
    pointers = (x_scale.data_ptr(), scale.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr())
    call((-(-n // shape.rows), shape.split, -(-m // shape.tokens)), pointers, (m, n, k), by_value=(weights, inputs))
    return out


_inputs: dict[tuple[int, int, int, int], TensorMap] = {}
KEPT = 4096
"""Tensor maps of inputs that are kept: making one takes the driver several microseconds, and memory is used again and again."""


def padded_rows(m: int) -> int:
    """Rows of memory that m rows of x should have: as many as an instruction takes. What lies past the last is never used, but copies that
    reach over the end of the memory they know take long: 72 of 128 rows half as long again as 128, 136 of 256 twice as long as 256."""
    return next((t for t in TOKENS if t >= m), m)


def _input_map(x: Tensor, rows: int) -> TensorMap:
    """Of x, with the rows behind its last that belong to the same memory up to a whole number of boxes."""
    padded = -(-x.shape[0] // rows) * rows
    if x.untyped_storage().nbytes() >= (x.storage_offset() + padded * x.shape[1]) * x.element_size():
        x = x.as_strided((padded, x.shape[1]), (x.shape[1], 1))
    key = (x.data_ptr(), *x.shape, rows)
    found = _inputs.get(key)
    if found is None:
        if len(_inputs) >= KEPT:
            _inputs.clear()
        found = _inputs[key] = tensor_map(x, (128, rows))
    return found


def supported(device: torch.device, n: int, k: int) -> bool:
    """Whether weights [n, k] can be multiplied here: warpgroup instructions, a compiler, rows that the copy engine takes."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and find_spec("cupy") is not None and n % 16 == 0 and k % 16 == 0


class FewRows:
    """The product of weights e4m3 [N, K], with a scale float32 [N] and perhaps a bias [N] of `dtype`, for inputs of few rows."""

    def __init__(self, data: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._data, self._scale, self._bias, self._dtype = data, scale, bias, dtype
        self._alone = dtype == torch.float32
        self._maps: dict[int, TensorMap] = {}

    def serves(self, m: int) -> bool:
        """Whether this is the fastest for m rows."""
        return choose_shape(m, *self._data.shape, alone=self._alone) is not None

    def __call__(self, q: Activation) -> Tensor:
        """q e4m3 [M, K], dense, with a scale a row -> [M, N]."""
        (m, k), n = q.data.shape, self._data.shape[0]
        shape = choose_shape(m, n, k, alone=self._alone)
        assert shape is not None, f"{m} rows of {n} x {k} are another kernel's"
        if shape.box not in self._maps:
            self._maps[shape.box] = tensor_map(self._data, (128, shape.box))
        out = torch.empty(m, n, dtype=self._dtype, device=q.data.device)
        call = function(shape, self._dtype, self._bias is not None, q.data.device)
        inputs = _input_map(q.data, shape.tokens)
        return launch(call, shape, self._maps[shape.box], inputs, q.scale, self._scale, self._bias, out, k)
