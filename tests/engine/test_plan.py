"""The build plan: every decision with its reason, taken before anything is allocated, and the one that the build uses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from octavo import hookimpl
from octavo.cache.allocator import BlockAllocator
from octavo.catalog import KINDS, Accept, Catalog, Provider
from octavo.config import EngineConfig
from octavo.engine import device
from octavo.engine.block_size import waste
from octavo.engine.plan import Plan, plan_engine
from octavo.errors import ConfigError, LoadError, OctavoError, PluginError
from octavo.interfaces import AllocatorParts, KVGroup, KVSpec
from octavo.plugins import discover
from octavo.request import Request, SamplingParams

from tests.tiny import tiny_config, tiny_llama


def plan(model: Path | str, catalog: Catalog | None = None, **config: Any) -> Plan:
    return plan_engine(EngineConfig(model=str(model), device="cpu", num_threads=1, **config), catalog or discover())


def folder(at: Path, **config: Any) -> Path:
    """A model folder without weights: config.json only."""
    at.mkdir(parents=True)
    (at / "config.json").write_text(json.dumps(tiny_config(**config)))
    return at


@pytest.fixture
def features(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """features("avx2", ...): the CPU has these."""
    return lambda *names: monkeypatch.setattr(device, "cpu_features", lambda cpuinfo=None: frozenset(names))


def test_a_plan_explains_every_kind_and_every_value_as_plain_data(tiny: Path) -> None:
    told = json.loads(json.dumps(plan(tiny).explain()))
    assert set(told["decisions"]) == set(KINDS)
    assert all(decision["why"] for decision in told["decisions"].values())
    assert all(item["why"] for item in told["values"].values())
    assert set(told["values"]) >= {"device", "threads", "dtype", "kv_cache_dtype", "max_model_len", "block_size", "num_blocks"}


def test_memory_that_the_attention_backend_announces_is_part_of_the_workspace(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.attention.torch_backend import TorchAttention

    seen: list[tuple[Any, ...]] = []

    def workspace_bytes(self: TorchAttention, *asked: Any) -> int:
        seen.append(asked)
        return 3 << 20

    without = plan(tiny, attention_backend="torch").sizing.workspace_bytes
    monkeypatch.setattr(TorchAttention, "workspace_bytes", workspace_bytes, raising=False)
    made = plan(tiny, attention_backend="torch")
    assert made.sizing.workspace_bytes == without + (3 << 20)
    assert seen == [(made.groups, made.facts.layers, made.limits)]


def test_the_engine_is_built_from_the_very_plan_that_is_explained(tiny: Path) -> None:
    from octavo.engine.build import build_from_plan

    made = plan(tiny, max_num_batched_tokens=32)
    engine = build_from_plan(made)
    assert engine.explain == made.explain()
    assert (engine.info.num_blocks, engine.info.block_size, engine.info.dtype) == (made.num_blocks, made.block_size, made.dtype)
    assert engine.allocator.usage().total == made.num_blocks


def test_the_start_up_log_tells_every_decision_and_every_broken_plugin(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    from octavo.engine.build import build_from_plan

    module = ModuleType("acme_misspelt")

    @hookimpl
    def register_executor() -> list[Provider]:
        return []

    module.register_executor = register_executor  # type: ignore[attr-defined]
    with caplog.at_level("INFO", logger="octavo"):
        build_from_plan(plan(tiny, discover(extra_modules=[module])))
    for kind in KINDS:
        assert f"{kind}: " in caplog.text
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "acme_misspelt" in warning and "did you mean 'register_executors'" in warning


def test_a_plan_is_frozen(tiny: Path) -> None:
    with pytest.raises(FrozenInstanceError):
        plan(tiny).dtype = "float64"  # type: ignore[misc]


def test_one_context_and_a_quarter_is_the_pool_of_a_cpu(tiny: Path) -> None:
    made = plan(tiny, block_size=16)
    assert (made.limits.max_model_len, made.num_blocks, made.kv_cache_tokens) == (512, 40, 640)
    assert made.sizing.contexts == 1.25


# ---------------------------------------------------------------- dtype


@pytest.mark.parametrize("stated", ["float32", "bfloat16", "float16"])
def test_auto_dtype_is_the_checkpoint_s(stated: str, tmp_path: Path) -> None:
    made = plan(folder(tmp_path / "m", torch_dtype=stated), load_format="dummy")
    assert made.dtype == made.kv_dtype == stated
    assert made.why["dtype"].startswith("the checkpoint's")


def test_a_gguf_runs_in_bfloat16_where_the_cpu_has_units_for_it_and_says_so(
    demo_path: Path, features: Callable[..., None]
) -> None:
    features("avx2", "avx512_bf16")
    made = plan(demo_path)
    assert made.dtype == "bfloat16" and "avx512_bf16" in made.why["dtype"]
    features("avx2")
    made = plan(demo_path)
    assert made.dtype == "float32" and "no bfloat16 units" in made.why["dtype"]


def test_bfloat16_that_the_cpu_must_emulate_is_served_with_a_warning(tmp_path: Path, features: Callable[..., None]) -> None:
    features("avx2")
    made = plan(folder(tmp_path / "m", torch_dtype="bfloat16"), load_format="dummy")
    assert made.dtype == "bfloat16" and "no bfloat16 units" in made.why["dtype"]


@pytest.mark.parametrize(("asked", "got"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_a_named_dtype_is_that_dtype(asked: str, got: str, tiny: Path) -> None:
    assert plan(tiny, dtype=asked).dtype == got


@pytest.mark.parametrize(
    ("asked", "got"), [("auto", "float32"), ("fp8", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2"), ("bfloat16", "bfloat16")]
)
def test_the_cache_s_dtype_follows_the_model_or_the_flag(asked: str, got: str, tiny: Path) -> None:
    made = plan(tiny, kv_cache_dtype=asked)
    assert made.kv_dtype == made.groups[0].spec.dtype == made.layouts[0].dtype == got


# ---------------------------------------------------------------- block size


def preferring(*sizes: int) -> Catalog:
    """A catalogue whose attention backend "picky" likes these block sizes."""
    module = ModuleType("picky")

    @hookimpl
    def register_attention_backends() -> list[Provider]:
        load = "octavo.attention.torch_backend:TorchAttention"
        return [Provider("picky", "attention", load, priority=50, accepts=lambda needs, options: Accept({"block_sizes": sizes}))]

    module.register_attention_backends = register_attention_backends  # type: ignore[attr-defined]
    return discover(extra_modules=[module])


def test_block_size_is_the_backend_s_first_choice(tiny: Path) -> None:
    made = plan(tiny, preferring(24, 16))
    assert made.block_size == made.groups[0].block_size == 24
    assert made.why["block_size"].startswith("attention 'picky' likes it best; blocks of 24 leave 1.8% empty")


def test_a_block_size_that_wastes_more_than_5_percent_is_not_chosen_by_itself(tiny: Path) -> None:
    made = plan(tiny, preferring(128, 256, 64, 16))
    assert made.block_size == 64
    assert "likes 128 best, but blocks of 128 leave 9.1% empty where sequences hold 640 tokens" in made.why["block_size"]
    assert "blocks of 64 leave 4.8% empty" in made.why["block_size"] and "below 608 tokens" in made.why["block_size"]
    assert plan(tiny, preferring(256, 128)).block_size == 128, "the least wasteful where all waste more"
    assert plan(tiny, preferring(64), block_size=128).block_size == 128, "what is named is taken"


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_what_it_says_of_the_waste_is_what_the_simulation_finds(block_size: int) -> None:
    """Sequences of every length between half and one and a half times the mean, in the real allocator."""
    rows, mean = 200, 640
    lengths = np.random.default_rng(0).integers(mean // 2, mean * 3 // 2, rows)
    group = KVGroup(0, KVSpec("full", 1, 1, 1, "float16"), (0,), block_size, 4 * block_size)
    allocator = BlockAllocator(None, AllocatorParts((group,), 20_000, rows, 1024, False, 1024, 0))
    for row, length in enumerate(lengths.tolist()):
        allocator.admit(row, np.zeros(length, np.int32), "a")
        assert allocator.reserve(np.array([row]), np.array([0]), np.array([length]))
    empty = 1 - lengths.sum() / (allocator.usage().used * block_size)
    assert empty == pytest.approx(waste(block_size, lengths.mean()), rel=0.1)


def test_the_model_s_recommendation_wins_where_the_backend_takes_it(tmp_path: Path) -> None:
    windowed = folder(tmp_path / "m", model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=64)
    taken = plan(windowed, preferring(64, 16), load_format="dummy")
    assert taken.block_size == 16 and "recommends" in taken.why["block_size"]
    refused = plan(windowed, preferring(64, 32), load_format="dummy")
    assert refused.block_size == 64 and "recommends 16, which it does not take" in refused.why["block_size"]


def test_a_named_block_size_is_that_size(tiny: Path) -> None:
    assert plan(tiny, preferring(64), block_size=5).block_size == 5


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"trust_remote_code": True}, ("--trust-remote-code", "runs no code")),
        ({"warm_prefixes": "p.yaml", "enable_prefix_caching": False}, ("--warm-prefixes p.yaml", "--no-enable-prefix-caching")),
        ({"max_model_len": 513}, ("--max-model-len 513", "512")),
        ({"kv_cache_dtype": "fp4"}, ("--kv-cache-dtype fp4", "fp8_e5m2")),
        ({"load_format": "gguf"}, ("--load-format gguf", "safetensors")),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100}, ("100", "512", "chunked prefill")),
        ({"num_gpu_blocks": 3, "num_gpu_blocks_override": 4}, ("--num-gpu-blocks", "--num-gpu-blocks-override")),
        ({"kv_cache_memory_bytes": 100_000}, ("one sequence of 512 tokens", "--max-model-len")),
        ({"plugins": {"attention": {"torch": {"tile": 4}}}}, ("plugins.attention.torch.tile", "unknown option")),
        ({"attention_backend": "torc"}, ("did you mean 'torch'",)),
        ({"scheduler": "fair"}, ("no such scheduler provider", "continuous")),
        ({"allocator": "slab"}, ("no such allocator provider", "block")),
        ({"executor": "ray"}, ("no such executor provider", "inline")),
        ({"model_adapter": "llama"}, ("no such model provider", "decoder")),
        ({"quantization": "awq"}, ("no quantizer provider accepts", "'awq'")),
    ],
)
def test_a_configuration_that_cannot_be_right_is_refused_with_the_values(
    config: dict[str, Any], words: tuple[str, ...], tiny: Path
) -> None:
    with pytest.raises((ConfigError, PluginError)) as caught:
        plan(tiny, **config)
    assert all(word in str(caught.value) for word in words), caught.value


def test_an_architecture_that_nobody_reads_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"'MambaForCausalLM'.*LlamaForCausalLM"):
        plan(folder(tmp_path / "m", architectures=["MambaForCausalLM"]), load_format="dummy")


def test_a_quantised_checkpoint_needs_a_provider_of_its_method_and_a_flag_cannot_change_it(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(PluginError, match="'awq'"):
        plan(model, load_format="dummy")
    with pytest.raises(PluginError, match=r"'none' of octavo.*was named but rejects"):
        plan(model, load_format="dummy", quantization="none")
    with pytest.raises(ConfigError, match="--quantization fp8: the checkpoint's weights are in the format 'awq'"):
        plan(model, load_format="dummy", quantization="fp8")


def test_a_model_that_cannot_fit_is_refused_before_a_byte_of_it_is_read(tmp_path: Path) -> None:
    giant = folder(tmp_path / "m", layers=400, hidden_size=65536, intermediate_size=262144, vocab_size=1_000_000)
    with pytest.raises(ConfigError, match=r"0 B for it.*of weights"):
        plan(giant, load_format="dummy", max_model_len=16)


def test_a_shorter_context_is_suggested_and_never_taken_silently(tmp_path: Path) -> None:
    long = folder(tmp_path / "m", layers=256, max_position_embeddings=1 << 24)
    with pytest.raises(ConfigError, match=r"--max-model-len \d+ would fit"):
        plan(long, load_format="dummy")


def test_without_chunked_prefill_a_step_holds_a_whole_prompt(tiny: Path) -> None:
    made = plan(tiny, enable_chunked_prefill=False)
    assert made.limits.max_num_batched_tokens >= made.limits.max_model_len


def test_a_missing_model_is_an_octavo_error(tmp_path: Path) -> None:
    with pytest.raises(OctavoError, match="nowhere"):
        plan(tmp_path / "nowhere")


# ---------------------------------------------------------------- KV groups


def test_windowed_layers_get_a_group_of_their_own(tmp_path: Path) -> None:
    mixed = folder(
        tmp_path / "m",
        layers=4,
        model_type="qwen2",
        architectures=["Qwen2ForCausalLM"],
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=2,
        max_position_embeddings=4096,
    )
    made = plan(mixed, load_format="dummy", max_num_batched_tokens=64)
    assert [(g.spec.kind, g.layers) for g in made.groups] == [("full", (0, 1)), ("window", (2, 3))]
    assert made.sizing.blocks_per_context < 2 * 4096 // made.block_size
    assert [group["window"] for group in made.explain()["kv_cache"]["groups"]] == [None, 64]


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("block_size", [5, 16])
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_the_pool_that_was_sized_holds_the_longest_request_that_is_admitted(
    family: str, block_size: int, chunk: int, tmp_path: Path
) -> None:
    """Sizing and the allocator count window blocks alike: a pool of one context and a quarter refuses no single request."""
    from octavo.engine.build import build_engine

    names = {"mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    windows = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    model = tiny_llama(tmp_path / "m", model_type=family, architectures=[names[family]], **windows)
    config = EngineConfig(model=str(model), num_threads=1, block_size=block_size, max_num_batched_tokens=chunk)
    engine = build_engine(config, discover())
    engine.add(Request(id="long", prompt=[9] * 500, params=SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)))
    tokens = 0
    while engine.busy:
        for event in engine.step().events:
            assert event.error is None
            tokens += len(event.tokens)
        engine.allocator.check()
    assert tokens == 12


def test_a_wrong_config_is_named_with_its_file(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"^.*/bad/config\.json: hidden_size must be a whole number of at least 1, got -4$"):
        plan(folder(tmp_path / "bad", hidden_size=-4), load_format="dummy")


def test_a_revision_of_what_has_none_is_refused(tiny: Path) -> None:
    with pytest.raises(LoadError, match=r"^--revision main: .* is not a hub id, which alone has revisions"):
        plan(tiny, revision="main")


def test_weights_that_are_not_there_are_named_with_their_flag(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--awq-ckpt-path /nowhere/awq: "):
        plan(tiny, awq_ckpt_path="/nowhere/awq")
