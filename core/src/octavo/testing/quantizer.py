"""The conformance suite of quantizers. Needs pytest.

Owns what every weight format must do, whatever it stores and wherever it runs. A third party says how a matrix is stored
and writes one class:

    from octavo.testing.quantizer import QuantizerSuite, QuantizerTarget, Stored

    def store(weight):  # float32 [out, in]
        q, scale = my_rounding(weight)
        return Stored({"qweight": q, "scales": scale}, q.double() * scale.double())

    class TestMine(QuantizerSuite):
        target = QuantizerTarget(my_provider, Device(), dtypes=("float32", "bfloat16"), store=store, config={"quant_method": "mine"})

The oracle is the product in float64 with the weights that `store` says it stored, so errors of rounding weights count for nothing:
what is judged is reading, arranging and multiplying. A Linear that wants its input in another format than the model's gets it from
`activate`. Weights go through core's own loader, as files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.catalog import Accept, Device, Needs, Provider, Reject
from octavo.errors import LoadError
from octavo.interfaces import Linear, Quantizer, QuantizerParts
from octavo.model.linear import torch_device
from octavo.model.loader import WeightTable, load_weights
from octavo.model.source import resolve_source

TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""Largest ||y - right|| / ||right|| of a product with activations that are not quantised."""

ROWS = (1, 2, 7, 8, 16, 17, 33, 64, 65, 200)
SHAPES = ((256, 128), (384, 256), (256, 40), (640, 72), (128, 8))
"""(inputs, outputs)"""


@dataclass(frozen=True)
class Stored:
    """A matrix as a checkpoint has it: its tensors by the end of their names ("weight" for `X.weight`), and the weights that
    they stand for, float64 [out, in]."""

    tensors: Mapping[str, Tensor]
    weight: Tensor


@dataclass(frozen=True)
class QuantizerTarget:
    """The format under test. store turns float32 [out, in] into what a checkpoint holds; config is its quantization_config.

    inputs_multiple: what the inputs of a matrix must be a multiple of. tolerance: by dtype, where it differs from TOLERANCE
    (activations that are quantised as well). activate: an input [T, in] in the format that a Linear asks for. cut: the tensors of
    inputs [start, stop) of a stored matrix, for formats that can be divided between devices along their inputs."""

    provider: Provider
    device: Device
    dtypes: Sequence[str]
    store: Callable[[Tensor], Stored]
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Any = None
    inputs_multiple: int = 1
    tolerance: Mapping[str, float] = field(default_factory=dict)
    activate: Callable[[Linear, Tensor], Any] = lambda linear, x: x
    cut: Callable[[Stored, int, int], Stored] | None = None

    def limit(self, dtype: str) -> float:
        return self.tolerance.get(dtype, TOLERANCE[dtype])

    def needs(self, dtype: str) -> Needs:
        facts = {"method": str(self.config.get("quant_method", "")), "config": self.config, "architecture": "LlamaForCausalLM"}
        return Needs("quantizer", self.device, dtype, facts)

    def answer(self, dtype: str) -> Accept | Reject:
        return self.provider.accepts(self.needs(dtype), self._options())

    def _options(self) -> Any:
        return self.provider.options() if self.options is None else self.options

    def build(self, dtype: str, table: WeightTable) -> Quantizer:
        """A quantizer that declares its weights in `table`; skips the test where the provider rejects the dtype."""
        answer = self.answer(dtype)
        if isinstance(answer, Reject):
            pytest.skip(f"{self.provider.name}: {answer.reason}")
        module, _, name = self.provider.load.partition(":")
        parts = QuantizerParts(self.device, dtype, self.config, table)
        return cast("Quantizer", getattr(import_module(module), name)(self._options(), parts))

    def load(self, folder: Path, table: WeightTable, tensors: Mapping[str, Tensor], dtype: str) -> None:
        """Write `tensors` as a checkpoint in `folder` and fill the table from it."""
        folder.mkdir(exist_ok=True)
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
        load_weights(resolve_source(str(folder)), table, dtype, device=torch_device(self.device))


def random_weight(rows: int, inputs: int, seed: int = 0) -> Tensor:
    """float32 [rows, inputs] of unit-variance products, with a few inputs that matter more than others."""
    made: Tensor = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) / inputs**0.5
    made[:, :: max(1, inputs // 3)] *= 4
    return made


class QuantizerSuite:
    """Subclass it as `class TestX(QuantizerSuite)` and set `target`."""

    target: QuantizerTarget

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.target.dtypes)

    # ------------------------------------------------------------ helpers

    def _x(self, rows: int, inputs: int, dtype: str, seed: int = 7) -> Tensor:
        """Activations: random, a few features large, on the target's device."""
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed))
        x[:, 1 :: max(2, inputs // 2)] *= 6
        return x.to(torch_device(self.target.device), getattr(torch, dtype))

    def _shape(self, inputs: int, outputs: int) -> tuple[int, int]:
        multiple = self.target.inputs_multiple
        return -(-inputs // multiple) * multiple, outputs

    def _linear(
        self, folder: Path, dtype: str, inputs: int, parts: Mapping[str, int], *, bias: bool = False, head: bool = False
    ) -> tuple[Linear, Tensor, Tensor | None]:
        """A filled Linear under "m", its weight float64 [out, in] and its bias."""
        table = WeightTable()
        linear = self.target.build(dtype, table).linear("m", inputs, parts, bias=bias, head=head)
        tensors: dict[str, Tensor] = {}
        weights, biases = [], []
        for seed, (part, rows) in enumerate(parts.items()):
            stored = self.target.store(random_weight(rows, inputs, seed))
            tensors |= {f"m.{part}.{end}": tensor for end, tensor in stored.tensors.items()}
            weights.append(stored.weight)
            if bias:
                tensors[f"m.{part}.bias"] = torch.linspace(-1, 1, rows, dtype=torch.float32).to(getattr(torch, dtype))
                biases.append(tensors[f"m.{part}.bias"].double())
        self.target.load(folder, table, tensors, dtype)
        linear.finish()
        return linear, torch.cat(weights), torch.cat(biases) if bias else None

    def _product(self, linear: Linear, x: Tensor) -> Tensor:
        y: Tensor = linear(self.target.activate(linear, x))
        return y.double().cpu()

    def _right(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product: Tensor = x.double().cpu() @ weight.T
        return product if bias is None else product + bias

    def _check(self, found: Tensor, right: Tensor, dtype: str, what: str) -> None:
        assert found.shape == right.shape, f"{what}: the result has the shape {list(found.shape)}, not {list(right.shape)}"
        assert bool(torch.isfinite(found).all()), f"{what}: not finite"
        error = float((found - right).norm() / right.norm())
        assert error <= self.target.limit(dtype), f"{what}: off by {error:.2e} (at most {self.target.limit(dtype):.0e})"

    # ------------------------------------------------------------ numbers

    def test_the_provider_accepts_its_own_config(self, dtype: str) -> None:
        """So that a suite in which everything is skipped does not pass."""
        answer = self.target.answer(dtype)
        assert isinstance(answer, Accept), answer.reason

    def test_the_weights_are_those_that_were_stored(self, dtype: str, tmp_path: Path) -> None:
        """One-hot inputs read the matrix out, a column each; the error is judged weight by weight."""
        inputs, outputs = self._shape(256, 64)
        linear, weight, _ = self._linear(tmp_path, dtype, inputs, {"a": outputs})
        found = self._product(linear, torch.eye(inputs, dtype=getattr(torch, dtype), device=torch_device(self.target.device)))
        worst = float((found.T - weight).abs().max() / weight.abs().max())
        assert worst <= self.target.limit(dtype), f"a weight is off by {worst:.2e} of the largest"

    @pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
    def test_products_of_any_number_of_rows(self, dtype: str, inputs: int, outputs: int, tmp_path: Path) -> None:
        inputs, outputs = self._shape(inputs, outputs)
        linear, weight, _ = self._linear(tmp_path, dtype, inputs, {"a": outputs})
        assert linear.out_features == outputs
        for rows in ROWS:
            x = self._x(rows, inputs, dtype, seed=rows)
            self._check(self._product(linear, x), self._right(x, weight), dtype, f"{rows} rows of [{inputs}, {outputs}]")

    def test_no_row_is_no_work(self, dtype: str, tmp_path: Path) -> None:
        inputs, outputs = self._shape(256, 64)
        linear, _, _ = self._linear(tmp_path, dtype, inputs, {"a": outputs})
        assert self._product(linear, self._x(0, inputs, dtype)).shape == (0, outputs)

    def test_the_result_has_the_models_dtype_and_is_the_same_again(self, dtype: str, tmp_path: Path) -> None:
        inputs, outputs = self._shape(256, 64)
        linear, _, _ = self._linear(tmp_path, dtype, inputs, {"a": outputs})
        for rows in (1, 16, 200):
            x = self.target.activate(linear, self._x(rows, inputs, dtype))
            assert linear(x).dtype == getattr(torch, dtype)
            assert torch.equal(linear(x), linear(x))

    def test_rows_that_lie_apart(self, dtype: str, tmp_path: Path) -> None:
        """Activations may be a view of something wider; what lies beside them is NaN here."""
        inputs, outputs = self._shape(256, 64)
        linear, weight, _ = self._linear(tmp_path, dtype, inputs, {"a": outputs})
        for rows in (3, 100):
            x = self._x(rows, inputs, dtype)
            wide = torch.full((rows, inputs + 24), float("nan"), dtype=x.dtype, device=x.device)
            wide[:, 8 : inputs + 8] = x
            self._check(self._product(linear, wide[:, 8 : inputs + 8]), self._right(x, weight), dtype, "a view")

    def test_parts_lie_side_by_side_in_their_order(self, dtype: str, tmp_path: Path) -> None:
        """As q, k and v of unequal width."""
        inputs, _ = self._shape(256, 0)
        linear, weight, _ = self._linear(tmp_path, dtype, inputs, {"q": 64, "k": 24, "v": 40})
        for rows in (1, 16, 100):
            x = self._x(rows, inputs, dtype)
            self._check(self._product(linear, x), self._right(x, weight), dtype, f"{rows} rows of three parts")

    def test_a_bias_is_added_once(self, dtype: str, tmp_path: Path) -> None:
        inputs, _ = self._shape(256, 0)
        linear, weight, bias = self._linear(tmp_path, dtype, inputs, {"q": 64, "k": 24}, bias=True)
        for rows in (1, 40, 100):
            x = self._x(rows, inputs, dtype)
            self._check(self._product(linear, x), self._right(x, weight, bias), dtype, f"{rows} rows with bias")

    def test_a_tied_head_gives_float32(self, dtype: str) -> None:
        kind, device = getattr(torch, dtype), torch_device(self.target.device)
        table = random_weight(96, 64).to(device, kind)
        head = self.target.build(dtype, WeightTable()).tied(lambda: table, 96)
        head.finish()
        x = self._x(5, 64, dtype)
        logits = head(x)
        assert logits.dtype == torch.float32
        right = self._right(x, table.double().cpu())
        assert float((logits.double().cpu() - right).norm() / right.norm()) <= 1e-5

    def test_a_captured_graph_computes_what_it_was_given_last(self, dtype: str, tmp_path: Path) -> None:
        if self.target.device.type != "cuda":
            pytest.skip("graphs are captured on CUDA")
        inputs, outputs = self._shape(512, 256)
        linear, weight, _ = self._linear(tmp_path, dtype, inputs, {"a": outputs})
        for rows in (1, 16, 100):
            x = self._x(rows, inputs, dtype)
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                linear(self.target.activate(linear, x))
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = linear(self.target.activate(linear, x))
            y.fill_(float("nan"))
            x.copy_(self._x(rows, inputs, dtype, seed=99))
            graph.replay()
            self._check(y.double().cpu(), self._right(x, weight), dtype, f"a replay of {rows} rows")

    # ------------------------------------------------------------ loading

    def test_the_order_of_the_file_does_not_matter(self, dtype: str) -> None:
        inputs, _ = self._shape(256, 0)
        stored = {part: self.target.store(random_weight(rows, inputs, rows)) for part, rows in (("q", 64), ("k", 24))}
        tensors = {f"m.{part}.{end}": t for part, s in stored.items() for end, t in s.tensors.items()}
        x = self._x(9, inputs, dtype)
        found = []
        for order in (list(tensors), list(tensors)[::-1]):
            table = WeightTable()
            linear = self.target.build(dtype, table).linear("m", inputs, {"q": 64, "k": 24})
            for name in order:
                table.fill(name, tensors[name].clone())
            linear.finish()
            found.append(self._product(linear, x))
        assert torch.equal(*found)

    def _tensors(self, inputs: int, outputs: int) -> dict[str, Tensor]:
        return {f"m.a.{end}": t for end, t in self.target.store(random_weight(outputs, inputs)).tensors.items()}

    def _refused(self, folder: Path, dtype: str, inputs: int, outputs: int, tensors: Mapping[str, Tensor], name: str) -> None:
        """Loading these tensors is a LoadError that names the tensor, before any of them is read."""
        table = WeightTable()
        self.target.build(dtype, table).linear("m", inputs, {"a": outputs})
        with pytest.raises(LoadError, match=name.replace(".", r"\.")):
            self.target.load(folder, table, tensors, dtype)

    def test_a_missing_tensor_is_named(self, dtype: str, tmp_path: Path) -> None:
        """Every one that is not optional: leaving out an optional one loads."""
        inputs, outputs = self._shape(256, 64)
        tensors = self._tensors(inputs, outputs)
        table = WeightTable()
        self.target.build(dtype, table).linear("m", inputs, {"a": outputs})
        needed = {name for name, _, _ in table.wanted(dtype)}
        assert needed <= set(tensors) and needed, f"`store` gives {sorted(tensors)}, the Linear needs {sorted(needed)}"
        for i, missing in enumerate(sorted(needed)):
            rest = {name: t for name, t in tensors.items() if name != missing} or {"other": torch.ones(1)}
            self._refused(tmp_path / str(i), dtype, inputs, outputs, rest, missing)

    def test_a_tensor_of_another_shape_is_named(self, dtype: str, tmp_path: Path) -> None:
        inputs, outputs = self._shape(256, 64)
        tensors = self._tensors(inputs, outputs)
        for i, (name, tensor) in enumerate(tensors.items()):
            longer = torch.cat((tensor.reshape(-1, *tensor.shape[1:]), tensor.reshape(-1, *tensor.shape[1:])[:1]))
            self._refused(tmp_path / str(i), dtype, inputs, outputs, tensors | {name: longer}, name)

    def test_a_tensor_of_another_dtype_is_named(self, dtype: str, tmp_path: Path) -> None:
        inputs, outputs = self._shape(256, 64)
        tensors = self._tensors(inputs, outputs)
        for i, (name, tensor) in enumerate(tensors.items()):
            self._refused(tmp_path / str(i), dtype, inputs, outputs, tensors | {name: tensor.to(torch.int16)}, name)

    def test_a_tensor_that_nobody_asked_for_is_named(self, dtype: str, tmp_path: Path) -> None:
        inputs, outputs = self._shape(256, 64)
        self._refused(
            tmp_path, dtype, inputs, outputs, self._tensors(inputs, outputs) | {"m.a.other": torch.ones(3)}, "m.a.other"
        )

    def test_declaring_takes_no_memory_and_an_unfilled_linear_says_so(self, dtype: str) -> None:
        inputs, outputs = self._shape(1 << 20, 1 << 20)  # a tebi of weights
        linear = self.target.build(dtype, WeightTable()).linear("m", inputs, {"a": outputs})
        with pytest.raises(RuntimeError, match=r"m\.a\."):
            linear.finish()

    # ------------------------------------------------------------ dividing

    def test_outputs_can_be_divided(self, dtype: str, tmp_path: Path) -> None:
        """A rank's outputs, stored alone, give its columns of the whole product."""
        inputs, outputs = self._shape(256, 128)
        whole = self.target.store(random_weight(outputs, inputs))
        x = self._x(5, inputs, dtype)
        for rank in range(2):
            rows = slice(64 * rank, 64 * rank + 64)
            part = self.target.store(random_weight(outputs, inputs)[rows])
            table = WeightTable()
            linear = self.target.build(dtype, table).linear("m", inputs, {"a": 64})
            self.target.load(tmp_path / str(rank), table, {f"m.a.{end}": t for end, t in part.tensors.items()}, dtype)
            linear.finish()
            error = (part.weight - whole.weight[rows]).abs().max()
            assert float(error) <= 0.05 * float(whole.weight.abs().max()), "a row's weights depend on other rows"
            self._check(self._product(linear, x), self._right(x, part.weight), dtype, f"rank {rank} of 2")

    def test_inputs_can_be_divided_at_the_borders_that_the_format_allows(self, dtype: str, tmp_path: Path) -> None:
        """Partial products of a stored matrix, cut between two ranks, add up to the whole."""
        if self.target.cut is None:
            pytest.skip("the target does not say how its tensors are cut")
        multiple = self.target.inputs_multiple
        inputs = -(-384 // multiple) * multiple
        border = max(multiple, inputs // 3 // multiple * multiple)
        stored = self.target.store(random_weight(64, inputs))
        x = self._x(5, inputs, dtype)
        total = torch.zeros(5, 64, dtype=torch.float64)
        for rank, (start, stop) in enumerate(((0, border), (border, inputs))):
            part = self.target.cut(stored, start, stop)
            table = WeightTable()
            linear = self.target.build(dtype, table).linear("m", stop - start, {"a": 64})
            self.target.load(tmp_path / str(rank), table, {f"m.a.{end}": t for end, t in part.tensors.items()}, dtype)
            linear.finish()
            total += self._product(linear, x[:, start:stop])
        self._check(total, self._right(x, stored.weight), dtype, "two ranks")
