"""`octavo quantize fp8`: a compressed-tensors checkpoint with FP8 weights, and where there is a text to calibrate on, static
input scales and KV-cache scales.

Owns what is measured on the text, and how the result is described in config.json. Weights go through one at a time; only
calibration loads the model.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from octavo.errors import ConfigError, QuantizeError
from octavo.interfaces import AttentionLayer, Quantized, QuantizeTask
from octavo.model.export import read_tensors
from octavo.model.linear import torch_device
from octavo.model.observe import ObservedModel, calibration_windows, check_checkpoint, linear_modules
from torch import Tensor

from octavo_quant_fp8.numerics import E4M3_MAX, TINY, quantise_blocks, quantise_rows, scale_of, to_e4m3
from octavo_quant_fp8.provider import MakeOptions
from octavo_quant_fp8.scheme import BLOCK


class Peaks:
    """octavo.model.observe.Observer: the largest absolute value that entered each Linear and each cache."""

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}  # by module, a scalar on the device: nothing waits for it
        self.caches: dict[str, tuple[Tensor, Tensor]] = {}  # by attention module: k's and v's

    def linear(self, names: tuple[str, ...], x: Tensor) -> None:
        peak = x.abs().amax().float()
        for name in names:
            self.inputs[name] = torch.maximum(self.inputs.get(name, peak), peak)

    def attention(self, layer: AttentionLayer, k: Tensor, v: Tensor) -> None:
        new = k.abs().amax().float(), v.abs().amax().float()
        old = self.caches.get(layer.module, new)
        self.caches[layer.module] = torch.maximum(old[0], new[0]), torch.maximum(old[1], new[1])


def make(options: MakeOptions, task: QuantizeTask) -> Quantized:
    """octavo.interfaces.Quantize. ConfigError for options that contradict each other, LoadError for a checkpoint that does not fit
    the model, QuantizeError for a weight or an activation that is not finite."""
    static = options.activations == "static"
    if static and options.weights == "block":
        raise ConfigError("--set activations=static: block weights have dynamic inputs; use weights=channel or weights=tensor")
    if static and task.calibration is None:
        raise ConfigError("--set activations=static: input scales are measured on a text; give --calibrate FILE")
    modules = set(linear_modules(task))
    if static and (inner := [name for name in modules if re.search(r"\.experts\.\d+\.", name)]):
        raise ConfigError(
            f"--set activations=static: the model has experts ({len(inner)} matrices), whose inputs are not measured; use activations=dynamic"
        )
    check_checkpoint(task)
    kv_cache = options.kv_cache and task.calibration is not None
    peaks = _calibrate(task, options.window) if static or kv_cache else Peaks()
    device = torch_device(task.device)
    done, left = 0, ["lm_head"]
    for name, tensor in read_tensors(task.source, task.dtype):
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in modules:
            _add_weight(task, module, tensor.to(device), options)
            if static:
                task.writer.add(f"{module}.input_scale", _scale(peaks.inputs[module], f"the input of {module}", options.headroom))
            done += 1
            task.tell("quantising", done, len(modules))
        else:
            if name.endswith(".weight") and tensor.ndim == 2 and module not in left:
                left.append(module)  # an embedding, a head, a router
            task.writer.add(name, tensor.to(getattr(torch, task.dtype)) if tensor.is_floating_point() else tensor)
    if done != len(modules):
        raise QuantizeError(f"the checkpoint has {done} of the {len(modules)} matrices that the model uses")
    if kv_cache:
        for module, found in peaks.caches.items():
            for kind, peak in zip(("k_scale", "v_scale"), found, strict=True):
                task.writer.add(f"{module}.{kind}", _scale(peak, f"{module}: {kind[0]}", options.headroom))
    return Quantized(_config(options, left, kv_cache=kv_cache), _report(options, task, peaks, done, kv_cache))


def _calibrate(task: QuantizeTask, window: int) -> Peaks:
    texts = calibration_windows(task, window)
    peaks = Peaks()
    model = ObservedModel(task, peaks, max_len=window)
    for number, text in enumerate(texts):
        task.tell("calibrating", number, len(texts))
        model.run(text)
    task.tell("calibrating", len(texts), len(texts))
    return peaks


def _add_weight(task: QuantizeTask, module: str, weight: Tensor, options: MakeOptions) -> None:
    if not bool(weight.isfinite().all()):
        raise QuantizeError(f"{module}.weight has a value that is not finite: it cannot be quantised")
    if options.weights == "block":
        data, scale = quantise_blocks(weight)
    elif options.weights == "channel":
        data, scale = quantise_rows(weight)
    else:
        scale = scale_of(weight.abs().amax()).view(1)
        data = to_e4m3(weight.float() / scale)
    task.writer.add(f"{module}.weight", data)
    task.writer.add(f"{module}.weight_scale", scale)


def _scale(peak: Tensor, what: str, headroom: float) -> Tensor:
    """float32 [1]: under which `peak`, times the headroom, is 448."""
    value = float(peak)
    if not value < float("inf"):
        raise QuantizeError(f"{what} reached {value} on the calibration text: no scale covers it")
    return torch.tensor([max(value * headroom, TINY) / E4M3_MAX])


def _config(options: MakeOptions, left: list[str], *, kv_cache: bool) -> dict[str, Any]:
    """The quantization_config. left: modules that are not quantised."""
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    weights: dict[str, Any] = float8 | {"strategy": options.weights, "dynamic": False}
    inputs: dict[str, Any] | None = float8 | {"strategy": "token", "dynamic": True}
    if options.weights == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
        inputs = float8 | {"strategy": "group", "group_size": BLOCK, "dynamic": True}
    if options.activations == "static":
        inputs = float8 | {"strategy": "tensor", "dynamic": False}
    elif options.activations == "none":
        inputs = None
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if inputs else "naive-quantized",
        "quantization_status": "compressed",
        "ignore": left,
        "kv_cache_scheme": float8 | {"strategy": "tensor", "dynamic": False} if kv_cache else None,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
    }


def _report(options: MakeOptions, task: QuantizeTask, peaks: Peaks, count: int, kv_cache: bool) -> dict[str, Any]:
    inputs = {"auto": "dynamic"}.get(options.activations, options.activations)
    report: dict[str, Any] = {"matrices": count, "weight scales": f"one a {options.weights}", "input scales": inputs}
    if kv_cache:
        k, v = (max(float(pair[i]) for pair in peaks.caches.values()) for i in (0, 1))
        report["KV scales"] = f"{len(peaks.caches)} layers; the largest key was {k:.4g}, the largest value {v:.4g}"
    elif options.kv_cache:
        report["KV scales"] = "none: give --calibrate FILE"
    return report
