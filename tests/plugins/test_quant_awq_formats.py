"""What quant_awq reads and refuses: nibble orders, settings, shapes, shards; each refusal names the layer and the numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from octavo.catalog import Accept, Device, Needs, Reject
from octavo.errors import LoadError
from octavo.interfaces import QuantizerParts
from octavo.model.linear import PlainLinear
from octavo.model.loader import WeightTable

from tests.plugins.fourbit import LAYOUTS, rounded, words

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


def packed(**weights: Any) -> dict[str, Any]:
    config: dict[str, Any] = LAYOUTS["packed"].config(128)
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


def quantizer(config: dict[str, Any], table: WeightTable | None = None) -> Any:
    from octavo_quant_awq import quantizer as module
    from octavo_quant_awq.provider import FourBitOptions

    kind = {"awq": module.AwqQuantizer, "gptq": module.GptqQuantizer, "compressed-tensors": module.PackQuantizer}
    parts = QuantizerParts(Device(), "float32", config, WeightTable() if table is None else table)
    return kind[config["quant_method"]](FourBitOptions(), parts)


# ---------------------------------------------------------------- numbers


def test_a_gemm_word_holds_its_columns_in_awq_order() -> None:
    from octavo_quant_awq.packing import INVERSE, unpack

    assert unpack(torch.tensor([0x76543210], dtype=torch.int32), INVERSE).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_a_word_with_the_sign_bit_is_masked_after_the_shift() -> None:
    from octavo_quant_awq.packing import unpack

    assert unpack(torch.tensor([-1], dtype=torch.int32)).tolist() == [15] * 8


@pytest.mark.parametrize("zero", [0, 1, 15])
def test_zero_points_are_taken_as_they_are(zero: int) -> None:
    """w = (q - z) * s: no off-by-one at either end, and none turned into the other."""
    from octavo_quant_awq.formats import Gemm
    from octavo_quant_awq.packing import Grouped

    q = torch.arange(16, dtype=torch.int64).repeat(8, 2).numpy()
    place = {0: 0, 4: 1, 1: 2, 5: 3, 2: 4, 6: 5, 3: 6, 7: 7}  # where each column is, by hand
    by_column = {column: nibble for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7))}
    assert by_column[1] == 4 and place[4] == 1
    stored = words(q.T, by_column), words(torch.full((1, 8), zero).numpy(), by_column)
    form = Gemm()
    grouped = Grouped(form.q(stored[0], 0, 8), torch.full((8, 1), 0.5), form.zeros(stored[1], 8, 1), 32)
    assert torch.equal(grouped.dequantised(), (torch.from_numpy(q) - zero) * 0.5)


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_group_gives_the_weights_that_it_stands_for(layout: str, group: int) -> None:
    made = LAYOUTS[layout].store(group)(torch.randn(24, 384, generator=torch.Generator().manual_seed(3)))
    table = WeightTable()
    linear = quantizer(LAYOUTS[layout].config(group), table).linear("m", 384, {"a": 24})
    for end, tensor in made.tensors.items():
        table.fill(f"m.a.{end}", tensor)
    linear.finish()
    assert torch.equal(linear.dequantised(), made.weight.float())


def test_rows_are_read_in_slices_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo_quant_awq import linear as module

    monkeypatch.setattr(module, "SLICE", 8 * 384)
    for layout in LAYOUTS:
        test_every_layout_and_group_gives_the_weights_that_it_stands_for(layout, 64)


def test_a_word_in_memory_holds_what_a_lane_of_a_tensor_core_instruction_needs() -> None:
    """Word (block, row, lane, step): the pairs at 128 block + 32 step + 8 p + 2 lane, even inputs in nibbles 0..3, odd ones in 4..7."""
    from octavo_quant_awq.packing import blocked, unpack

    q = torch.randint(0, 16, (24, 256), dtype=torch.uint8)
    words = blocked(q)
    assert words.shape == (2, 24, 4, 4)
    for block, row, lane, step in [(0, 0, 0, 0), (1, 5, 2, 1), (1, 23, 3, 3)]:
        first = [128 * block + 32 * step + 8 * p + 2 * lane for p in range(4)]
        right = [int(q[row, k]) for k in first] + [int(q[row, k + 1]) for k in first]
        assert unpack(words[block, row, lane, step, None]).tolist() == right


def test_the_layout_in_memory_is_undone_by_its_inverse() -> None:
    from octavo_quant_awq.packing import blocked, paired, unblocked, unpaired

    q = torch.randint(0, 16, (24, 200), dtype=torch.uint8)
    assert torch.equal(unblocked(blocked(q), 200), q)
    scales = torch.randn(3, 32)
    assert torch.equal(unpaired(paired(scales)), scales)
    assert paired(torch.arange(32)[None])[0, :4].tolist() == [0, 8, 1, 9]


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("inputs", "group", "others"),
    [(96, 64, "32 or -1"), (96, 128, "32 or -1"), (2752, 128, "64 or 32 or -1"), (576, 128, "64 or 32 or -1")],
)
def test_inputs_that_do_not_divide_into_groups_are_refused(inputs: int, group: int, others: str) -> None:
    with pytest.raises(
        LoadError, match=rf"^m\.down_proj: its {inputs} inputs do not divide into groups of {group}.*group_size of {others} would"
    ):
        quantizer(AWQ | {"group_size": group}).linear("m", inputs, {"down_proj": 64})


def test_one_group_takes_any_inputs() -> None:
    assert quantizer(AWQ | {"group_size": -1}).linear("m", 96, {"a": 64}).out_features == 64


@pytest.mark.parametrize("config", [AWQ, GPTQ, LAYOUTS["packed-asymmetric"].config(128)])
def test_outputs_that_do_not_fill_words_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match=r"^m\.a: 60 outputs are not a multiple of 8"):
        quantizer(config).linear("m", 128, {"a": 60})


def test_outputs_of_layouts_that_do_not_pack_them_may_be_any() -> None:
    for layout in ("gemv", "packed"):
        made = LAYOUTS[layout]
        if layout == "gemv":
            continue  # its zero points lie along inputs: nothing packs outputs
        assert quantizer(made.config(128)).linear("m", 128, {"a": 60}).out_features == 60


def test_a_shard_border_inside_a_group_is_refused_with_sizes_that_would_do() -> None:
    from octavo_quant_awq.formats import check_shard

    with pytest.raises(LoadError, match=r"o_proj: 384 inputs in groups of 128 cannot be divided among 2.*size of 1, 3 would do"):
        check_shard("o_proj", 384, 128, 2)
    assert check_shard("o_proj", 512, 128, 2) == 256


# ---------------------------------------------------------------- excluded modules


@pytest.mark.parametrize(
    ("names", "plain", "quantised"),
    [
        (["mlp.down_proj"], ["model.layers.0.mlp.down_proj"], ["model.layers.0.mlp.up_proj"]),
        ("down_proj", ["model.layers.3.mlp.down_proj"], ["model.layers.3.mlp.gate_proj"]),
        (["model.layers.1."], ["model.layers.1.mlp.up_proj"], ["model.layers.11.mlp.up_proj"]),
        (None, [], ["model.layers.0.mlp.down_proj"]),
    ],
)
def test_modules_to_not_convert(names: Any, plain: list[str], quantised: list[str]) -> None:
    made = quantizer(AWQ | {"modules_to_not_convert": names})
    for name in plain + quantised:
        prefix, _, part = name.rpartition(".")
        assert isinstance(made.linear(prefix, 128, {part: 64}), PlainLinear) == (name in plain), name


def test_ignored_modules_of_compressed_tensors_are_names_or_expressions() -> None:
    made = quantizer(packed() | {"ignore": ["lm_head", "model.layers.0.mlp.up_proj", "re:.*o_proj$"]})
    for name, plain in (("model.layers.0.mlp.up_proj", True), ("model.layers.00.mlp.up_proj", False), ("x.o_proj", True)):
        prefix, _, part = name.rpartition(".")
        assert isinstance(made.linear(prefix, 128, {part: 64}), PlainLinear) == plain, name


def test_a_fused_layer_of_which_a_part_is_excluded_is_both_side_by_side() -> None:
    weight = torch.randn(16, 128)
    q = LAYOUTS["gemm"].store(128)(torch.randn(32, 128))
    table = WeightTable()
    linear = quantizer(AWQ | {"modules_to_not_convert": ["k_proj"]}, table).linear("m", 128, {"q_proj": 32, "k_proj": 16})
    for end, tensor in q.tensors.items():
        table.fill(f"m.q_proj.{end}", tensor)
    table.fill("m.k_proj.weight", weight)
    linear.finish()
    x = torch.randn(3, 128)
    assert torch.allclose(linear(x), torch.cat((x @ q.weight.float().T, x @ weight.T), 1), atol=1e-4)


def test_heads_are_plain() -> None:
    assert isinstance(quantizer(AWQ).linear("", 128, {"lm_head": 64}, head=True), PlainLinear)


# ---------------------------------------------------------------- settings

REFUSED = [
    (AWQ | {"bits": 8}, "bits is 8"),
    (AWQ | {"version": "exllama"}, "version 'exllama'"),
    (AWQ | {"group_size": 256}, "group_size 256"),
    (AWQ | {"zero_point": False}, "zero_point False"),
    (AWQ | {"modules_to_not_convert": 3}, "modules_to_not_convert is 3"),
    (GPTQ | {"bits": 3}, "bits is 3"),
    (GPTQ | {"sym": False}, "sym False"),
    (GPTQ | {"desc_act": True}, "desc_act true"),
    (GPTQ | {"lm_head": True}, "lm_head true"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    (packed(num_bits=8), "num_bits is 8"),
    (packed(type="float"), "type is 'float'"),
    (packed(actorder="group"), "actorder 'group'"),
    (packed(strategy="block"), "strategy 'block'"),
    (packed() | {"ignore": ["re:("]}, "not a regular expression"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_settings_that_are_not_read_are_refused_before_anything_is_loaded(config: dict[str, Any], words: str) -> None:
    answer = accepts(config)
    assert isinstance(answer, Reject) and words in answer.reason


@pytest.mark.parametrize(
    "config", [AWQ, {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}, GPTQ, packed()]
)
def test_settings_that_are_read(config: dict[str, Any]) -> None:
    assert isinstance(accepts(config), Accept)


@pytest.mark.parametrize(
    ("capability", "kernel", "text"),
    [
        (
            (9, 0),
            "cuda",
            r"narrow\.cu up to \d+ rows of a step, stationary\.cu or split\.cu up to \d+, ring\.cu or warpgroup\.cu up to \d+, warpgroup\.cu up to \d+, more are dequantised",
        ),
        ((8, 0), "cuda", r"w4a16\.cu up to \d+ rows of a step, more are dequantised"),
        ((9, 0), "triton", r"the Triton kernel up to \d+ rows of a step, more are dequantised"),
    ],
)
def test_explain_says_which_kernel_takes_how_many_rows(capability: tuple[int, int], kernel: str, text: str) -> None:
    from octavo_quant_awq import provider

    needs = Needs("quantizer", Device("cuda", name="GPU", capability=capability), "bfloat16", {"config": AWQ, "method": "awq"})
    answer = provider.awq.accepts(needs, provider.FourBitOptions(kernel=kernel))  # type: ignore[arg-type]
    assert isinstance(answer, Accept) and re.search(text, answer.reason)


def accepts(config: dict[str, Any], device: Device = Device(), dtype: str = "bfloat16", **facts: Any) -> Accept | Reject:  # noqa: B008
    from octavo_quant_awq.provider import awq, gptq, pack_quantized

    method = facts.get("method", config.get("quant_method", ""))
    provider = {"gptq": gptq, "compressed-tensors": pack_quantized}.get(method, awq)
    needs = Needs("quantizer", device, dtype, {"config": config, "method": method, **facts})
    return provider.accepts(needs, provider.options())


def test_plain_weights_are_refused_with_what_to_do_and_random_ones_taken() -> None:
    answer = accepts({}, method="awq")
    assert isinstance(answer, Reject) and "octavo quantize awq" in answer.reason
    assert isinstance(accepts({}, method="awq", dummy=True), Accept)
    assert isinstance(accepts({}, method=""), Reject)


def test_other_formats_of_compressed_tensors_are_left_to_others() -> None:
    config = packed() | {"format": "float-quantized"}
    answer = accepts(config)
    assert isinstance(answer, Reject) and "float-quantized" in answer.reason


def test_float32_on_a_gpu_is_refused() -> None:
    answer = accepts(AWQ, Device("cuda", name="H200", capability=(9, 0)), "float32")
    assert isinstance(answer, Reject) and "bfloat16 or float16" in answer.reason


# ---------------------------------------------------------------- what tensors themselves say


def fill(config: dict[str, Any], change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    layout = "gptq" if config["quant_method"] == "gptq" else "packed"
    tensors = dict(LAYOUTS[layout].write(rounded(torch.randn(16, 256), 128, symmetric=True)))
    change(tensors)
    table = WeightTable()
    quantizer(config, table).linear("m", 256, {"a": 16})
    for end, tensor in tensors.items():
        table.fill(f"m.a.{end}", tensor)


def test_a_gptq_checkpoint_in_the_order_of_activations_is_refused_by_layer() -> None:
    def shuffle(tensors: dict[str, torch.Tensor]) -> None:
        tensors["g_idx"][3] = 1

    with pytest.raises(LoadError, match=r"m\.a\.g_idx: input 3 is of group 1, not 0"):
        fill(GPTQ, shuffle)


def test_a_gptq_zero_point_that_is_not_8_is_refused_by_layer() -> None:
    def other(tensors: dict[str, torch.Tensor]) -> None:
        tensors["qzeros"][1, 0] = 0x77777770

    with pytest.raises(LoadError, match=r"m\.a\.qzeros: the zero point of output 0 in group 1 is 1"):
        fill(GPTQ, other)


def test_a_packed_matrix_of_another_shape_is_refused_by_layer() -> None:
    def other(tensors: dict[str, torch.Tensor]) -> None:
        tensors["weight_shape"] = torch.tensor([16, 250])

    with pytest.raises(LoadError, match=r"m\.a\.weight_shape says that the matrix is \[16, 250\]"):
        fill(packed(), other)


def test_a_quantised_head_of_compressed_tensors_is_refused_by_name() -> None:
    with pytest.raises(LoadError, match="lm_head: is not in the checkpoint's ignore list"):
        quantizer(packed() | {"ignore": []}).linear("", 128, {"lm_head": 64}, head=True)
