"""The whole engine on a GPU: the tokens of a CPU in float32, graphs against eager, pressure against none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.engine.harness import alone, make_engine, request, run  # noqa: E402
from tests.gpu.greedy import check_tokens  # noqa: E402
from tests.tiny import tiny_llama  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PROMPTS = [[9, 30, 77], list(range(60, 83)), [100] * 17, [9 + i % 200 for i in range(90)]]


def gpu_engine(path: Path, **options: Any) -> Any:
    return make_engine(path, **{"device": "cuda", "num_threads": None, "num_gpu_blocks_override": 64, **options})


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_float32_tokens_equal_the_cpus(tiny: Path, eager: bool) -> None:
    cpu = make_engine(tiny, num_gpu_blocks_override=64)
    gpu = gpu_engine(tiny, enforce_eager=eager, block_size=16, max_num_batched_tokens=16)
    for prompt in PROMPTS:
        want = alone(cpu, request(cpu, "a", prompt, max_tokens=24, ignore_eos=True))["a", 0].tokens
        got = alone(gpu, request(gpu, "a", prompt, max_tokens=24, ignore_eos=True))["a", 0].tokens
        assert got == want


@pytest.mark.parametrize("count", [3, 5, 7, 8, 9])
def test_padded_batches_leave_everybodys_blocks_alone(tiny: Path, count: int) -> None:
    """Batches between two buckets."""
    gpu = gpu_engine(tiny, block_size=16, max_num_seqs=16)
    prompts = [list(range(40 + i, 60 + 2 * i)) for i in range(count)]
    together = run(gpu, [request(gpu, str(i), p, max_tokens=20, ignore_eos=True) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        solo = alone(gpu, request(gpu, "solo", prompt, max_tokens=20, ignore_eos=True))
        assert together[str(i), 0].tokens == solo["solo", 0].tokens


def test_preemption_and_the_prefix_cache_change_no_token(tiny: Path) -> None:
    gpu = gpu_engine(tiny, block_size=8, num_gpu_blocks_override=16, max_num_seqs=4, max_num_batched_tokens=32)
    roomy = gpu_engine(tiny, block_size=8)
    asks = [{"prompt": [*range(40, 60), 70 + i], "max_tokens": 40, "ignore_eos": True} for i in range(4)]
    outcomes = run(gpu, [request(gpu, str(i), **ask) for i, ask in enumerate(asks)])
    assert gpu.stats().preemptions > 0
    for i, ask in enumerate(asks):
        assert outcomes[str(i), 0].tokens == alone(roomy, request(roomy, "a", **ask))["a", 0].tokens


def test_bfloat16_logprobs_are_near_the_cpus_in_float32(tiny: Path) -> None:
    """TINY's weights are large on purpose, so a logit is off by 2^-8 of some tens: judged by the mean."""
    cpu = make_engine(tiny, num_gpu_blocks_override=64)
    gpu = gpu_engine(tiny, dtype="bfloat16", block_size=16)
    for prompt in PROMPTS:
        want = run(cpu, [request(cpu, "a", prompt, max_tokens=1, prompt_logprobs=0)])["a", 0].events[0].prompt_logprobs
        got = run(gpu, [request(gpu, "a", prompt, max_tokens=1, prompt_logprobs=0)])["a", 0].events[0].prompt_logprobs
        assert want is not None and got is not None
        errors = [abs(a.logprob - b.logprob) for a, b in zip(want[1:], got[1:], strict=True) if a and b]
        assert len(errors) == len(prompt) - 1
        assert sum(errors) / len(errors) < 0.25


def test_sampling_parameters_work_on_the_device(tiny: Path) -> None:
    gpu = gpu_engine(tiny, block_size=16)
    fields = [
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "seed": 3, "top_p": 0.8, "top_k": 30},
        {"temperature": 1.0, "seed": 3, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logprobs": 3},
        {"temperature": 0.0, "logit_bias": {77: 50.0}, "min_tokens": 4},
        {"temperature": 1.0, "seed": 3, "n": 3},
    ]
    asks = [{"prompt": PROMPTS[1], "max_tokens": 12, **f} for f in fields]
    together = run(gpu, [request(gpu, str(i), **ask) for i, ask in enumerate(asks)])
    for i, ask in enumerate(asks):
        solo = alone(gpu, request(gpu, "solo", **ask))
        for sample in range(ask.get("n", 1)):
            assert together[str(i), sample].tokens == solo["solo", sample].tokens


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_a_prefix_that_rows_share_is_read_once_and_changes_no_token(tiny: Path, eager: bool) -> None:
    options = {"attention": {"triton": {"shared_prefix_bytes": 0}}}
    gpu = gpu_engine(tiny, block_size=16, enforce_eager=eager, plugins=options, num_gpu_blocks_override=128)
    plain = gpu_engine(tiny, block_size=16, enable_prefix_caching=False, num_gpu_blocks_override=128)
    prefix = [9 + i % 190 for i in range(140)]
    prompts = [[*prefix, 30 + i] for i in range(6)] + [[*range(40, 60)]]
    run(gpu, [request(gpu, "first", prompts[0], max_tokens=1)])  # from here on the prefix is cached
    together = run(gpu, [request(gpu, str(i), p, max_tokens=20, ignore_eos=True) for i, p in enumerate(prompts)])
    assert eager or "shared" in kinds(gpu), "no step read the prefix once"
    for i, prompt in enumerate(prompts):
        solo = alone(plain, request(plain, "solo", prompt, max_tokens=20, ignore_eos=True))
        assert together[str(i), 0].tokens == solo["solo", 0].tokens


def kinds(gpu: Any) -> set[str]:
    """Kinds of steps that have been captured."""
    return {kind for _, kind in gpu._executor._runner._graphs._buckets}


@pytest.mark.parametrize("shared_bytes", [0, 1 << 40], ids=["prefix read once", "prefix read by every row"])
def test_the_end_of_a_cached_prompt_is_replayed_and_changes_no_token(tiny: Path, shared_bytes: int) -> None:
    options = {"attention": {"triton": {"shared_prefix_bytes": shared_bytes}}}
    gpu = gpu_engine(tiny, block_size=16, plugins=options, num_gpu_blocks_override=128)
    plain = gpu_engine(tiny, block_size=16, enforce_eager=True, enable_prefix_caching=False, num_gpu_blocks_override=128)
    prefix = [9 + i % 190 for i in range(140)]
    prompts = [[*prefix, *range(30, 31 + n)] for n in (0, 2, 11, 40, 70)]
    run(gpu, [request(gpu, "first", prefix, max_tokens=1)])
    steps: list[int] = []
    runner = gpu._executor._runner
    prefill = runner._eager
    runner._eager = lambda batch: steps.append(batch.num_tokens) or prefill(batch)
    together = run(gpu, [request(gpu, str(i), p, max_tokens=20, ignore_eos=True) for i, p in enumerate(prompts)])
    gpu.allocator.reset()
    run(gpu, [request(gpu, "again", prefix, max_tokens=1)])
    one_by_one = {i: run(gpu, [request(gpu, "x", p, max_tokens=20, ignore_eos=True)]) for i, p in enumerate(prompts)}
    assert steps == [], "a step was computed as a prompt"
    assert ("shared" in kinds(gpu)) == (shared_bytes == 0)
    for i, prompt in enumerate(prompts):
        solo = alone(plain, request(plain, "solo", prompt, max_tokens=20, ignore_eos=True))["solo", 0].tokens
        assert together[str(i), 0].tokens == solo
        assert one_by_one[i]["x", 0].tokens == solo


def test_logits_of_all_sizes_lie_in_one_place_and_are_those_of_their_own_step(tmp_path: Path) -> None:
    """Rows end one after the other and ask for log-probabilities and truncation, so that every step reads its logits, of
    ever another size, while the step before is still on its way."""
    from tests.tiny import tiny_llama

    vocab = 100_000
    folder = tiny_llama(tmp_path / "wide", vocab_size=vocab)
    asks = [
        {"prompt": [9 + i, 30, 77 + i], "max_tokens": 3 + i, "ignore_eos": True, "logprobs": 2, "top_k": 0 if i % 3 else 1}
        for i in range(24)
    ]
    found = {}
    for eager in (False, True):
        gpu = gpu_engine(folder, block_size=16, max_num_seqs=128, num_gpu_blocks_override=160, enforce_eager=eager)
        before = torch.cuda.memory_reserved()
        found[eager] = run(gpu, [request(gpu, str(i), **ask) for i, ask in enumerate(asks)])
        if not eager:
            sizes = range(32, 129, 8)
            for n in sizes:
                run(gpu, [request(gpu, str(i), [11 + i, 12], max_tokens=3, ignore_eos=True) for i in range(n)])
            held = torch.cuda.memory_reserved() - before
            own = 4 * vocab * sum((8, 16, 24, *sizes))
            assert held < own / 2, "far less than the logits of these sizes, one beside the other"
        gpu.close()
    for key, one in found[False].items():
        other = found[True][key]
        assert one.tokens == other.tokens
        for event, same in zip(one.events, other.events, strict=True):
            for mine, its in zip(event.logprobs or [], same.logprobs or [], strict=True):
                assert mine.top_ids[:2] == its.top_ids[:2] and abs(mine.logprob - its.logprob) < 1e-3


@pytest.mark.parametrize(
    ("backend", "dtype"), [("torch", "float32"), ("triton", "float32"), ("triton", "bfloat16"), ("cupy", "bfloat16")]
)
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_spread_e5m2_keys_give_the_torch_reference_s_answer(tmp_path: Path, backend: str, dtype: str, eager: bool) -> None:
    """Prompts, chunks, decode steps and prefix hits over an e5m2 cache; the reference is the CPU in float32, on the same device in 16 bits."""
    if backend != "torch":
        pytest.importorskip(f"octavo_attention_{backend}")
        pytest.importorskip(backend)
    path = tiny_llama(tmp_path / "qk", head_dim=64, architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    shared = {"dtype": dtype, "kv_cache_dtype": "fp8_e5m2", "num_gpu_blocks_override": 64, "block_size": 64}
    reference = make_engine(path, **shared) if dtype == "float32" else gpu_engine(path, attention_backend="torch", **shared)
    gpu = gpu_engine(path, attention_backend=backend, enforce_eager=eager, max_num_batched_tokens=64, max_num_seqs=8, **shared)
    assert gpu.explain["values"]["kv_cache_spread"]["value"] == "on"
    for _ in range(2):  # the second time, prefixes are cached
        together = run(gpu, [request(gpu, str(i), p, max_tokens=24, ignore_eos=True) for i, p in enumerate(PROMPTS)])
        for i, prompt in enumerate(PROMPTS):
            check_tokens(reference, {"prompt": prompt, "max_tokens": 24, "ignore_eos": True}, together[str(i), 0].tokens, dtype)
