"""Where K and V of a token lie in one block of one layer: the host's side of cuda/layout.cuh. Loads nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
from octavo.interfaces import CacheLayout, KVSpec

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
CHUNK = 16
"""Bytes that are moved as one: what a lane of ldmatrix addresses."""


PANEL = 128
"""Bytes of a panel, where a row is a multiple of it; other rows are one panel."""


def panel_bytes(row_bytes: int) -> int:
    return PANEL if row_bytes % PANEL == 0 else row_bytes


def swizzle(slot: np.ndarray, row_bytes: int) -> np.ndarray:
    """What the chunk numbers of a slot's row are XORed with, so that rows 0 to 7 of a column lie in different banks."""
    span = gcd(panel_bytes(row_bytes) // CHUNK, 8)
    return slot % 8 // (8 // span) % span


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """One page: for each head K [panel, slot, panel's dims], then V likewise, the chunks of every row swizzled."""

    heads: int
    k_dim: int
    v_dim: int
    page: int
    dtype: str

    @classmethod
    def of(cls, spec: KVSpec, block_size: int) -> PageGeometry:
        """The geometry of a spec. Raises ValueError for what no kernel reads."""
        if spec.kind not in ("full", "window") or spec.tokens_per_entry != 1:
            raise ValueError(
                f"KV spec of kind {spec.kind} with {spec.tokens_per_entry} tokens an entry: this backend holds K and V of every token"
            )
        if spec.dtype not in ELEMENT_BYTES:
            raise ValueError(f"kv_dtype {spec.dtype}: the CuPy backend stores {', '.join(ELEMENT_BYTES)}")
        if spec.k_dim % 16 or spec.v_dim % 16:
            raise ValueError(f"head dims {spec.k_dim} and {spec.v_dim}: both must be multiples of 16")
        if block_size % 8:
            raise ValueError(f"block_size {block_size}: it must be a multiple of 8")
        return cls(spec.heads, spec.k_dim, spec.v_dim, block_size, spec.dtype)

    @property
    def element(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def elements(self) -> int:
        return self.heads * self.page * (self.k_dim + self.v_dim)

    def layout(self) -> CacheLayout:
        k, v = (self._order(name, dim) for name, dim in (("K", self.k_dim), ("V", self.v_dim)))
        return CacheLayout(
            dtype=self.dtype,
            page_shape=(self.elements,),
            page_bytes=self.elements * self.element,
            order=f"head {self.heads} of ({k}, {v}), 16-byte chunks of a row swizzled by slot",
        )

    def _order(self, name: str, dim: int) -> str:
        width = panel_bytes(dim * self.element) // self.element
        return f"{name}[panel {dim // width}, slot {self.page}, {width}]"

    def places(self, dim: int) -> np.ndarray:
        """int64 [page, dim]: where each element of each slot is stored, in elements from the start of its head's K or V."""
        width = panel_bytes(dim * self.element)
        slot = np.arange(self.page)[:, None]
        panel, byte = np.divmod(np.arange(dim)[None, :] * self.element, width)
        chunk = (byte // CHUNK) ^ swizzle(slot, dim * self.element)
        return ((panel * self.page + slot) * width + chunk * CHUNK + byte % CHUNK) // self.element
