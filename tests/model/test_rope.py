"""RoPE: every type, both config layouts, and what it costs to get one slightly wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from octavo.errors import LoadError
from octavo.model.adapters import DecoderAdapter
from octavo.model.operators import rope as rope_operator
from octavo.model.rope import RopeConfig, read_rope
from octavo.model.rope import variants as rope_variants
from octavo.model.rotary import Rotary, inverse_frequencies
from octavo.testing.model import BareModel, checkpoint, right_logits, transformers_model

from tests.model.test_families import TOLERANCE, config, tokens


def read(rope: dict[str, Any] | None, *, layout: str = "rope_scaling", head_dim: int = 64, **top: Any) -> RopeConfig:
    whole: dict[str, Any] = {"max_position_embeddings": 4096, **top}
    if rope is not None:
        whole[layout] = rope
    return read_rope(whole, head_dim)


def rotary(rope: RopeConfig, dtype: torch.dtype = torch.float32, max_len: int = 1 << 17) -> Rotary:
    return Rotary(rope, max_len=max_len, dtype=dtype, device=torch.device("cpu"))


# ---------------------------------------------------------------- YaRN's magnitude


@pytest.mark.parametrize("layout", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"factor": 16}, 1.27726),
        ({"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        ({"factor": 64, "attention_factor": 1.0}, 1.0),
        ({"factor": 40, "mscale": 1.0, "mscale_all_dim": 0.707}, 1.08573),
        ({"factor": 40, "mscale": 1.0}, 0.1 * math.log(40) + 1),
        ({"factor": 1}, 1.0),
        ({"factor": 32, "attention_factor": None, "truncate": False}, 1.34657),
    ],
)
def test_yarn_scales_cos_and_sin_by_the_right_factor_once(
    layout: str, key: str, numbers: dict[str, Any], expected: float
) -> None:
    rope = read({key: "yarn", "original_max_position_embeddings": 4096, **numbers}, layout=layout)
    assert rope.attention_factor == pytest.approx(expected, abs=1e-5)
    cos, sin = rotary(rope).angles(torch.arange(3), None)
    assert torch.allclose((cos**2 + sin**2).sqrt(), torch.tensor(expected, dtype=torch.float32), atol=1e-5)


def test_a_factor_of_null_is_the_ratio_of_the_two_lengths() -> None:
    rope = read({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024})
    assert rope.factor == 4.0 and rope.original == 1024


# ---------------------------------------------------------------- frequencies, against transformers


TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, all keys": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2,
        "mscale": 1.0, "mscale_all_dim": 0.5,
    },
    "yarn, not truncated": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 512,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("layout", ["rope_scaling", "rope_parameters"])
def test_frequencies_are_transformers_bit_for_bit(name: str, layout: str) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    over = {layout: dict(TYPES[name]), "rope_theta": 5000.0}
    if layout == "rope_parameters":
        over = {layout: {**TYPES[name], "rope_theta": 5000.0}, "rope_theta": ...}
    made = config("llama", **over)
    rope = read_rope(made, 8)
    parsed = transformers_model(made).config
    if name == "default":
        expected, factor = 1.0 / 5000.0 ** (torch.arange(0, 8, 2).float() / 8), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[rope.type](parsed, torch.device("cpu"))
    assert torch.equal(inverse_frequencies(rope), expected)
    assert rope.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", TYPES)
def test_logits_of_every_type_equal_transformers(name: str, family: str) -> None:
    over = {"head_dim": 8} if family == "qwen3" else {}
    made = config(family, num_hidden_layers=2, rope_parameters={**TYPES[name], "rope_theta": 10000.0}, rope_theta=..., **over)
    oracle = transformers_model(made)
    prompt = tokens(90)
    right = right_logits(oracle, prompt)
    bare = BareModel(DecoderAdapter(None, None), made, checkpoint(oracle, made))
    found = bare.feed(0, prompt, [60, 1, 29], bounds={0: 90})
    assert float((found - right).abs().max()) <= TOLERANCE


def test_partial_rotation_leaves_the_rest_of_the_head_alone() -> None:
    from octavo.model.operators import rope as apply

    partial = read({"rope_type": "default", "partial_rotary_factor": 0.25}, head_dim=64)
    assert partial.dim == 16
    x = torch.randn(5, 3, 64)
    cos, sin = rotary(partial).angles(torch.arange(5), None)
    found = apply(x.clone(), cos, sin)
    assert torch.equal(found[..., 16:], x[..., 16:])
    assert torch.allclose(found[..., :16], apply(x[..., :16].contiguous(), cos, sin))
    assert not torch.allclose(found[1:, :, :16], x[1:, :, :16])


# ---------------------------------------------------------------- dynamic NTK


@pytest.mark.parametrize(
    ("factor", "multipliers"), [(2.0, (1, 1, 1.001, 1.971, 3.1082, 7.4535)), (4.0, (1, 1, 1.002, 2.9579, 5.2664, 14.1214))]
)
def test_dynamic_ntk_multiplies_the_base_as_transformers_does(factor: float, multipliers: tuple[float, ...]) -> None:
    rope = read({"type": "dynamic", "factor": factor}, max_position_embeddings=2048)
    for length, expected in zip((1024, 2048, 2049, 3000, 4096, 8192), multipliers, strict=True):
        assert rope.ntk_multiplier(length) == pytest.approx(expected, abs=2e-4)


def test_dynamic_ntk_takes_its_base_from_the_bound_rounded_up_in_powers_of_two() -> None:
    """The rule of one base a sequence: fixed at admission, so that no cached key is ever of another base."""
    rope = read({"type": "dynamic", "factor": 2.0}, max_position_embeddings=2048)
    lengths = [rope.length(bound) for bound in (1, 2048, 2049, 4096, 4097, 8192, 8193, 20000)]
    assert lengths == [2048, 2048, 4096, 4096, 8192, 8192, 16384, 32768]
    table = rotary(rope, max_len=20000)
    position = torch.tensor([100])
    for bound in (17, 2048, 2049, 5000, 20000):
        frequencies = 1.0 / (10000.0 * rope.ntk_multiplier(rope.length(bound))) ** (torch.arange(0, 64, 2).float() / 64)
        cos, _ = table.angles(position, torch.tensor([bound]))
        assert torch.allclose(cos[0, 0, :32], (100 * frequencies).cos(), atol=1e-5)


def test_dynamic_ntk_up_to_the_original_length_is_plain_rope() -> None:
    made = config("llama", num_hidden_layers=2, max_position_embeddings=64)
    scaled = made | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}
    tensors = checkpoint(transformers_model(made), made)
    prompt = tokens(64)
    plain = BareModel(DecoderAdapter(None, None), made, tensors).feed(0, prompt, [64])
    short = BareModel(DecoderAdapter(None, None), scaled, tensors)
    assert torch.equal(short.feed(0, prompt, [64], bounds={0: 64}), plain)
    assert not torch.allclose(short.feed(1, prompt, [64], bounds={1: 65}), plain)


def test_rows_of_different_variants_share_a_step() -> None:
    """Each row has the angles of its own bound, whatever its neighbours'."""
    made = config("llama", num_hidden_layers=2, max_position_embeddings=32, rope_scaling={"type": "dynamic", "factor": 2.0})
    tensors = checkpoint(transformers_model(made), made)
    bare = BareModel(DecoderAdapter(None, None), made, tensors)
    prompt, bounds = tokens(20), {0: 30, 1: 60, 2: 200}
    together = bare.run([(row, prompt) for row in bounds], bounds=bounds)
    for row, bound in bounds.items():
        alone = BareModel(DecoderAdapter(None, None), made, tensors).feed(0, prompt, [20], bounds={0: bound})
        assert torch.allclose(together[row], alone, atol=1e-5)
    assert not torch.allclose(together[0], together[2])


def test_past_the_original_length_dynamic_ntk_is_transformers_at_the_rounded_length() -> None:
    """A whole prompt of exactly the rounded length, where both rules choose the same base."""
    made = config("llama", num_hidden_layers=2, max_position_embeddings=32, rope_scaling={"type": "dynamic", "factor": 2.0})
    oracle = transformers_model(made)
    prompt = tokens(128)
    right = right_logits(oracle, prompt)
    found = BareModel(DecoderAdapter(None, None), made, checkpoint(oracle, made)).feed(0, prompt, [100, 28], bounds={0: 100})
    assert float((found - right).abs().max()) <= TOLERANCE


def test_longrope_takes_the_long_list_past_the_original_length() -> None:
    made = config("llama", num_hidden_layers=2, rope_scaling=TYPES["longrope"] | {"original_max_position_embeddings": 40})
    oracle = transformers_model(made)
    tensors = checkpoint(oracle, made)
    for count, bound in ((40, 40), (60, 60)):
        prompt = tokens(count)
        right = right_logits(oracle, prompt)
        found = BareModel(DecoderAdapter(None, None), made, tensors).feed(0, prompt, [30, count - 30], bounds={0: bound})
        assert float((found - right).abs().max()) <= TOLERANCE


@pytest.mark.parametrize(
    ("rope", "bounds", "variants"),
    [
        (None, (1, 9000), ["", ""]),
        ({"type": "linear", "factor": 2}, (1, 9000), ["", ""]),
        ({"type": "yarn", "factor": 2}, (1, 9000), ["", ""]),
        (
            {"type": "dynamic", "factor": 2},
            (1, 4096, 4097, 9000),
            ["dynamic:4096", "dynamic:4096", "dynamic:8192", "dynamic:16384"],
        ),
        (
            {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 1024},
            (1, 1024, 1025, 4000),
            ["longrope:short", "longrope:short", "longrope:long", "longrope:long"],
        ),
    ],
)
def test_the_variant_is_named_for_the_prefix_cache(
    rope: dict[str, Any] | None, bounds: tuple[int, ...], variants: list[str]
) -> None:
    """Keys rotated under another base are other values: the variant is part of the cache key."""
    whole = {"max_position_embeddings": 4096, "rope_scaling": rope}
    assert [rope_variants([read_rope(whole, 16)], bound) for bound in bounds] == variants


def test_a_step_without_bounds_is_an_error_where_they_matter() -> None:
    rope = read({"type": "dynamic", "factor": 2.0})
    with pytest.raises(ValueError, match="rope_tokens"):
        rotary(rope).angles(torch.arange(4), None)


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("position", [255, 257, 2047, 8191, 15962, 32767, (1 << 17) - 1])
def test_angles_are_float32_whatever_the_models_dtype(position: int, dtype: torch.dtype) -> None:
    rope = read(None, max_position_embeddings=1 << 17)
    cos, sin = rotary(rope, dtype).angles(torch.tensor([position]), None)
    assert cos.dtype == sin.dtype == dtype
    turns = position * 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    # A float32 frequency is off by half a unit in the last place: that, times the position, and nothing more.
    allowed = 1e-6 + position * 2.0**-24 + (0.0 if dtype == torch.float32 else torch.finfo(dtype).eps)
    assert float((cos[0, 0, :32].double() - turns.cos()).abs().max()) <= allowed
    assert float((sin[0, 0, 32:].double() - turns.sin()).abs().max()) <= allowed


def test_the_measured_bounds_hold_and_bfloat16_frequencies_would_break_them() -> None:
    rope = read(None, max_position_embeddings=1 << 15)
    exact = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    for position, coarse in ((255, 0.04), (2047, 0.3), (8191, 1.3), (32767, 1.9)):
        right = (position * exact).cos()
        cos, _ = rotary(rope).angles(torch.tensor([position]), None)
        assert float((cos[0, 0, :32].double() - right).abs().max()) < 4e-4
        assert float(((position * exact.bfloat16().double()).cos() - right).abs().max()) > coarse


@pytest.mark.parametrize("kind", [None, {"rope_type": "linear", "factor": 8.0}, {"rope_type": "yarn", "factor": 32.0}])
def test_angles_do_not_drift_up_to_two_to_the_twenty(kind: dict[str, Any] | None) -> None:
    """Against the same frequencies in float64: the error is that of one rounding, at position 3 and at a million."""
    rope = read(kind, rope_theta=500000.0)
    positions = torch.cat((torch.arange(5), (1 << 20) - torch.arange(5), torch.randint(0, 1 << 20, (500,))))
    cos, sin = rotary(rope, max_len=1 << 20).angles(positions, None)
    turns = positions.double()[:, None] * inverse_frequencies(rope).double()
    half = turns.shape[1]
    assert float((cos[:, 0, :half].double() - turns.cos() * rope.attention_factor).abs().max()) < 2e-7
    assert float((sin[:, 0, half:].double() - turns.sin() * rope.attention_factor).abs().max()) < 2e-7


@pytest.mark.parametrize("offset", [1 << 15, 1 << 17, (1 << 20) - 64])
def test_a_score_depends_on_the_distance_alone_however_far_out(offset: int) -> None:
    """q at m and k at n have one product wherever the pair stands: what was trained at the front holds at a million."""
    turn = rotary(read(None, rope_theta=1e6), max_len=1 << 20)
    heads = torch.randn(2, 64, 1, 64, generator=torch.Generator().manual_seed(0))

    def scores(first: int) -> torch.Tensor:
        cos, sin = turn.angles(torch.arange(first, first + 64), None)
        q, k = (rope_operator(x.clone(), cos, sin)[:, 0] for x in heads)
        return q @ k.T

    assert float((scores(offset) - scores(0)).abs().max()) < 2e-5


def test_there_is_no_length_at_which_angles_wrap() -> None:
    """No table over positions: past the longest context they go on, and neighbours stay distinct."""
    rope = read({"rope_type": "linear", "factor": 4.0}, max_position_embeddings=4096)
    cos, sin = rotary(rope, max_len=4096).angles(torch.tensor([0, 65535, 65536, 65537, 1 << 20]), None)
    pairs = torch.cat((cos, sin), -1)[:, 0]
    assert torch.isfinite(pairs).all()
    assert len({tuple(row.tolist()) for row in pairs}) == 5


# ---------------------------------------------------------------- reading


def test_theta_is_taken_from_inside_then_from_the_top_then_by_default() -> None:
    assert read({"rope_type": "default", "rope_theta": 7.0}, layout="rope_parameters", rope_theta=8.0).theta == 7.0
    assert read({"rope_type": "default"}, layout="rope_parameters", rope_theta=8.0).theta == 8.0
    assert read(None, rope_theta=8.0).theta == 8.0
    assert read(None).theta == 10000.0


def test_rope_scaling_wins_over_rope_parameters_unless_it_is_empty() -> None:
    both = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 3.0}}
    assert read(None, **both).factor == 2.0
    assert read(None, **(both | {"rope_scaling": None})).factor == 3.0
    assert read(None, **(both | {"rope_scaling": {}})).factor == 3.0


def test_a_top_level_original_length_wins_for_the_types_that_use_it() -> None:
    top = {"original_max_position_embeddings": 512}
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}
    assert read(yarn, **top).original == 512
    assert read(yarn).original == 1024
    assert read({"rope_type": "yarn", "factor": 8.0}).original == 4096
    assert read({"rope_type": "linear", "factor": 8.0}, **top).original == 4096


def test_parameters_keyed_by_layer_type() -> None:
    whole = {
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    assert read_rope(whole, 64, layer_type="full_attention").factor == 8.0
    assert read_rope(whole, 64, layer_type="sliding_attention").theta == 1e4
    with pytest.raises(LoadError, match="chunked_attention"):
        read_rope(whole, 64, layer_type="chunked_attention")


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"type": "ntk-by-parts", "factor": 2.0}, "ntk-by-parts"),
        ({"rope_type": 3}, "3"),
        ({"type": "linear"}, "factor"),
        ({"type": "linear", "factor": None}, "factor"),
        ({"type": "linear", "factor": "2"}, "factor"),
        ({"type": "linear", "factor": 0}, "factor"),
        ({"type": "linear", "factor": math.inf}, "factor"),
        ({"type": "linear", "factor": 2.0, "alpha": 1.0}, "alpha"),
        ({"type": "default", "mrope_section": [8, 12, 12]}, "mrope_section"),
        ({"type": "yarn", "factor": 2.0, "extrapolation_factor": 1.0}, "extrapolation_factor"),
        ({"type": "yarn", "factor": 2.0, "truncate": "no"}, "truncate"),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"type": "dynamic", "factor": 2.0, "beta_fast": 32}, "beta_fast"),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor"),
        ({"type": "longrope", "short_factor": [1.0] * 32}, "long_factor"),
        ({"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [1.0] * 16}, "long_factor"),
        ({"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [0.0] * 32}, "long_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "rope_theta": -1}, "rope_theta"),
        (["linear"], "rope_parameters"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(rope: Any, named: str) -> None:
    with pytest.raises(LoadError, match=named):
        read(rope)
