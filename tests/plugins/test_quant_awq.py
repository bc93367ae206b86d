"""quant_awq on a CPU: every checkpoint layout through the conformance suite of quantizers, then what is its own."""

from __future__ import annotations

from octavo.catalog import Device
from octavo.testing.quantizer import QuantizerSuite, QuantizerTarget

from tests.plugins.fourbit import LAYOUTS, cut_gemm


def target(layout: str, group: int, dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> QuantizerTarget:
    from octavo_quant_awq import provider

    made = LAYOUTS[layout]
    config = made.config(group)
    by_method = {"awq": provider.awq, "gptq": provider.gptq, "compressed-tensors": provider.pack_quantized}
    return QuantizerTarget(
        by_method[str(config["quant_method"])],
        Device(),
        dtypes,
        made.store(group),
        config,
        inputs_multiple=max(group, 8),
        cut=cut_gemm if layout == "gemm" else None,
    )


class TestGemm128(QuantizerSuite):
    target = target("gemm", 128)


class TestGemv64(QuantizerSuite):
    target = target("gemv", 64, ("bfloat16",))


class TestGptq32(QuantizerSuite):
    target = target("gptq", 32, ("float16",))


class TestPackedWhole(QuantizerSuite):
    target = target("packed", -1, ("bfloat16",))


class TestPackedAsymmetric32(QuantizerSuite):
    target = target("packed-asymmetric", 32, ("bfloat16",))
