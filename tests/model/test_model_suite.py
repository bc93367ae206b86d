"""The conformance suite of model adapters can fail: adapters with one thing wrong each, and the test that must see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from octavo.interfaces import Model, ModelFacts, ModelParts
from octavo.model.adapters import DecoderAdapter
from octavo.model.decoder import Decoder
from octavo.model.decoder_config import DecoderConfig
from octavo.model.families import read_decoder
from octavo.testing.model import LENGTH, BareModel, ModelSuite, ModelTarget, random_tensors
from torch import Tensor

from tests.model.test_families import VARIANTS

CASE = "gemma3"


class Altered(DecoderAdapter):
    """Builds a decoder whose config is not the one that was read."""

    def alter(self, config: DecoderConfig) -> DecoderConfig:
        raise NotImplementedError

    def build(self, config: Mapping[str, Any], parts: ModelParts) -> Model:
        return Decoder(self.alter(read_decoder(config)), parts)


class NoOffset(Altered):
    def alter(self, config: DecoderConfig) -> DecoderConfig:
        return replace(config, norm_offset=0.0)


class WiderWindow(Altered):
    """W + 1 keys, in facts and model alike."""

    def facts(self, config: Mapping[str, Any], dtype: str, kv_dtype: str) -> ModelFacts:
        return super().facts({**config, "sliding_window": 8}, dtype, kv_dtype)

    def alter(self, config: DecoderConfig) -> DecoderConfig:
        return replace(config, layers=tuple(replace(la, window=la.window and la.window + 1) for la in config.layers))


class OtherScale(Altered):
    """The model is scaled otherwise than its facts say."""

    def alter(self, config: DecoderConfig) -> DecoderConfig:
        return replace(config, scale=0.25)


class LaxWeights(DecoderAdapter):
    def ignored(self, name: str) -> bool:
        return name.startswith("model.layers.")


class LostNorms(Altered):
    """Has no place for some tensors of the checkpoint."""

    def alter(self, config: DecoderConfig) -> DecoderConfig:
        return replace(config, qk_norm=False)


class Remembers(DecoderAdapter):
    """A model with a memory: what it answers depends on how the prompt was cut."""

    def build(self, config: Mapping[str, Any], parts: ModelParts) -> Model:
        model = super().build(config, parts)
        logits, calls = model.logits, []

        def more(hidden: Tensor) -> Tensor:
            calls.append(1)
            return logits(hidden) + 0.01 * (len(calls) - 1)

        model.logits = more  # type: ignore[method-assign]
        return model


def suite(adapter: type[DecoderAdapter]) -> ModelSuite:
    class Suite(ModelSuite):
        target = ModelTarget(adapter, {CASE: VARIANTS[CASE]})

    return Suite()


@pytest.mark.parametrize(
    ("adapter", "test"),
    [
        (NoOffset, lambda s: s.test_a_prompt_in_one_step(CASE)),
        (WiderWindow, lambda s: s.test_a_prompt_in_one_step(CASE)),
        (WiderWindow, lambda s: s.test_steps_that_end_at_the_edge_of_a_window(CASE)),
        (OtherScale, lambda s: s.test_the_facts_describe_what_is_built(CASE)),
        (LaxWeights, lambda s: s.test_a_tensor_of_another_architecture_is_not_ignored(CASE)),
        (LostNorms, lambda s: s.test_every_tensor_of_the_checkpoint_has_one_place(CASE)),
        (Remembers, lambda s: s.test_a_prompt_in_portions(CASE, [17, 1, LENGTH - 18])),
        (Remembers, lambda s: s.test_a_prefix_hit_continues_as_if_computed(CASE)),
    ],
    ids=lambda value: getattr(value, "__name__", "") if isinstance(value, type) else "",
)
def test_a_wrong_adapter_fails(adapter: type[DecoderAdapter], test: Callable[[ModelSuite], None]) -> None:
    with pytest.raises(AssertionError):
        test(suite(adapter))


def test_the_right_adapter_passes_where_these_fail() -> None:
    right = suite(DecoderAdapter)
    right.test_a_prompt_in_one_step(CASE)
    right.test_the_facts_describe_what_is_built(CASE)
    right.test_a_prefix_hit_continues_as_if_computed(CASE)


def test_random_tensors_are_a_checkpoint_of_everything_that_is_declared() -> None:
    """Two models of it agree, whoever made it has no say in the names, and another seed is another model."""
    config = VARIANTS[CASE]
    first, again, other = (random_tensors(DecoderAdapter(None, None), config, seed=seed) for seed in (0, 0, 1))
    prompt = [1, 2, 3, 4, 5]
    logits = [BareModel(DecoderAdapter(None, None), config, made).feed(0, prompt, [5]) for made in (first, again, other)]
    assert bool(logits[0].isfinite().all()) and bool((logits[0] == logits[1]).all())
    assert not bool((logits[0] == logits[2]).any())
