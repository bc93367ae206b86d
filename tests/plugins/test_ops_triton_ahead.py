"""ops_triton beside a Triton whose private parts are not those that `compile_ahead` replaces: one warning, and no operator.

Stand-ins of Triton's modules take the place of whatever is installed; the installed one, if any, must be known.
"""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "ops_triton" / "src"))

NAME = "octavo_ops_triton.ahead"


def known() -> dict[str, ModuleType]:
    """Triton's modules with the parts as they are known."""

    class JITFunction:
        def run(self, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> None: ...

        def _do_compile(
            self, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, warmup: Any
        ) -> None: ...

    class AsyncCompileMode:
        def submit(self, key: Any, compile_fn: Any, finalize_fn: Any) -> None: ...

    made = {
        name: ModuleType(name) for name in ("triton", "triton.runtime", "triton.runtime.jit", "triton.runtime._async_compile")
    }
    contents: dict[str, dict[str, Any]] = {
        "triton": {"__version__": "9.9.1", "knobs": SimpleNamespace(compilation=SimpleNamespace(listener=None))},
        "triton.runtime.jit": {"JITFunction": JITFunction},
        "triton.runtime._async_compile": {"AsyncCompileMode": AsyncCompileMode, "active_mode": ContextVar("mode")},
    }
    for name, content in contents.items():
        vars(made[name]).update(content)
    return made


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, ModuleType]], Any]]:
    """The module, imported anew beside such a Triton."""

    def load(modules: dict[str, ModuleType]) -> Any:
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            monkeypatch.delitem(sys.modules, name)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, NAME, raising=False)
        return importlib.import_module(NAME)

    yield load
    sys.modules.pop(NAME, None)


def renamed(modules: dict[str, ModuleType]) -> None:
    del modules["triton.runtime.jit"].JITFunction._do_compile  # type: ignore[attr-defined]


def another_signature(modules: dict[str, ModuleType]) -> None:
    def run(self: Any, grid: Any, *args: Any) -> None: ...

    modules["triton.runtime.jit"].JITFunction.run = run  # type: ignore[attr-defined]


def no_module(modules: dict[str, ModuleType]) -> None:
    vars(modules["triton.runtime._async_compile"]).clear()


def no_listener(modules: dict[str, ModuleType]) -> None:
    modules["triton"].knobs.compilation = SimpleNamespace()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "says"),
    [(renamed, "_do_compile"), (another_signature, "takes self, grid, args instead of"), (no_module, "AsyncCompileMode"), (no_listener, "listener")],
)  # fmt: skip
def test_another_triton_is_named_in_one_warning_and_left_alone(
    ahead: Any, caplog: pytest.LogCaptureFixture, change: Callable[[Any], None], says: str
) -> None:
    modules = known()
    change(modules)
    module = ahead(modules)
    with caplog.at_level(logging.WARNING):
        assert [module.usable() for _ in range(3)] == [False] * 3
    (record,) = caplog.records
    assert "Triton 9.9.1" in record.getMessage() and says in record.getMessage()
    assert "compiled when it is first launched" in record.getMessage()


def test_a_triton_with_the_known_parts_is_used_without_a_word(ahead: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert ahead(known()).usable()
    assert not caplog.records


def test_what_a_kernel_would_have_written_is_zeros_without_the_import_of_a_compiler() -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2] / "plugins" / "ops_triton" / "src")!r})
from tests.plugins.test_ops_triton_ahead import known
sys.modules.update(known())
import torch
from octavo_ops_triton.ahead import _Zeros
like = torch.ones(3)

def made():
    return torch.stack([torch.empty(3), torch.empty_like(like), torch.empty_strided((3,), (1,)), like.new_empty(3), like.new_empty_strided((3,), (1,))])

with _Zeros():
    assert not made().any()
assert "torch._dynamo" not in sys.modules

for name in known():
    del sys.modules[name]
torch.use_deterministic_algorithms(True)  # fills what is empty with NaN
assert made().isnan().all()
with _Zeros():
    assert not made().any()
assert like.all()
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_installed_triton_is_known() -> None:
    module = importlib.import_module(NAME)
    assert module.triton.__version__ != "9.9.1"
    module._Parts.find()
