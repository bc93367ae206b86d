"""Prompts over expanded keys and values: what latent attention costs less for many queries at once.

Absorbed, a pair of query and key costs 2 * latent + rope products a head, whatever their number; expanded, nope + rope + v, and
latent * (nope + v) once for each key. So from `DeepseekConfig.expands` new tokens of a row on, its keys and values are computed from the
cached entries, a few heads at a time so that they fit in memory, and attended to by torch's fused attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

ELEMENTS = 1 << 27
"""Expanded keys and values that are held at a time, at most."""


def attend(query: Tensor, entries: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of query [n, heads, nope + rope], the last n tokens of a row whose entries [length, latent + rope]
    are given: [n, heads, v]. key [heads, nope, latent] and value [heads, latent, v] are `mla.Expansion`'s."""
    tokens, heads, _ = query.shape
    length, latent = len(entries), key.shape[2]
    compressed, rope = entries[:, :latent], entries[:, latent:]
    out = query.new_empty(heads, tokens, value.shape[2])
    some = max(1, ELEMENTS // (length * (query.shape[2] + value.shape[2])))
    # A fused kernel wants values as wide as keys.
    pad = query.shape[2] - value.shape[2] if query.is_cuda else 0
    for first in range(0, heads, some):
        part = slice(first, min(first + some, heads))
        keys = torch.cat((compressed @ key[part].transpose(1, 2), rope.expand(part.stop - first, -1, -1)), -1)
        values = F.pad(compressed @ value[part], (0, max(0, pad)))
        found = F.scaled_dot_product_attention(
            query[:, part].transpose(0, 1).unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=causal_lower_right(tokens, length),
            scale=scale,
        )
        out[part] = found[0, ..., : value.shape[2]]
    return out.transpose(0, 1)
