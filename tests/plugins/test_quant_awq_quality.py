"""What the search is worth: two layers of SmolLM2's real weights in 4 bits, judged on a text that they were not calibrated on.

The whole model's perplexity takes minutes; it is in benchmarks/RESULTS.md. Here the measure is what the layers give: the mean square
of how much the hidden states change, against plain rounding of the same size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from octavo.cli.quantize import maker, parse_options, quantize
from octavo.config import EngineConfig
from octavo.model.export import CheckpointWriter, read_tensors
from octavo.model.source import resolve_source
from octavo.plugins import discover
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tests.plugins.fourbit import Installed

DATA = Path(__file__).parents[1] / "data"
LAYERS, WINDOW = 2, 256


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with Installed(tmp_path_factory.mktemp("site")):
        yield


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's first layers as a model of their own."""
    source = resolve_source("demo")
    source = replace(source, config={**source.config, "num_hidden_layers": LAYERS})
    folder = tmp_path_factory.mktemp("short") / "model"
    with CheckpointWriter(folder, source) as writer:
        for name, tensor in read_tensors(source, "bfloat16"):
            parts = name.split(".")
            if parts[1] != "layers" or int(parts[2]) < LAYERS:
                writer.add(name, tensor)
        writer.finish({}, dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make(model: Path, out: Path, *settings: str) -> Path:
    entry, function = maker(discover(), "awq")
    assert entry.provider is not None
    options = parse_options("awq", entry.provider.quantize_options, (*settings, f"window={WINDOW}"))
    config = EngineConfig(model=str(model), device="cpu")
    quantize(config, discover(), function, options, out, (DATA / "calibration.txt").read_text()[:2500])
    return out


def plain(folder: Path, model: Path, group: int) -> Path:
    """The checkpoint's weights, dequantised, as a folder of their own."""
    from octavo_quant_awq.formats import Gemm
    from octavo_quant_awq.packing import Grouped

    form, made = Gemm(), {}
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        owner, _, end = name.rpartition(".")
        if end == "qweight":
            inputs, rows = tensor.shape[0], tensor.shape[1] * 8
            zeros = form.zeros(tensors[f"{owner}.qzeros"], rows, inputs // group)
            scales = form.scales(tensors[f"{owner}.scales"], rows, inputs // group)
            made[f"{owner}.weight"] = Grouped(form.q(tensor, 0, rows), scales, zeros, group).dequantised(torch.bfloat16)
        elif end not in ("qzeros", "scales"):
            made[name] = tensor
    out = folder.with_name(f"{folder.name}-plain")
    out.mkdir()
    save_file(made, out / "model.safetensors")
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (out / file).write_text((model / file).read_text())
    return out


def hidden(model: Path) -> Tensor:
    """float32 [tokens, hidden] of a held-out text."""
    from octavo.catalog import Device
    from octavo.interfaces import QuantizeTask
    from octavo.model.adapters import DecoderAdapter
    from octavo.model.observe import ObservedModel

    class Nobody:
        def linear(self, *_: object) -> None: ...

        def attention(self, *_: object) -> None: ...

    text = (DATA / "heldout.txt").read_text()[:2500]
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids[:512]
    task = QuantizeTask(
        resolve_source(str(model)), DecoderAdapter(None, None), Device(), "bfloat16", None, None, lambda *_: None  # type: ignore[arg-type]
    )  # fmt: skip
    return ObservedModel(task, Nobody(), max_len=len(ids)).run(ids).float()


def test_it_loses_at_most_two_thirds_of_what_rounding_loses_in_two_layers(short: Path, tmp_path: Path) -> None:
    right = hidden(short)

    def lost(name: str, *settings: str) -> float:
        made = plain(make(short, tmp_path / name, "group_size=64", *settings), short, 64)
        return float((hidden(made) - right).square().mean() / right.square().mean())

    rounding, searched = lost("rounded", "search=false"), lost("searched")
    assert 0 < searched <= 0.67 * rounding, f"rounding {rounding:.2e}, searched {searched:.2e}"
    assert rounding < 0.1, "4 bits in groups of 64 keep most of the signal"
