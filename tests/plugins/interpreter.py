"""Scripts that run kernels under Triton's interpreter: how each begins, and the process that it runs in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PRELUDE = """
import torch
import triton.runtime.interpreter as interpreter
patch = interpreter._patch_lang_tensor
def patched(tensor, scope):  # numpy 2.4 converts only 0-dimensional arrays to int; Triton 3.6 keeps scalars as [1]
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
interpreter._patch_lang_tensor = patched
torch.set_num_threads(1)
"""
"""Source text: the interpreter must be on (TRITON_INTERPRET=1) before triton is imported, hence a process of its own."""


def interpreted(script: str, *arguments: str, plugins: tuple[str, ...], timeout: float = 300) -> str:
    """What the script prints, with these plugins' sources importable, and the tests."""
    sources = [str(ROOT), *(str(ROOT / "plugins" / name / "src") for name in plugins)]
    path = os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
