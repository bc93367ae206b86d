"""The build plan: every decision of one engine, taken before anything is allocated.

`plan_engine` asks the machine, the checkpoint's config and the plugins, and returns a frozen Plan.
Engine.build creates exactly what the plan says, and `explain` prints it: there is no second opinion.
No weight is read and no device memory is taken here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.cache.pool import kv_tokens, plan_groups
from octavo.catalog import Catalog, Device, Kind, Needs
from octavo.config import EngineConfig
from octavo.decision import Decision, OperatorDecision
from octavo.engine.block_size import choose_block_size
from octavo.engine.device import Threads, choose_device, cpu_memory, spare_threads
from octavo.engine.precision import cache_dtype, model_dtype, spread_keys, spreader
from octavo.engine.sizing import (
    LEAST_UTILIZATION,
    PoolRange,
    Sizing,
    estimate_weight_bytes,
    host_slots,
    linear_parameters,
    pool_range,
    size_pool,
    staging_bytes,
    workspace_bytes,
)
from octavo.engine.tool_parser import choose_tool_parser
from octavo.errors import ConfigError, LoadError
from octavo.interfaces import (
    AttentionParts,
    CacheLayout,
    KVGroup,
    Limits,
    ModelAdapter,
    ModelFacts,
)
from octavo.model.source import DTYPE_BYTES, ModelSource

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config keys of mixtures of experts, whose matrices the arithmetic over a dense decoder does not know."""

MAX_POSITIONS = 1 << 24
"""Positions of a RoPE: every whole number up to it is a float32."""

BATCHED_TOKENS = {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True)
class Plan:
    """Every decision of one engine. `why` gives the reason of each plain value by its name.

    dtype is the model's, kv_dtype the cache's (torch names). groups are the KV groups at block_size,
    laid out by the chosen attention backend. threads is None on a GPU. elastic: how the pool's size moves, None
    if it stays; host_slots: blocks that the swap space holds. spread_keys: whether keys are spread before a float8 cache rounds
    them (`octavo.model.spread`); those of latent caches never are.
    """

    config: EngineConfig
    catalog: Catalog
    source: ModelSource
    device: Device
    threads: Threads | None
    dtype: str
    kv_dtype: str
    facts: ModelFacts
    limits: Limits
    block_size: int
    groups: tuple[KVGroup, ...]
    layouts: tuple[CacheLayout, ...]
    sizing: Sizing
    model: Decision
    quantizer: Decision
    attention: Decision
    allocator: Decision
    scheduler: Decision
    executor: Decision
    operators: OperatorDecision
    grammar: Decision
    tool_parser: Decision
    elastic: PoolRange | None = None
    host_slots: int = 0
    spread_keys: bool = False
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        return self.sizing.num_blocks

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the pool holds (with windows: of sequences of max_model_len)."""
        return kv_tokens(self.groups, self.num_blocks, self.limits.max_model_len, self.limits.max_num_batched_tokens)

    def decisions(self) -> dict[Kind, Decision | OperatorDecision]:
        """By kind, in the order of the build."""
        return {
            "model": self.model,
            "quantizer": self.quantizer,
            "attention": self.attention,
            "operators": self.operators,
            "allocator": self.allocator,
            "scheduler": self.scheduler,
            "executor": self.executor,
            "grammar": self.grammar,
            "tool_parser": self.tool_parser,
        }

    def explain(self) -> dict[str, Any]:
        """The whole plan as plain data (JSON types): what `octavo plugins explain --json` prints."""
        from octavo.engine.explain import explain

        return explain(self)


def plan_engine(config: EngineConfig, catalog: Catalog) -> Plan:
    """Decide everything about an engine. Raises ConfigError, PluginError or LoadError; allocates nothing."""
    from octavo.engine.checkpoint import planned_source

    _refuse(config)
    catalog = catalog.configured(config.plugins)
    why: dict[str, str] = {}

    choice = choose_device(config.device)
    device, why["device"] = choice.device, choice.reason
    threads = spare_threads(config.num_threads) if device.type == "cpu" else None
    if threads:
        why["threads"] = threads.reason

    source = planned_source(config, why)
    architecture = source.architecture
    dtype, why["dtype"] = model_dtype(config.dtype, source, device)

    def needs(kind: Kind, **facts: Any) -> Needs:
        return Needs(kind, device, dtype, facts)

    # what needs no model comes first, so that a wrong name is told before a large config is read
    policy = {"policy": config.scheduling_policy, "chunked_prefill": config.enable_chunked_prefill}
    scheduler = catalog.resolve("scheduler", needs("scheduler", **policy), config.scheduler)
    executor = catalog.resolve("executor", needs("executor", devices=1), config.executor)
    tool_parser = choose_tool_parser(config, catalog, source)
    quantizer = _quantizer(config, catalog, source, architecture, needs)
    kv_dtype, why["kv_cache_dtype"] = cache_dtype(
        config.kv_cache_dtype, dtype, quantizer.accept.preferences.get("kv_cache_dtype")
    )
    model = catalog.resolve("model", needs("model", architecture=architecture, config=source.config), config.model_adapter)
    adapter = model.create(None)
    facts = _facts(adapter, source, dtype, kv_dtype)
    limits = _limits(config, facts, device, why)

    wanted = None if config.block_size == "auto" else config.block_size
    attention = catalog.resolve(
        "attention", needs("attention", **attention_facts(facts, kv_dtype, wanted)), config.attention_backend
    )
    block_size, why["block_size"] = choose_block_size(wanted, adapter.recommend(source.config), attention)
    backend = attention.create(AttentionParts(device, dtype))
    groups = plan_groups(facts.kv_specs, backend.layout, block_size)
    spreadable = [facts.layers[i] for group in groups if group.spec.kind != "latent" for i in group.layers]
    spread, why["kv_cache_spread"] = spread_keys(config.kv_cache_spread, kv_dtype, latent=not spreadable)
    if spread:
        why["kv_cache_spread"] += f"; by {spreader(attention.name, backend, spreadable)}"

    weights = _weight_bytes(config, source, facts, dtype, quantizer, model)
    workspace = workspace_bytes(facts, source.config, limits, device, DTYPE_BYTES[dtype])
    workspace += staging_bytes(config, device)
    if planned := getattr(backend, "workspace_bytes", None):  # interfaces.PlannedWorkspace
        workspace += planned(groups, facts.layers, limits)
    sizing = size_pool(config, device, groups, limits, weight_bytes=weights, workspace=workspace)
    why["num_blocks"] = sizing.reason
    elastic = pool_range(config, device, sizing)
    if elastic is not None:
        why["dynamic_memory"] = (
            f"between {elastic.blocks(LEAST_UTILIZATION)} and {elastic.most} blocks, looked at every {config.dynamic_memory_interval:g} s"
        )
    taken = sizing.bytes + weights + workspace if device.type == "cpu" else 0  # of the same memory
    slots = host_slots(config, sizing.block_bytes, cpu_memory()[1] - taken)
    if slots:
        why["swap_space"] = f"{slots} blocks in host memory; a preempted sequence is swapped: {config.preemption_mode}"

    return Plan(
        config=config,
        catalog=catalog,
        source=source,
        device=device,
        threads=threads,
        dtype=dtype,
        kv_dtype=kv_dtype,
        facts=facts,
        limits=limits,
        block_size=block_size,
        groups=groups,
        layouts=tuple(backend.layout(group.spec, group.block_size) for group in groups),
        sizing=sizing,
        elastic=elastic,
        host_slots=slots,
        spread_keys=spread,
        model=model,
        quantizer=quantizer,
        attention=attention,
        allocator=catalog.resolve(
            "allocator", needs("allocator", groups=groups, prefix_caching=config.enable_prefix_caching), config.allocator
        ),
        scheduler=scheduler,
        executor=executor,
        operators=catalog.resolve_operators(needs("operators", architecture=architecture, hidden_size=facts.hidden_size)),
        tool_parser=tool_parser,
        grammar=catalog.resolve("grammar", needs("grammar", vocab_size=facts.vocab_size), config.grammar_backend),
        why=why,
    )


def _refuse(config: EngineConfig) -> None:
    """ConfigError for settings that no machine and no model can make right."""
    if config.trust_remote_code:
        raise ConfigError("--trust-remote-code: Octavo runs no code from checkpoints; leave the flag out")
    if config.warm_prefixes is not None and not config.enable_prefix_caching:
        raise ConfigError(
            f"--warm-prefixes {config.warm_prefixes}: there is no prefix cache to have them in; leave out --no-enable-prefix-caching, "
            "or the file"
        )


def _weight_bytes(
    config: EngineConfig, source: ModelSource, facts: ModelFacts, dtype: str, quantizer: Decision, model: Decision
) -> int:
    """Bytes of the weights as this quantizer and this adapter keep them."""
    item = DTYPE_BYTES[dtype]
    stored: dict[str, int] = {}
    for decision in (quantizer, model):
        stored |= decision.accept.preferences.get("stored_values") or {}
    if config.load_format == "dummy":
        weights = estimate_weight_bytes(facts, source.config, item)
    else:
        weights = source.weight_bytes(dtype, stored)
    smaller = quantizer.accept.preferences.get("linear_bytes", item)  # of weights that are quantised while they load
    if not source.quantization_config and not any(source.config.get(key) for key in EXPERTS):
        weights -= linear_parameters(facts, source.config) * (item - smaller)
    return weights


def attention_facts(facts: ModelFacts, kv_dtype: str, block_size: int | None) -> dict[str, Any]:
    """Needs.facts of an attention backend: the layers, and what they have in common, spelt out."""
    layers = facts.layers
    return {
        "layers": layers,
        "kv_specs": facts.kv_specs,
        "kv_dtype": kv_dtype,
        "block_size": block_size,
        "head_dims": tuple(sorted({layer.k_dim for layer in layers} | {layer.v_dim for layer in layers})),
        "num_heads": max(layer.num_heads for layer in layers),
        "num_kv_heads": max(layer.num_kv_heads for layer in layers),
        "windows": tuple(sorted({layer.window for layer in layers if layer.window is not None})),
        "softcap": max(layer.softcap for layer in layers),
        "sinks": any(layer.has_sinks or layer.sinks is not None for layer in layers),
    }


def _facts(adapter: ModelAdapter, source: ModelSource, dtype: str, kv_dtype: str) -> ModelFacts:
    """The model's facts. LoadError names the file that is wrong, which an adapter does not know."""
    try:
        return adapter.facts(source.config, dtype, kv_dtype)
    except LoadError as error:
        where = source.path if source.kind == "gguf" else source.path / "config.json"
        raise LoadError(f"{where}: {error}") from error


def _limits(config: EngineConfig, facts: ModelFacts, device: Device, why: dict[str, str]) -> Limits:
    """The limits, checked against the model's and each other; `why` gets their reasons."""
    longest = facts.max_position
    length = config.max_model_len or longest
    if length < 1:
        raise ConfigError("the checkpoint names no longest context (max_position_embeddings); give --max-model-len")
    if longest and length > longest:
        raise ConfigError(
            f"--max-model-len {length} is more than the {longest} tokens that the model's positions reach "
            "(max_position_embeddings with its RoPE scaling)"
        )
    if length > MAX_POSITIONS:
        raise ConfigError(
            f"--max-model-len {length} is more than {MAX_POSITIONS}: past that, positions are not whole numbers in float32, "
            "and neighbours would get one angle"
        )
    why["max_model_len"] = "named in the configuration" if config.max_model_len else "the model's"
    default = BATCHED_TOKENS[device.type]
    batched = config.max_num_batched_tokens or default
    why["max_num_batched_tokens"] = (
        "named in the configuration"
        if config.max_num_batched_tokens
        else f"the default on a {'GPU' if device.type == 'cuda' else 'CPU'}"
    )
    if not config.enable_chunked_prefill and batched < length:
        if config.max_num_batched_tokens:
            raise ConfigError(
                f"--max-num-batched-tokens {batched} without chunked prefill could never run a prompt of --max-model-len {length} tokens: "
                f"raise it to {length}, lower --max-model-len, or leave out --no-enable-chunked-prefill"
            )
        batched, why["max_num_batched_tokens"] = length, "a whole prompt, since chunked prefill is off"
    why["max_num_seqs"] = "named in the configuration" if "max_num_seqs" in config.model_fields_set else "the default"
    return Limits(config.max_num_seqs, batched, length)


def _quantizer(config: EngineConfig, catalog: Catalog, source: ModelSource, architecture: str, needs: Any) -> Decision:
    """The quantizer of the checkpoint's method. --quantization names the provider, or the method to apply
    to plain weights; one that contradicts the checkpoint is refused by that provider."""
    settings = source.quantization_config or {}
    stored = str(settings.get("quant_method", ""))
    asked = config.quantization
    method = stored or ("" if asked in (None, "none") else asked)
    named = asked if asked in catalog.names("quantizer") else "auto"
    if asked and named == "auto" and stored and asked != stored:
        raise ConfigError(f"--quantization {asked}: the checkpoint's weights are in the format {stored!r}; leave the flag out")
    dummy = config.load_format == "dummy"
    facts = {"method": method, "config": settings, "architecture": architecture, "dummy": dummy}
    return catalog.resolve("quantizer", needs("quantizer", **facts), named)
