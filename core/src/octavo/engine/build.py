"""Engine.build as a recipe: a Plan in, an Engine out. Takes no decision of its own.

Order: device, model and weights, pool, attention, allocator, scheduler, executor. Every part is
created from exactly the Decision that `octavo plugins explain` prints.
"""

from __future__ import annotations

import functools
import logging
import random
import secrets
import time
from collections.abc import Callable

import torch

from octavo.attention.layer import PagedAttention
from octavo.cache import prefix
from octavo.cache.pool import Pool
from octavo.cache.swap import SwapSpace, make_swap_space
from octavo.catalog import Catalog
from octavo.config import EngineConfig
from octavo.decision import OperatorSet
from octavo.engine.engine import Engine
from octavo.engine.executor import ExecutorParts
from octavo.engine.grammars import Grammars
from octavo.engine.hugepages import collapse_in_background
from octavo.engine.memory import MemoryWatch, PoolGovernor
from octavo.engine.plan import Plan, plan_engine
from octavo.engine.rehearsal import rehearse
from octavo.engine.runner import ModelRunner
from octavo.engine.sizing import staging_bytes
from octavo.engine.swapping import SwapCost, measure
from octavo.engine.swapping import policy as swap_policy
from octavo.engine.threads import ThreadGovernor
from octavo.errors import ConfigError, PluginError
from octavo.grammar import GrammarError
from octavo.interfaces import (
    Allocator,
    AllocatorParts,
    AttentionBackend,
    AttentionLayer,
    AttentionParts,
    BoundGroup,
    Executor,
    Experts,
    ExpertsSpec,
    GrammarCompiler,
    GrammarParts,
    Model,
    ModelParts,
    OperatorParts,
    QuantizerParts,
    SchedulerParts,
)
from octavo.model.kv_scales import KVScales
from octavo.model.loader import WeightTable, load_weights
from octavo.model.rope import variants
from octavo.model.tokenizer_files import load_tokenizer_files
from octavo.request import ModelInfo
from octavo.sampling.constrained import ConstrainedRows
from octavo.sampling.sampler import Sampler
from octavo.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Progress = Callable[..., None]
"""progress(stage, done=0, total=0)"""


def build_engine(config: EngineConfig, catalog: Catalog, *, progress: Progress | None = None) -> Engine:
    """Plan, then build. Raises ConfigError, PluginError or LoadError before any weight is read where
    that can be known."""
    return build_from_plan(plan_engine(config, catalog), progress=progress)


def build_from_plan(plan: Plan, *, progress: Progress | None = None) -> Engine:
    """Create every part that the plan names."""
    stages = _Stages(progress or (lambda stage, done=0, total=0: None))
    tell = stages.tell
    device = _device(plan)
    tell("model")
    model, layers, backend, operators = _model(plan, device, tell)
    if device.type == "cpu":
        collapse_in_background()  # asked for before the pool is there: untouched blocks must stay unbacked
    tell("memory")
    most = None if plan.elastic is None else plan.elastic.most
    pool = Pool(plan.groups, plan.layouts, plan.num_blocks, device, max_blocks=most)
    bound = [
        BoundGroup(group, layout, tuple(layers[i] for i in group.layers), pool.caches(group))
        for group, layout in zip(plan.groups, plan.layouts, strict=True)
    ]
    backend.bind(bound, plan.limits)
    vocab = _valid_vocab(plan)
    grammars = Grammars(lambda: _grammar_compiler(plan, vocab))
    sampler = Sampler(
        plan.limits.max_num_seqs,
        plan.facts.vocab_size,
        device,
        valid_vocab=vocab,
        draw=operators.find("draw"),
        constrained=ConstrainedRows(vocab, grammars.require, grammars.fill),
    )
    allocator = plan.allocator.create(
        AllocatorParts(
            groups=plan.groups,
            num_blocks=plan.num_blocks,
            max_rows=plan.limits.max_num_seqs,
            max_model_len=plan.limits.max_model_len,
            prefix_caching=plan.config.enable_prefix_caching,
            max_step_tokens=plan.limits.max_num_batched_tokens,
            host_slots=plan.host_slots,
            max_blocks=0 if most is None else most,
        )
    )
    stream = random.Random(plan.config.seed)

    ropes = plan.facts.ropes  # the closure below outlives the plan
    load = secrets.token_hex(8)  # of this load of the model: another's K/V is not ours, whatever its name

    @functools.cache
    def salted(variant: str) -> str:
        return prefix.salt({"load": load, "rope": variant})

    def salt(bound: int) -> str:
        return salted(variants(ropes, bound))

    scheduler = plan.scheduler.create(
        SchedulerParts(
            allocator=allocator,
            limits=plan.limits,
            policy=plan.config.scheduling_policy,
            max_queued=plan.config.max_num_queued_reqs,
            chunked_prefill=plan.config.enable_chunked_prefill,
            hard_blocks=plan.sizing.hard,
            clock=time.monotonic,
            seeds=lambda: stream.getrandbits(63),
            salt=salt,
            swap_pays=swap_policy(plan.config.preemption_mode, _swap_cost(plan, device)),
        )
    )
    executor = plan.executor.create(
        ExecutorParts(
            runner=lambda: _runner(plan, model, backend, device, sampler, pool, operators, tell),
            asynchronous=device.type == "cuda",
        )
    )
    watch = _watch(plan, allocator, executor)
    engine = Engine(_info(plan), scheduler, allocator, executor, plan.explain(), watch, salt, grammars)
    plan.catalog.ready(engine)
    _announce(plan, stages)
    return engine


class _Stages:
    """Passes a build's progress on, and notes how long each of its stages took."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._times: list[tuple[str, float]] = [("device", time.perf_counter())]

    def tell(self, stage: str, done: int = 0, total: int = 0) -> None:
        if stage != self._times[-1][0]:
            self._times.append((stage, time.perf_counter()))
        self._progress(stage, done, total)

    def __str__(self) -> str:
        """Seconds until now, in all and of each stage."""
        ends = [*(began for _, began in self._times[1:]), time.perf_counter()]
        parts = [f"{stage} {end - began:.1f}" for (stage, began), end in zip(self._times, ends, strict=True)]
        return f"{ends[-1] - self._times[0][1]:.1f} s ({', '.join(parts)})"


def _runner(
    plan: Plan,
    model: Model,
    backend: AttentionBackend,
    device: torch.device,
    sampler: Sampler,
    pool: Pool,
    operators: OperatorSet,
    tell: Progress,
) -> ModelRunner:
    runner = ModelRunner(
        model,
        backend,
        plan.groups,
        plan.limits,
        device,
        sampler,
        pool.scratch,
        before_step=_between_steps(plan),
        swap=_swap_space(plan, pool),
        decode_inputs=operators.find("decode_inputs"),
    )
    if (
        device.type == "cuda"
        and backend.graphs != "none"
        and getattr(model, "capturable", True)
        and not plan.config.enforce_eager
    ):
        runner.use_graphs()
        ahead = operators.find("compile_ahead")
        # Quantisers have kernels of their own, which are not left out and would see what was not computed.
        if ahead is not None and getattr(backend, "compiles_ahead", False) and plan.quantizer.name == "none":
            tell("kernels")
            rehearse(runner, plan.limits, ahead)
    return runner


def _swap_space(plan: Plan, pool: Pool) -> SwapSpace | None:
    """What copies to and from host memory and within the pool, where either is wanted."""
    if not plan.host_slots and plan.elastic is None:
        return None
    return make_swap_space(pool, plan.host_slots, staging_bytes(plan.config, plan.device))


def _swap_cost(plan: Plan, device: torch.device) -> SwapCost | None:
    """The costs by which preempted sequences are swapped or recomputed, where both are possible."""
    if not plan.host_slots or plan.config.preemption_mode != "auto":
        return None
    cost = measure(device, plan.dtype, plan.sizing.block_bytes, plan.sizing.weight_bytes, plan.facts.layers)
    log.info("swap or recompute: %s", cost)
    return cost


def _watch(plan: Plan, allocator: Allocator, executor: Executor) -> MemoryWatch:
    if plan.elastic is None:
        return MemoryWatch(allocator)
    if not hasattr(executor, "resize"):
        raise ConfigError(f"--dynamic-memory: executor {plan.executor.name!r} cannot change the size of its pool")
    interval = plan.config.dynamic_memory_interval
    return MemoryWatch(allocator, PoolGovernor(allocator, executor, plan.elastic, time.monotonic, interval))


def _between_steps(plan: Plan) -> Callable[[], None]:
    """What runs before each step: nothing, or on a CPU whose thread count is ours to choose, its governor."""
    if plan.threads is None or plan.config.num_threads is not None:
        return lambda: None
    return ThreadGovernor(plan.threads.cores, plan.threads.count, torch.set_num_threads).tick


def _device(plan: Plan) -> torch.device:
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device.index)
        return torch.device("cuda", plan.device.index)
    assert plan.threads is not None
    torch.set_num_threads(plan.threads.count)
    return torch.device("cpu")


def _model(
    plan: Plan, device: torch.device, tell: Progress
) -> tuple[Model, dict[int, AttentionLayer], AttentionBackend, OperatorSet]:
    """The model with its weights, its attention layers by index, the (not yet bound) backend, the operators."""
    table = WeightTable()
    operators = plan.operators.create(OperatorParts(plan.device, plan.dtype))
    quantizer = plan.quantizer.create(
        QuantizerParts(plan.device, plan.dtype, plan.source.quantization_config or {}, table, operators.find)
    )
    backend = plan.attention.create(AttentionParts(plan.device, plan.dtype))
    layers: dict[int, AttentionLayer] = {}
    spread = {i for g in plan.groups if plan.spread_keys and g.spec.kind != "latent" for i in g.layers}

    def attention(layer: AttentionLayer) -> PagedAttention:
        layers[layer.index] = layer
        if layer.index in spread:
            return PagedAttention(layer, backend, operators("qk_norm_rope_spread"), operators("spread"))
        return PagedAttention(layer, backend, operators("qk_norm_rope"))

    adapter = plan.model.create(None)
    model = adapter.build(
        plan.source.config,
        ModelParts(
            device=plan.device,
            dtype=plan.dtype,
            limits=plan.limits,
            weights=table,
            linear=quantizer.linear,
            tied=quantizer.tied,
            attention=attention,
            op=operators,
            find=operators.find,
            experts=getattr(quantizer, "experts", _no_experts(plan.quantizer.name)),
        ),
    )
    scales = KVScales(table, layers.values())
    load_weights(
        plan.source,
        table,
        plan.dtype,
        tied=plan.facts.tied_head,
        ignored=adapter.ignored,
        canonical=getattr(adapter, "canonical", lambda name: name),
        load_format=plan.config.load_format,
        seed=plan.config.seed,
        device=device,
        progress=lambda done, total: tell("weights", done, total),
    )
    model.finish()
    return model, scales.applied(layers, plan.kv_dtype), backend, operators


def _no_experts(quantizer: str) -> Callable[..., Experts]:
    """What stands for the experts of a quantizer that has none: an error, where a model asks for them."""

    def refuse(prefix: str, spec: ExpertsSpec) -> Experts:
        raise PluginError(
            f"{prefix}: the model is a mixture of {spec.count} experts, and quantizer {quantizer!r} has no experts(): it serves dense models"
        )

    return refuse


def _has_tokenizer(plan: Plan) -> bool:
    folder = plan.source.text_path or plan.source.path
    return not folder.is_dir() or (folder / "tokenizer.json").is_file()


def _valid_vocab(plan: Plan) -> int:
    """One past the largest id that the tokenizer knows: logits past it are padding, never sampled. All of them
    where the model has no tokenizer (random weights, token ids in and out)."""
    if not _has_tokenizer(plan):
        return plan.facts.vocab_size
    files = load_tokenizer_files(plan.source)
    return min(max(files.tokenizer.get_vocab(with_added_tokens=True).values()) + 1, plan.facts.vocab_size)


def _grammar_compiler(plan: Plan, vocab: int) -> GrammarCompiler:
    """Made with the first grammar: it takes the tokenizer, which an engine has no other use for."""
    if not _has_tokenizer(plan) and plan.config.tokenizer is None:
        raise GrammarError("this model has no tokenizer, so its tokens have no text that a grammar could be about")
    tokenizer = Tokenizer.from_source(plan.source, plan.config)
    if tokenizer.pieces.window:
        raise GrammarError("the tokens of this model's tokenizer have no bytes of their own, which a grammar needs")
    control = tokenizer.special_ids | set(plan.source.eos_token_ids())
    made: GrammarCompiler = plan.grammar.create(
        GrammarParts(
            tokens=[tokenizer.token_bytes(token) for token in range(vocab)],
            control={token: tokenizer.token_text(token) for token in sorted(control) if token < vocab},
            ends=plan.source.eos_token_ids(),
            encode=lambda text: tokenizer.encode(text, add_special=False),
        )
    )
    return made


def _info(plan: Plan) -> ModelInfo:
    return ModelInfo(
        model=plan.source.name,
        vocab_size=plan.facts.vocab_size,
        max_model_len=plan.limits.max_model_len,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        kv_cache_tokens=plan.kv_cache_tokens,
        dtype=plan.dtype,
        eos_token_ids=plan.source.eos_token_ids(),
        max_num_seqs=plan.limits.max_num_seqs,
    )


def _announce(plan: Plan, stages: _Stages) -> None:
    """The start-up lines that operators look for."""
    for kind, decision in plan.decisions().items():
        log.info("%s: %s", kind, decision)
    for entry in plan.catalog.problems():
        log.warning("plugin %s: %s %s %s: %s", entry.origin, entry.kind, entry.name, entry.state, entry.reason)
    where = "GPU" if plan.device.type == "cuda" else "CPU"
    log.info("%s KV cache size: %s tokens", where, f"{plan.kv_cache_tokens:,}")
    log.info("Maximum concurrency for %s tokens per request: %.2fx", f"{plan.limits.max_model_len:,}", plan.sizing.contexts)
    config = plan.config
    if plan.device.type == "cpu" and "gpu_memory_utilization" in config.model_fields_set and not config.dynamic_memory:
        log.warning(
            "--gpu-memory-utilization %g changes nothing on a CPU: --memory-share, --kv-cache-memory-bytes or --num-gpu-blocks sizes "
            "the KV cache there (%s)",
            config.gpu_memory_utilization,
            plan.sizing.reason,
        )
    if plan.sizing.contexts < 1:  # blocks that were counted may be as few as one likes
        log.warning(
            "the KV cache of %d tokens is smaller than --max-model-len %d: longer requests than it holds are refused (too_large)",
            plan.kv_cache_tokens,
            plan.limits.max_model_len,
        )
    log.info("engine built in %s", stages)
