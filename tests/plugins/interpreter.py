"""What every script that runs kernels under Triton's interpreter begins with."""

from __future__ import annotations

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
