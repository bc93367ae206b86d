"""What lies between the QKV product and attention, in one kernel: RMS norm of each q and k head, RoPE, and the
store of K and V into the paged cache (write.py has its layout).

One program takes a few heads of one token: q heads are turned in place, K heads are turned and stored, V heads are
stored. The two halves of a head, which the rotation mixes, lie in two tiles of equal shape, so no value crosses
threads but in the sum of squares. Arithmetic is float32; a key is rounded to the model's dtype before it is
quantised, as if it had been written out. Stores nothing for a negative slot. Never reads the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_attention_triton.kernels.write import quantised


@triton.jit
def _keep(
    x, d, mask, key, value, kv, offset, page_ptr, k_scale, v_scale, limit,
    DIM: tl.constexpr, PAGE: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_BASE: tl.constexpr,
    V_TRANSPOSED: tl.constexpr, QUANTISE: tl.constexpr,
):  # fmt: skip
    """Columns d of K and V heads into their page."""
    k_at = page_ptr + (kv * PAGE + offset) * K_ROW + d
    if V_TRANSPOSED:
        v_at = page_ptr + V_BASE + (kv * DIM + d) * PAGE + offset
    else:
        v_at = page_ptr + V_BASE + (kv * PAGE + offset) * V_ROW + d
    x = quantised(x, tl.where(key, k_scale, v_scale), limit, QUANTISE)
    tl.store(tl.where(key, k_at, v_at), x.to(page_ptr.dtype.element_ty), mask=mask & (key | value))


@triton.jit
def prologue_kernel(
    qkv_ptr, weight_ptr, cos_ptr, sin_ptr, slots_ptr, cache_ptr,
    eps, k_scale, v_scale, limit, token_stride, page_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
    PAGE: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_BASE: tl.constexpr, V_TRANSPOSED: tl.constexpr, QUANTISE: tl.constexpr,
    VALUES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first ROTARY of DIM dimensions turn; the rest, BLOCK_REST wide (0: there is none), are only normalised. V is stored where
    VALUES; else write.py's `values_kernel` does it, and the grid ends with the K heads."""
    HALF: tl.constexpr = ROTARY // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    query = head < HEADS
    key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS) & VALUES
    turns = query | key
    kv = tl.where(key, head - HEADS, head - HEADS - KV_HEADS)
    j = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (j < HALF) & (turns | value)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots_ptr + token)
    page_ptr = cache_ptr + (slot // PAGE) * page_stride
    offset = slot % PAGE

    row = qkv_ptr + token * token_stride + head * DIM
    a = tl.load(row + j, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(row + HALF + j, mask=inside, other=0.0).to(tl.float32)
    angle = token * ROTARY + j
    cos_a = tl.load(cos_ptr + angle, mask=j < HALF, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + angle + HALF, mask=j < HALF, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + angle, mask=j < HALF, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + angle + HALF, mask=j < HALF, other=0.0).to(tl.float32)
    r = ROTARY + tl.arange(0, max(BLOCK_REST, 1))[None, :]
    rest = (r < DIM) & (turns | value)
    c = tl.load(row + r, mask=rest, other=0.0).to(tl.float32)
    x, y, z = a, b, c
    if NORM:
        squares = tl.sum(a * a + b * b, axis=1) + tl.sum(c * c, axis=1)
        scale = (1.0 / tl.sqrt_rn(squares / DIM + eps))[:, None]
        weight = weight_ptr + head * DIM
        x = a * scale * tl.load(weight + j, mask=inside & turns, other=0.0).to(tl.float32)
        y = b * scale * tl.load(weight + HALF + j, mask=inside & turns, other=0.0).to(tl.float32)
        z = c * scale * tl.load(weight + r, mask=rest & turns, other=0.0).to(tl.float32)
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    x, y = (x * cos_a + y * sin_a).to(dtype), (y * cos_b + x * sin_b).to(dtype)
    tl.store(row + j, x, mask=inside & query)
    tl.store(row + HALF + j, y, mask=inside & query)
    # Values are what they were: a product with an angle could make a NaN of an infinity.
    x, y = tl.where(value, a, x.to(tl.float32)), tl.where(value, b, y.to(tl.float32))
    if (tl.program_id(1) + 1) * BLOCK_H > HEADS:  # not for query heads alone: quantising divides
        held = inside & (slot >= 0)
        _keep(x, j, held, key, value, kv, offset, page_ptr, k_scale, v_scale, limit,
              DIM, PAGE, K_ROW, V_ROW, V_BASE, V_TRANSPOSED, QUANTISE)  # fmt: skip
        _keep(y, HALF + j, held, key, value, kv, offset, page_ptr, k_scale, v_scale, limit,
              DIM, PAGE, K_ROW, V_ROW, V_BASE, V_TRANSPOSED, QUANTISE)  # fmt: skip
    if BLOCK_REST:
        z = z.to(dtype)
        tl.store(row + r, z, mask=rest & query)
        z = tl.where(value, c, z.to(tl.float32))
        _keep(z, r, rest & (slot >= 0), key, value, kv, offset, page_ptr, k_scale, v_scale, limit,
              DIM, PAGE, K_ROW, V_ROW, V_BASE, V_TRANSPOSED, QUANTISE)  # fmt: skip
