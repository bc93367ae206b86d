"""What octavo.cuda hands to the driver, without a driver: a stand-in keeps the calls."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from octavo import cuda


class Driver:
    """Answers every call with `status`; launches are read while their memory lives, as the real driver does."""

    def __init__(self, *sizes: int) -> None:
        self.status, self.sizes = 0, sizes
        self.attributes: list[tuple[int, int]] = []
        self.launches: list[SimpleNamespace] = []
        self.maps: list[tuple[Any, ...]] = []

    def cuFuncGetAttribute(self, value: Any, attribute: int, function: Any) -> int:
        value._obj.value = next((given for name, given in reversed(self.attributes) if name == attribute), 0)
        return self.status

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.attributes.append((attribute, value))
        return self.status

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: None) -> int:
        config = config._obj
        words = {config.attributes[i].id: tuple(config.attributes[i].value)[:3] for i in range(config.count)}
        seen = [ctypes.string_at(address, size) for address, size in zip(arguments, self.sizes, strict=True)]
        shape = (tuple(config.grid), tuple(config.block), config.shared, config.stream)
        self.launches.append(SimpleNamespace(shape=shape, attributes=words, arguments=seen))
        return self.status

    def cuTensorMapEncodeTiled(self, made: Any, kind: int, rank: int, address: Any, *rest: Any) -> int:
        size, stride, box = (tuple(numbers) for numbers in rest[:3])
        self.maps.append((ctypes.addressof(made._obj) % 64, kind, address.value, size, stride, box))
        return self.status

    def cuGetErrorName(self, status: int, text: Any) -> None:
        text._obj.value = b"CUDA_ERROR_INVALID_VALUE"

    def cuGetErrorString(self, status: int, text: Any) -> None:
        text._obj.value = b"invalid argument"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(cuda, "driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    return made


MODULE = SimpleNamespace(get_function=lambda name: SimpleNamespace(kernel=SimpleNamespace(ptr=0x5000)))


def test_a_launch_passes_maps_then_addresses_then_numbers_by_their_type(driver: Driver) -> None:
    driver.sizes = (128, 8, 8, 4, 4)
    described = cuda.TensorMap()
    described.words[:] = range(16)
    cuda.Function(MODULE, "rows", threads=96)((4, 2, 1), (0x1234, 0), (-3, 0.5), by_value=(described,))
    (launch,) = driver.launches
    assert launch.shape == ((4, 2, 1), (96, 1, 1), 0, 7)
    assert launch.arguments == [
        bytes(described), bytes(ctypes.c_void_p(0x1234)), bytes(8), bytes(ctypes.c_int(-3)), bytes(ctypes.c_float(0.5)),
    ]  # fmt: skip


def test_only_what_a_function_asks_for_is_an_attribute_of_its_launch(driver: Driver) -> None:
    cuda.Function(MODULE, "plain", threads=32)((1, 1, 1), (), ())
    cuda.Function(MODULE, "both", threads=32, cluster=4, dependent=True)((1, 4, 1), (), ())
    assert [launch.attributes for launch in driver.launches] == [{}, {4: (1, 4, 1), 6: (1, 0, 0)}]


def test_permission_for_shared_memory_is_asked_for_where_it_is_needed(driver: Driver) -> None:
    cuda.Function(MODULE, "small", threads=32, shared=48 << 10)
    assert driver.attributes == []
    cuda.Function(MODULE, "large", threads=32, shared=100_000, prefer_shared=True)
    assert driver.attributes == [(8, 100_000), (9, 100)]
    cuda.Function(MODULE, "large", threads=32, shared=80_000)
    assert driver.attributes == [(8, 100_000), (9, 100)], "less would refuse launches of the one before, whose function it shares"
    cuda.Function(MODULE, "large", threads=32, shared=120_000)
    assert driver.attributes[2:] == [(8, 120_000)]


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, 1), (torch.uint8, 0)])
def test_a_tensor_map_says_how_the_matrix_lies(driver: Driver, dtype: torch.dtype, kind: int) -> None:
    matrix = torch.zeros(6, 256, dtype=dtype)[:, :192]
    cuda.tensor_map(matrix, (64, 8))
    stride = 256 * matrix.element_size()
    assert driver.maps == [(0, kind, matrix.data_ptr(), (192, 6), (stride,), (64, 8))], "at a multiple of 64 bytes, columns first"


def test_a_refusal_says_what_was_asked_for_and_why_not(driver: Driver) -> None:
    call = cuda.Function(MODULE, "rows", threads=96, cluster=2, shared=512)
    driver.status = 1
    with pytest.raises(
        RuntimeError, match=r"rows .*96 threads.* 512 bytes.* 4 x 2 x 1 blocks.*CUDA_ERROR_INVALID_VALUE \(1\): inv"
    ):
        call((4, 2, 1), (), ())
    with pytest.raises(RuntimeError, match=r"boxes \[64, 8\] for a matrix \[3, 64\].*CUDA_ERROR_INVALID_VALUE"):
        cuda.tensor_map(torch.zeros(3, 64, dtype=torch.float16), (64, 8))
    with pytest.raises(RuntimeError, match=r"rows .*200000 bytes.*invalid argument"):
        cuda.Function(MODULE, "rows", threads=96, shared=200_000)


def test_importing_it_imports_no_compiler() -> None:
    code = "import sys, octavo.cuda; print(' '.join({'cupy', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
