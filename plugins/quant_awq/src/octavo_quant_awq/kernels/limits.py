"""Rows of a step up to which each kernel serves, as measured on an H200 (benchmarks/RESULTS.md). Imports nothing."""

NARROW_ROWS = 8
"""narrow.cu, on Hopper, where a block has room for x and scales; other products are warpgroup.cu's."""
STATIONARY_ROWS = (2, 16)
"""stationary.cu, on Hopper: from the first to the last of these, where a block can hold x in registers."""
SPLIT_ROWS = (2, 16)
"""split.cu, on Hopper: from the first to the last of these, for matrices with many inputs and few outputs."""
RING_ROWS = 32
"""ring.cu, for matrices with too few outputs to fill the GPU with blocks of warpgroup.cu."""
WARPGROUP_ROWS = 3584
"""warpgroup.cu; with more rows, weights are made 16 bits wide and cuBLAS multiplies."""
OTHER_ROWS = 64
"""w4a16.cu on other GPUs, and the Triton kernel anywhere; more rows are dequantised."""
