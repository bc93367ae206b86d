"""How many KV blocks: arithmetic over bytes and tokens, with the reason for the number.

Owns no memory and measures none: it is handed what is free. An error names the numbers it was
computed from and the value that would fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.cache.geometry import sequence_blocks
from octavo.cache.pool import block_bytes, blocks_for_bytes
from octavo.catalog import Device
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.interfaces import KVGroup, Limits, ModelFacts

CPU_CONTEXTS = 1.25
"""Default pool of a CPU, in full contexts: one request may always run to the end, and short ones share the rest."""

NOTHING_FITS = "Not even one token would fit: free memory, or use a smaller model"

CUDA_FIXED_BYTES = 512 << 20
"""Library workspaces and captured graphs, roughly, on any GPU. The CUDA context is not in it: it exists
when free memory is measured."""

LEAST_UTILIZATION, MOST_UTILIZATION = 0.85, 0.95
"""Bounds of the utilisation by which a pool that changes its size is sized."""


@dataclass(frozen=True, slots=True)
class PoolRange:
    """Sizes of a pool that changes its size. start: the utilisation at which it is built, with start_blocks;
    per_unit: blocks that utilisation 1.0 has more than 0.0. least: blocks that it keeps whatever the rule
    says, pins not counted: what one request of the full context holds. whole: what it would have been built
    with, had nobody else held anything of the device; 0 where that is no more than start_blocks."""

    start: float
    start_blocks: int
    per_unit: float
    least: int
    whole: int = 0

    def blocks(self, utilization: float) -> int:
        """The pool's size at this utilisation."""
        return max(self.least, self.start_blocks + round((utilization - self.start) * self.per_unit))

    @property
    def most(self) -> int:
        """Blocks of the address range."""
        return max(self.blocks(max(MOST_UTILIZATION, self.start)), self.whole)

    def utilization(self, blocks: int) -> float:
        """The utilisation at which the pool has this size."""
        return self.start + (blocks - self.start_blocks) / self.per_unit


@dataclass(frozen=True, slots=True)
class Sizing:
    """The pool's size. block_bytes: one block id, in every tensor of the pool. blocks_per_context: what one
    sequence of max_model_len tokens holds at most. hard: requests that do not fit now are refused."""

    num_blocks: int
    block_bytes: int
    blocks_per_context: int
    weight_bytes: int
    workspace_bytes: int
    hard: bool
    reason: str

    @property
    def bytes(self) -> int:
        """Of the pool, its scratch page included."""
        return (self.num_blocks + 1) * self.block_bytes

    @property
    def contexts(self) -> float:
        """Full contexts that the pool holds: the maximum concurrency of requests that use all of theirs."""
        return self.num_blocks / self.blocks_per_context


def workspace_bytes(facts: ModelFacts, config: Mapping[str, Any], limits: Limits, device: Device, dtype_bytes: int) -> int:
    """An estimate of what a step needs besides weights and cache: activations of the largest batch, and
    float32 logits of every sequence three times over (logits, sorted or masked copy, probabilities)."""
    mlp = facts.mlp_values or 3 * int(config.get("intermediate_size") or 4 * facts.hidden_size)
    activations = limits.max_num_batched_tokens * (6 * facts.hidden_size + mlp) * dtype_bytes
    logits = 3 * min(limits.max_num_seqs, limits.max_num_batched_tokens) * facts.vocab_size * 4
    return activations + logits + (CUDA_FIXED_BYTES if device.type == "cuda" else 0)


def linear_parameters(facts: ModelFacts, config: Mapping[str, Any]) -> int:
    """Weights of the layers' Linears and experts in a decoder of this geometry: all but embedding, head and norms."""
    hidden = facts.hidden_size
    intermediate = int(config.get("intermediate_size") or 4 * hidden)
    parameters = facts.mlp_weights or len(facts.layers) * 3 * hidden * intermediate
    if facts.attention_weights:
        return parameters + facts.attention_weights
    for layer in facts.layers:
        query, value = layer.num_heads * layer.k_dim, layer.num_heads * layer.v_dim
        key_value = layer.num_kv_heads * (layer.k_dim + layer.v_dim)
        parameters += hidden * (query + key_value + value)
    return parameters


def estimate_weight_bytes(facts: ModelFacts, config: Mapping[str, Any], dtype_bytes: int) -> int:
    """Weights of a decoder of this geometry, for `load_format=dummy`, which has no checkpoint to measure."""
    rest = facts.vocab_size * facts.hidden_size * (1 if facts.tied_head else 2)
    return (rest + linear_parameters(facts, config)) * dtype_bytes


def size_pool(
    config: EngineConfig, device: Device, groups: Sequence[KVGroup], limits: Limits, *, weight_bytes: int, workspace: int
) -> Sizing:
    """The number of blocks, by the first of: an explicit count, explicit bytes, the device's default.

    ConfigError if two are given, if the pool does not fit in memory, or if the default or the bytes do
    not hold one sequence of max_model_len. An explicit count may hold less: longer requests are then refused.
    """
    ways = ("num_gpu_blocks", "num_gpu_blocks_override", "kv_cache_memory_bytes", "memory_share")
    given = [n for n in ways if getattr(config, n) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(_flag(n) for n in given)} both size the KV cache; give one of them")
    each = block_bytes(groups)
    context = sequence_blocks(groups, limits.max_model_len, limits.max_num_batched_tokens)
    reserved = config.reserved_memory_bytes
    room = max(device.free_memory - reserved - weight_bytes - workspace, 0)
    count = config.num_gpu_blocks or config.num_gpu_blocks_override
    if count is not None:
        reason = f"{_flag(given[0])} {count}" + (
            "" if count >= context else f"; less than the {context} of one full context: longer requests are refused"
        )
    elif config.kv_cache_memory_bytes is not None:
        count = blocks_for_bytes(groups, config.kv_cache_memory_bytes)
        reason = f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes} in blocks of {size_text(each)}"
    elif config.memory_share is not None:
        budget = int(config.memory_share * device.memory) - weight_bytes - workspace
        count = blocks_for_bytes(groups, max(budget, 0))
        reason = (
            f"--memory-share {config.memory_share:g} of {size_text(device.memory)}, less {size_text(weight_bytes)} of weights "
            f"and {size_text(workspace)} of workspace"
        )
    elif device.type == "cpu":
        count = math.ceil(context * CPU_CONTEXTS)
        reason = f"the default on a CPU: {CPU_CONTEXTS:g} contexts of {limits.max_model_len} tokens"
    else:
        held = device.memory - device.free_memory + reserved
        budget = int(config.gpu_memory_utilization * device.memory) - held - weight_bytes - workspace
        count = blocks_for_bytes(groups, max(budget, 0))
        reason = (
            f"{config.gpu_memory_utilization:g} of {size_text(device.memory)}, less {size_text(held)} held already, "
            f"{size_text(weight_bytes)} of weights and {size_text(workspace)} of workspace"
        )
    fits = blocks_for_bytes(groups, room)
    if count > fits:
        raise ConfigError(
            f"the KV cache needs {size_text((count + 1) * each)} ({reason}), but the {device.type} has {size_text(room)} for it: "
            f"{size_text(device.free_memory)} free, less {size_text(weight_bytes)} of weights and {size_text(workspace)} of workspace"
            + (f" and {size_text(reserved)} reserved for others. " if reserved else ". ")
            + _advice(given, fits, room, groups, limits, (device.free_memory - reserved) / device.memory)
        )
    if count < context and (not given or given[0] in ("kv_cache_memory_bytes", "memory_share")):
        longest = _longest(groups, count, limits)
        ways_out = [f"--max-model-len {longest}"] if longest else []
        if config.kv_cache_memory_bytes is not None:
            ways_out.append(f"--kv-cache-memory-bytes {(context + 1) * each}")
        raise ConfigError(
            f"one sequence of {limits.max_model_len} tokens needs {context} KV blocks, but there is memory for {count} ({reason}). "
            + (f"{' or '.join(ways_out)} would fit" if ways_out else NOTHING_FITS)
        )
    return Sizing(count, each, context, weight_bytes, workspace, config.num_gpu_blocks is not None, reason)


def pool_range(config: EngineConfig, device: Device, sizing: Sizing) -> PoolRange | None:
    """How the pool's size follows the utilisation, None if it stays. On a GPU a utilisation is a share of the
    device's memory; elsewhere, and where blocks were counted, the pool is scaled in proportion.

    ConfigError with a size that is meant to be hard, or one that is less than a full context.
    """
    if not config.dynamic_memory:
        return None
    fixed = next((n for n in ("num_gpu_blocks", "kv_cache_memory_bytes", "memory_share") if getattr(config, n) is not None), None)
    if fixed is not None:
        raise ConfigError(f"{_flag(fixed)} fixes the KV cache, and --dynamic-memory moves its size: give one of them")
    if sizing.num_blocks < sizing.blocks_per_context:
        raise ConfigError(
            f"--dynamic-memory: the KV cache of {sizing.num_blocks} blocks does not hold one context ({sizing.blocks_per_context} "
            "blocks), below which it would never shrink: lower --max-model-len or give it more"
        )
    start, whole = config.gpu_memory_utilization, 0
    if device.type == "cuda" and config.num_gpu_blocks_override is None:
        per_unit = device.memory / sizing.block_bytes
        whole = int(start * device.memory - sizing.weight_bytes - sizing.workspace_bytes) // sizing.block_bytes - 1
    else:
        per_unit = sizing.num_blocks / start
    return PoolRange(start, sizing.num_blocks, per_unit, sizing.blocks_per_context, whole)


def staging_bytes(config: EngineConfig, device: Device) -> int:
    """Memory of a GPU through which copies to and from host memory go: enough for some hundred blocks on their way."""
    if device.type != "cuda" or not config.swap_space:
        return 0
    return min(max(device.memory // 256, 64 << 20), 512 << 20)


def host_slots(config: EngineConfig, block_bytes: int, free: int) -> int:
    """Blocks that --swap-space holds. free: bytes of host memory that nobody holds. ConfigError if it holds
    none, if the host does not have it, or if sequences shall be swapped and there is none."""
    wanted = int(config.swap_space * 2**30)
    if not config.swap_space:
        if config.preemption_mode == "swap":
            raise ConfigError(
                "--preemption-mode swap: there is no host memory to swap to; give --swap-space GIB, or leave the mode out"
            )
        return 0
    if wanted < block_bytes:
        raise ConfigError(
            f"--swap-space {config.swap_space:g} GiB is {size_text(wanted)}, less than one KV block of {size_text(block_bytes)}"
        )
    if wanted > free:
        raise ConfigError(f"--swap-space {config.swap_space:g} GiB: the host has {size_text(free)} of memory free for it")
    return wanted // block_bytes


def _advice(given: Sequence[str], fits: int, room: int, groups: Sequence[KVGroup], limits: Limits, share: float) -> str:
    """What would fit instead: a value of the flag that was given, or a shorter context. share: of the device, free."""
    if fits < 1:
        return NOTHING_FITS
    if given == ["memory_share"]:
        return f"--memory-share {math.floor(share * 1000) / 1000:g} would fit"
    if given:
        return f"{_flag(given[0])} {room if given[0] == 'kv_cache_memory_bytes' else fits} would fit"
    longest = _longest(groups, int(fits / CPU_CONTEXTS), limits)
    return f"--max-model-len {longest} would fit" if longest else NOTHING_FITS


def _longest(groups: Sequence[KVGroup], blocks: int, limits: Limits) -> int:
    """The most tokens of one sequence that `blocks` hold."""
    low, high = 0, limits.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if sequence_blocks(groups, middle, limits.max_num_batched_tokens) <= blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def size_text(count: int) -> str:
    """Bytes for people: 1.5 GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
