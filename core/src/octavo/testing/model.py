"""The conformance suite of model adapters. Needs pytest and, for the default oracle, transformers.

Owns what every adapter must do, whatever the architecture. A third party writes one class:

    from octavo.testing.model import ModelSuite, ModelTarget

    class TestMine(ModelSuite):
        target = ModelTarget(MyAdapter, {"plain": {"architectures": ["MineForCausalLM"], "model_type": "mine", ...}})

Each config is a tiny config.json; its windows should be shorter than 20 tokens, so that prompts pass them. Weights are
random. The model runs in float32 on the CPU over core's torch attention, whose cache holds NaN wherever nothing was written
and whose pages lie in random order; logits are compared with the oracle's over the whole text at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.catalog import Device
from octavo.interfaces import AttentionBackend, AttentionParts, ModelAdapter
from octavo.testing.bare_model import (
    BareModel,
    DictWeights,
    checkpoint,
    random_tensors,
    right_logits,
    torch_attention,
    transformers_model,
)

__all__ = [
    "BareModel",
    "DictWeights",
    "ModelSuite",
    "ModelTarget",
    "Oracle",
    "checkpoint",
    "random_tensors",
    "right_logits",
    "torch_attention",
    "transformers_model",
    "transformers_oracle",
]

LENGTH = 40
"""Tokens of a prompt."""
BLOCK = 8
"""Tokens of a block in the smallest group."""


@dataclass(frozen=True)
class Oracle:
    """What a model is compared with: the checkpoint's tensors by name, and the logits of a text, float32 [tokens, vocab]."""

    tensors: Mapping[str, Tensor]
    logits: Callable[[Sequence[int]], Tensor]


def transformers_oracle(config: Mapping[str, Any], *, spread: float = 0.2) -> Oracle:
    """transformers' eager model of the config with random weights of standard deviation `spread`, by the names under which
    transformers saves them. A larger spread makes larger logits, and larger errors of rounding."""
    model = transformers_model(config, spread=spread)
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    return Oracle(checkpoint(model, {**config, "tie_word_embeddings": tied}), lambda tokens: right_logits(model, tokens))


@dataclass(frozen=True)
class ModelTarget:
    """The adapter under test (its class; called with options None and parts None), configs by a name of your choice, and
    what they are compared with. tolerance: largest absolute error of a float32 logit. device and attention: where the model
    runs and over which backend (default: the CPU, core's torch backend)."""

    adapter: Callable[[Any, None], ModelAdapter]
    configs: Mapping[str, Mapping[str, Any]]
    oracle: Callable[[Mapping[str, Any]], Oracle] = transformers_oracle
    tolerance: float = 1e-4
    device: Device | None = None
    attention: Callable[[AttentionParts], AttentionBackend] = torch_attention


class ModelSuite:
    """Subclass it as `class TestX(ModelSuite)` and set `target`."""

    target: ModelTarget

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.target.configs)

    @classmethod
    @cache
    def oracle(cls, case: str) -> Oracle:
        return cls.target.oracle(cls.target.configs[case])

    def build(self, case: str, **kw: Any) -> BareModel:
        """The model of a case with the oracle's weights."""
        options = {"block_size": BLOCK, "device": self.target.device, "attention": self.target.attention} | kw
        return BareModel(self.target.adapter(None, None), self.target.configs[case], self.oracle(case).tensors, **options)

    def prompt(self, case: str, seed: int = 0, length: int = LENGTH) -> list[int]:
        vocab = self.target.adapter(None, None).facts(self.target.configs[case], "float32", "auto").vocab_size
        return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()

    def close(self, found: Tensor, right: Tensor, what: str) -> None:
        assert found.dtype == torch.float32 and found.shape == right.shape, f"{what}: {found.dtype} {tuple(found.shape)}"
        assert bool(torch.isfinite(found).all()), f"{what}: not finite: something unwritten was read"
        error = float((found.cpu() - right).abs().max())
        assert error <= self.target.tolerance, f"{what}: off by {error:.1e}, at most {self.target.tolerance:.0e}"

    # ------------------------------------------------------------ logits

    def test_a_prompt_in_one_step(self, case: str) -> None:
        prompt = self.prompt(case)
        found = self.build(case).feed(0, prompt, [LENGTH], bounds={0: LENGTH})
        self.close(found, self.oracle(case).logits(prompt), "the prompt in one step")

    @pytest.mark.parametrize("portions", [[1] * LENGTH, [17, 1, 22], [5, 16, 16, 3]], ids=["tokens", "chunks", "more chunks"])
    def test_a_prompt_in_portions(self, case: str, portions: list[int]) -> None:
        prompt = self.prompt(case)
        found = self.build(case).feed(0, prompt, portions, bounds={0: LENGTH})
        self.close(found, self.oracle(case).logits(prompt), f"the prompt in portions {portions[:5]}")

    def test_steps_that_end_at_the_edge_of_a_window(self, case: str) -> None:
        bare, prompt = self.build(case), self.prompt(case)
        windows = {spec.window for spec in bare.facts.kv_specs if spec.window is not None}
        if not windows:
            pytest.skip("no layer of this model has a window")
        right = self.oracle(case).logits(prompt)
        assert all(window < LENGTH // 2 for window in windows), f"windows {windows} are never left by {LENGTH} tokens"
        for row, end in enumerate((-1, 0, 1)):
            first = min(windows) + end
            found = bare.feed(row, prompt, [first, 1, 1, LENGTH - first - 2], bounds={row: LENGTH})
            self.close(found, right, f"steps that end at {first}, {first + 1} and {first + 2} of a window of {min(windows)}")

    def test_rows_that_share_a_step(self, case: str) -> None:
        """A prompt, a chunk and two decodes in one step, each as if it were alone."""
        bare, lengths, done = self.build(case), (30, 21, 1, 50), (12, 20, 0, 0)
        prompts = [self.prompt(case, seed, length) for seed, length in enumerate(lengths)]
        bounds = dict(enumerate(lengths))
        bare.run([(row, prompts[row][:n]) for row, n in enumerate(done) if n], bounds=bounds)
        order = (2, 0, 3, 1)
        found = bare.run([(row, prompts[row][done[row] :]) for row in order], bounds=bounds)
        for row, logits in zip(order, found, strict=True):
            right = self.oracle(case).logits(prompts[row])[done[row] :]
            self.close(logits, right, f"row {row}, tokens from {done[row]}")

    def test_a_prefix_hit_continues_as_if_computed(self, case: str) -> None:
        bare, first = self.build(case), self.prompt(case)
        size = max(group.block_size for group in bare.groups)
        if size >= LENGTH:
            pytest.skip(f"blocks of {size} tokens are longer than the prompt")
        other = first[:size] + self.prompt(case, 1, LENGTH - size)
        bare.feed(0, first, [LENGTH], bounds={0: LENGTH})
        bare.hit(0, 1, size)
        found = bare.feed(1, other[size:], [LENGTH - size - 1, 1], bounds={1: LENGTH})
        self.close(found, self.oracle(case).logits(other)[size:], f"after a hit of {size} tokens")

    def test_bfloat16_stays_near(self, case: str) -> None:
        """Within what a reduced mantissa does to a sum over all layers: a wrong dtype on the way, or an overflow, is more."""
        prompt = self.prompt(case)
        found = self.build(case, dtype="bfloat16").feed(0, prompt, [20, 1, 19], bounds={0: LENGTH}).cpu()
        right = self.oracle(case).logits(prompt)
        assert found.dtype == torch.float32 and bool(torch.isfinite(found).all())
        ahead = torch.nn.functional.cosine_similarity(found, right, dim=-1)
        assert float(ahead.median()) > 0.99, f"bfloat16 logits point elsewhere: median cosine {float(ahead.median()):.3f}"

    # ------------------------------------------------------------ the weight map

    def test_every_tensor_of_the_checkpoint_has_one_place(self, case: str) -> None:
        """None left over, none missing, every shape as declared (BareModel checks all three)."""
        self.build(case)

    def test_a_checkpoint_that_misses_a_tensor_is_noticed(self, case: str) -> None:
        declared = self.build(case).declared
        tensors = self.oracle(case).tensors
        canonical = getattr(self.target.adapter(None, None), "canonical", lambda name: name)
        for name in {next(iter(tensors)), next(n for n in reversed(list(tensors)) if not declared[canonical(n)][2])}:
            rest = {key: tensor for key, tensor in tensors.items() if key != name}
            with pytest.raises(AssertionError, match="not in the checkpoint"):
                BareModel(self.target.adapter(None, None), self.target.configs[case], rest)

    def test_a_tensor_of_another_architecture_is_not_ignored(self, case: str) -> None:
        adapter = self.target.adapter(None, None)
        for name in self.oracle(case).tensors:
            assert not adapter.ignored(name), f"the adapter says that it ignores {name}, which the model needs"
        assert not adapter.ignored("model.layers.0.self_attn.extra_proj.weight")

    # ------------------------------------------------------------ facts

    def test_the_facts_describe_what_is_built(self, case: str) -> None:
        """The plan is made from the facts, before there is a model: both must speak of the same layers."""
        bare = self.build(case)
        facts = bare.facts
        assert facts.vocab_size == bare.feed(0, self.prompt(case)[:2], [2]).shape[1]
        assert [layer.index for layer in facts.layers] == list(range(len(facts.kv_specs)))
        assert sorted(bare.layers) == list(range(len(facts.layers)))
        for planned, spec in zip(facts.layers, facts.kv_specs, strict=True):
            built = bare.layers[planned.index]
            for name in ("num_heads", "num_kv_heads", "k_dim", "v_dim", "scale", "window", "softcap"):
                assert getattr(planned, name) == getattr(built, name), f"layer {planned.index}: {name}"
            assert (planned.has_sinks or planned.sinks is not None) == (built.sinks is not None), f"layer {planned.index}: sinks"
            assert spec.window == planned.window and spec.k_dim == planned.k_dim, f"layer {planned.index}: its KV spec"
