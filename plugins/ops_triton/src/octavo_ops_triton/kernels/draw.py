"""Sampling: the Gumbel-max draw (Gumbel 1954; Maddison et al. 2014) from softmax(logits / temperature).

argmax of logit / T + g with independent standard Gumbel g has the distribution of the softmax, so one pass over
the logits draws, without their maximum, their sum or an order among them. Computed as logit + T g, which has the same
argmax, cannot overflow where T is tiny, and is the greedy choice at T = 0.

Noise is a pure function of (seed, position, token): Philox4x32 (Salmon et al. 2011) of 7 rounds, the fewest that
pass BigCrush. Key: the seed's low and high 32 bits. Counter: (512 * (token // 2048) + token % 512, position's low
32 bits, its high 32 bits, 0). Of its four words the one numbered (token % 2048) // 512 belongs to the token: so a
tile of 512 counters covers 2048 neighbouring tokens, each quarter of which is loaded side by side. A word w gives
u = (w + 1/2) / 2^32, and g = -ln(-ln(1 - u)). Small u make large g, and there u keeps all its bits: a token of
probability 1e-9 has its chance.

A row is split over programs; each leaves its best, and a second kernel chooses among them. Comparing is exact, so
how a row is split changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_ops_triton.launch import Launcher, begin, rows

QUARTER = 512
TILE = 4 * QUARTER
PROGRAMS = 4096
"""About how many programs share a step's logits, so that the last ones to run are a small part of the whole."""

LN2 = tl.constexpr(0.6931471805599453)
ROUNDS = tl.constexpr(7)
LARGEST_TEMPERATURE = tl.constexpr(1e30)
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def _log2(x):
    """The hardware's logarithm: off by 2^-22 at most, in one instruction where the exact one takes a dozen."""
    if COMPILED:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.log2(x)


@triton.jit
def gumbel(word):
    """Standard Gumbel noise of a uint32: from about -2.8 to 22.9."""
    u = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    u = tl.minimum(u, 0.99999994)  # words next to 2^32 round to 1, which has no logarithm to offer
    # -ln(1 - u): near 0 by its series, because 1 - u forgets there the bits that tell large noise apart
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * 0.2))))
    exponential = tl.where(u < 0.0625, series, -LN2 * _log2(1.0 - u))
    return -LN2 * _log2(exponential)


@triton.jit
def _better(best, at, bad, score, logit, token):
    """Keep the larger score, of equal ones the one met first: a lane meets its tokens in ascending order."""
    wins = score > best
    return tl.where(wins, score, best), tl.where(wins, token, at), bad | ~(logit < float("inf"))


@triton.jit
def _quarter(row_ptr, token, word, temperature, vocab, best, at, bad, NOISE: tl.constexpr):
    logit = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    score = logit
    if NOISE:
        score += temperature * gumbel(word)
    return _better(best, at, bad, score, logit, token)


@triton.jit
def _scan(row_ptr, seed, position, temperature, vocab, begin_tile, end_tile, NOISE: tl.constexpr, QUARTER: tl.constexpr):
    """Best score, its token, and whether any logit is NaN or +inf, of the tiles from begin_tile to end_tile."""
    lane = tl.arange(0, QUARTER)
    best = tl.full([QUARTER], float("-inf"), tl.float32)
    at = lane * 0
    bad = lane < 0
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for tile in range(begin_tile, end_tile):
        counter = (tile * QUARTER + lane).to(tl.uint32)
        w0, w1, w2, w3 = counter, counter, counter, counter
        if NOISE:
            zero = counter * 0
            w0, w1, w2, w3 = tl.philox(seed, counter, low + zero, high + zero, zero, ROUNDS)
        token = tile * (4 * QUARTER) + lane
        best, at, bad = _quarter(row_ptr, token, w0, temperature, vocab, best, at, bad, NOISE)
        best, at, bad = _quarter(row_ptr, token + QUARTER, w1, temperature, vocab, best, at, bad, NOISE)
        best, at, bad = _quarter(row_ptr, token + 2 * QUARTER, w2, temperature, vocab, best, at, bad, NOISE)
        best, at, bad = _quarter(row_ptr, token + 3 * QUARTER, w3, temperature, vocab, best, at, bad, NOISE)
    top = tl.max(best)
    return top, tl.min(tl.where(best == top, at, 2147483647)), tl.max(bad.to(tl.int32))


@triton.jit(do_not_specialize=["tiles_each", "splits"])
def scan_kernel(
    logits_ptr, temperature_ptr, seed_ptr, position_ptr, best_ptr, at_ptr, bad_ptr, tiles_each, splits,
    ROW_STRIDE: tl.constexpr, VOCAB: tl.constexpr, TILES: tl.constexpr, QUARTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of one row: tiles_each tiles."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    begin(PDL)
    temperature = tl.minimum(tl.load(temperature_ptr + row), LARGEST_TEMPERATURE)
    row_ptr = logits_ptr + row * ROW_STRIDE
    first = split * tiles_each
    last = tl.minimum(first + tiles_each, TILES)
    # A row without noise costs no random numbers.
    if temperature > 0:
        seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
        best, at, bad = _scan(row_ptr, seed, position, temperature, VOCAB, first, last, True, QUARTER)
    else:
        zero = row * 0
        best, at, bad = _scan(row_ptr, zero, zero, temperature, VOCAB, first, last, False, QUARTER)
    place = row * splits + split
    tl.store(best_ptr + place, best)
    tl.store(at_ptr + place, at)
    tl.store(bad_ptr + place, bad)


@triton.jit(do_not_specialize=["splits"])
def choose_kernel(
    best_ptr, at_ptr, bad_ptr, tokens_ptr, failed_ptr, table_ptr, slots_ptr, position_ptr, splits,
    TABLE_STRIDE: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best of one row's splits. Ids ascend with splits, so of equal scores the lowest id is the lowest of all.
    KEEP: the token is also written where the next step looks for it."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < splits
    begin(PDL)
    best = tl.load(best_ptr + row * splits + i, mask=mask, other=float("-inf"))
    at = tl.load(at_ptr + row * splits + i, mask=mask, other=2147483647)
    bad = tl.load(bad_ptr + row * splits + i, mask=mask, other=0)
    top = tl.max(best)
    failed = (tl.max(bad) > 0) | (top == float("-inf"))
    token = tl.where(failed, 0, tl.min(tl.where(best == top, at, 2147483647)))
    tl.store(tokens_ptr + row, token)
    tl.store(failed_ptr + row, failed)
    if KEEP:
        tl.store(table_ptr + tl.load(slots_ptr + row) * TABLE_STRIDE + tl.load(position_ptr + row), token)


def draw(
    launch: Launcher,
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    valid_vocab: int,
    keep: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(tokens int32 [S], failed bool [S]): one token a row, drawn from softmax(logits / temperature).

    logits float32 [S, V], rows dense, of which the first valid_vocab count; temperature float32 [S], 0 for the
    largest logit (of equal ones the lowest id); seed and position int64 [S]. A row's token is a function of its own
    values alone. A logit of -inf is an excluded token. failed: a logit is NaN or +inf, or every token is
    excluded; the token is then 0. keep: (a token table int32 [rows, length], slots int64 [S]): row slots[i] gets the token at
    position[i]. Two launches, nothing waits, nothing is allocated but results and partial ones.
    """
    count, width = logits.shape
    if not 0 < valid_vocab <= width:
        raise ValueError(f"draw: valid_vocab {valid_vocab} is not between 1 and the {width} columns of the logits")
    for name, value, dtype in (
        ("temperature", temperature, torch.float32),
        ("seed", seed, torch.int64),
        ("position", position, torch.int64),
    ):
        if value.shape != (count,) or value.dtype != dtype or not value.is_contiguous():
            raise ValueError(
                f"draw: {name} must be contiguous {dtype} [{count}], not {value.dtype} {list(value.shape)} with strides {value.stride()}"
            )
    tokens = torch.empty(count, dtype=torch.int32, device=logits.device)
    failed = torch.empty(count, dtype=torch.bool, device=logits.device)
    if count == 0:
        return tokens, failed
    tiles = triton.cdiv(valid_vocab, TILE)
    each = triton.cdiv(tiles, max(1, min(tiles, PROGRAMS // count)))
    splits = triton.cdiv(tiles, each)
    best = torch.empty((count, splits), dtype=torch.float32, device=logits.device)
    at = torch.empty((count, splits), dtype=torch.int32, device=logits.device)
    bad = torch.empty_like(at)
    constants = (rows(logits, "draw"), valid_vocab, tiles, QUARTER)
    tensors = (logits, temperature, seed, position, best, at, bad)
    launch(scan_kernel, (count, splits), tensors, (each, splits), constants, warps=4)
    block = triton.next_power_of_2(tiles)
    table, slots = (tokens, position) if keep is None else keep
    pointers = (best, at, bad, tokens, failed, table, slots, position)
    launch(choose_kernel, (count, 1), pointers, (splits,), (table.stride(0), keep is not None, block), warps=1)
    return tokens, failed
