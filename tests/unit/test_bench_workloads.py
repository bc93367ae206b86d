"""Workloads are the same numbers everywhere; latencies mean what their docstrings say."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from octavo.bench.latency import Timeline, report, summary
from octavo.bench.record import surroundings
from octavo.bench.workloads import SHAPES, WORKLOADS, workload, write_shape
from octavo.errors import ConfigError

DIGESTS = {
    "mixed256": "4c3bede6f064a1fa",
    "bs1": "197bd33a7b00afbb",
    "prefill": "56107fca1804f41b",
    "prefix": "5b14c916ae210c09",
    "long": "a54d7e233a280200",
    "decode256": "1a2b0ecf3af57d2e",
    "cpu-bs1": "a73f4ab1c437732b",
    "cpu-b16": "f346154aba39284b",
    "cpu-prefill": "ce1b0868d0cdad70",
}
"""SHA-256 of [[ids, output], ...] as JSON: figures of other engines were taken on exactly these requests."""


@pytest.mark.parametrize("name", sorted(DIGESTS))
def test_a_workload_is_the_same_numbers_on_every_machine(name: str) -> None:
    asks = [(ask.prompt, ask.output) for ask in WORKLOADS[name].asks()]
    assert hashlib.sha256(json.dumps(asks).encode()).hexdigest()[:16] == DIGESTS[name]


def test_every_workload_has_its_digest() -> None:
    assert set(DIGESTS) == set(WORKLOADS)


def test_ids_fit_a_smaller_vocabulary_and_leave_its_special_tokens_out() -> None:
    ids = {i for ask in workload("cpu-b16").asks(512) for i in ask.prompt}
    assert min(ids) >= 10 and max(ids) < 512


def test_the_prefix_workload_shares_exactly_its_first_2048_tokens() -> None:
    asks = workload("prefix").asks()
    assert len({tuple(a.prompt[:2048]) for a in asks}) == 1 and len({a.prompt[2048] for a in asks}) > 1


def test_an_unknown_workload_is_answered_with_the_closest() -> None:
    with pytest.raises(ConfigError, match="did you mean cpu-b16"):
        workload("cpu-b116")


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_shape_is_a_config_that_transformers_reads(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(write_shape(name, tmp_path / name))
    assert config.model_type == SHAPES[name]["model_type"]
    assert config.num_attention_heads % config.num_key_value_heads == 0


class TestLatency:
    def test_of_one_request(self) -> None:
        t = Timeline(sent=10.0, arrivals=[10.5, 10.6, 11.5], tokens=5)
        assert t.ttft == pytest.approx(0.5)
        assert t.e2e == pytest.approx(1.5)
        assert t.gaps == pytest.approx([0.1, 0.9])
        assert t.tpot == pytest.approx(1.0 / 4), "four tokens came after the first, however many pieces brought them"

    def test_a_single_token_has_no_time_per_output_token(self) -> None:
        assert Timeline(0.0, [1.0], 1).tpot is None

    def test_percentiles_are_in_milliseconds_and_interpolated(self) -> None:
        found = summary([i / 1000 for i in range(101)])
        assert found == {"mean": 50.0, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}

    def test_requests_without_a_token_are_in_no_latency(self) -> None:
        assert report([Timeline(0.0)])["ttft_ms"] is None
        assert report([Timeline(0.0), Timeline(0.0, [1.0], 1)])["ttft_ms"]["mean"] == 1000.0


def test_every_record_says_where_and_when_it_was_taken() -> None:
    record = surroundings()
    assert record["versions"]["torch"] and record["machine"]["cores"] >= 1 and record["date"].endswith("+00:00")


def test_a_shape_can_be_written_with_a_tokenizer_of_its_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = write_shape("qwen3-0.6b", tmp_path, tokenizer=True)
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert made.get_vocab_size() == SHAPES["qwen3-0.6b"]["vocab_size"]
    assert made.decode(made.encode("The capital of France é").ids) == "The capital of France é"
    assert len({made.decode([i]) for i in range(1000, 2000)}) == 1000


def test_a_shape_overwrites_nothing_but_itself(tmp_path: Path) -> None:
    folder = write_shape("qwen3-0.6b", tmp_path / "shape", tokenizer=True)
    assert write_shape("qwen3-0.6b", folder) == folder
    with pytest.raises(ConfigError, match=r"holds something else than the shape llama-3\.1-8b"):
        write_shape("llama-3.1-8b", folder)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        write_shape("qwen3-0.6b", tmp_path)
    assert not (tmp_path / "config.json").exists()
