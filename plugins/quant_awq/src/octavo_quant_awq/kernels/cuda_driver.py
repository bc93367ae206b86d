"""The CUDA files of this package as launches: `octavo.cuda`, with the headers and the grid that they share."""

from __future__ import annotations

from importlib import resources
from typing import Any

import torch
from octavo.cuda import Function, TensorMap, compile_source, tensor_map

__all__ = ["CudaFunction", "compile_file", "compile_source", "header", "tensor_map"]


def header(name: str) -> str:
    """The text of a file of this package, for `compile_file` to put before another."""
    return resources.files(__package__).joinpath(name).read_text()


def compile_file(name: str, defines: dict[str, int], device: torch.device, *, features: str = "", before: str = "") -> Any:
    """A module of common.cuh, the text `before` and a file of this package; the rest as `compile_source`."""
    source = "\n".join((header("common.cuh"), before, header(name)))
    return compile_source(source, defines, device, features=features)


class CudaFunction(Function):
    """A `Function` whose clusters lie along y."""

    def __call__(  # type: ignore[override]
        self,
        x: int,
        z: int,
        pointers: tuple[int, ...],
        numbers: tuple[int, ...],
        *,
        y: int | None = None,
        first: TensorMap | None = None,
    ) -> None:
        """Launch x * y * z blocks (y: the cluster's size unless given) with the tensor map `first`, if there is one, these addresses, then
        these int32."""
        super().__call__((x, y or self.cluster, z), pointers, numbers, by_value=() if first is None else (first,))
