"""Page geometry: where K and V of a token lie in one block of one layer. Owns the layout, loads nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.interfaces import CacheLayout, KVSpec

if TYPE_CHECKING:
    from torch import Tensor

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """One page, in elements: K [head, slot, k_row], then from v_base V [head, slot, v_row].

    Where v_transposed, V is [head, v_dim, slot]: FP8 values then reach the tensor cores with the tokens they are
    summed over side by side. k_row and v_row are the dims rounded up to `row_align` bytes.
    """

    heads: int
    k_dim: int
    v_dim: int
    page: int
    k_row: int
    v_row: int
    v_transposed: bool
    dtype: str

    @classmethod
    def of(cls, spec: KVSpec, block_size: int, *, row_align: int, v_transposed: bool) -> PageGeometry:
        """The geometry of a spec. Raises ValueError for a dtype that no kernel reads."""
        if spec.dtype not in ELEMENT_BYTES:
            raise ValueError(f"kv_dtype {spec.dtype}: the Triton backend stores {', '.join(ELEMENT_BYTES)}")
        step = max(1, row_align // ELEMENT_BYTES[spec.dtype])
        k_row, v_row = (-(-dim // step) * step for dim in (spec.k_dim, spec.v_dim))
        if v_transposed:
            v_row = spec.v_dim
        return cls(spec.heads, spec.k_dim, spec.v_dim, block_size, k_row, v_row, v_transposed, spec.dtype)

    @property
    def v_base(self) -> int:
        return self.heads * self.page * self.k_row

    @property
    def elements(self) -> int:
        return self.heads * self.page * (self.k_row + self.v_row)

    def unpack(self, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """K [length, heads, k_dim] and V [length, heads, v_dim] out of a row's pages [n, elements], in order."""
        k = pages[:, : self.v_base].view(-1, self.heads, self.page, self.k_row)[..., : self.k_dim].permute(0, 2, 1, 3)
        if self.v_transposed:
            v = pages[:, self.v_base :].view(-1, self.heads, self.v_dim, self.page).permute(0, 3, 1, 2)
        else:
            v = pages[:, self.v_base :].view(-1, self.heads, self.page, self.v_row)[..., : self.v_dim].permute(0, 2, 1, 3)
        return k.reshape(-1, self.heads, self.k_dim)[:length], v.reshape(-1, self.heads, self.v_dim)[:length]

    def layout(self) -> CacheLayout:
        v = f"V[head {self.heads}, dim {self.v_dim}, slot {self.page}]"
        if not self.v_transposed:
            v = f"V[head {self.heads}, slot {self.page}, {self.v_row}]"
        return CacheLayout(
            dtype=self.dtype,
            page_shape=(self.elements,),
            page_bytes=self.elements * ELEMENT_BYTES[self.dtype],
            order=f"K[head {self.heads}, slot {self.page}, {self.k_row}], {v}",
        )
