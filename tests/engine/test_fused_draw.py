"""A fused draw operator takes the sampler's place, inside the padded decode step: tokens do not depend on company.

The operator here is the definition of ("draw", "plain") in plain torch: argmax of logits / T plus Gumbel noise
that is a function of seed, position and token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from octavo.catalog import Accept, Options, Provider
from octavo.hookspecs import hookimpl
from torch import Tensor

from tests.engine import harness


def draw(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    vocab: int,
    keep: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    x = logits[:, :vocab].double()
    noise = torch.empty_like(x)
    for row, (s, p) in enumerate(zip(seed.tolist(), position.tolist(), strict=True)):
        rng = np.random.Generator(np.random.Philox(key=[s % (1 << 64), p]))
        noise[row] = torch.from_numpy(rng.gumbel(size=vocab))
    warm = torch.where(temperature[:, None] > 0, x / temperature[:, None].clamp(min=1e-6) + noise, x)
    bad = torch.isnan(x).any(-1) | (x == float("inf")).any(-1) | (x == float("-inf")).all(-1)
    tokens = warm.argmax(-1).int().masked_fill(bad, 0)
    if keep is not None:
        keep[0][keep[1], position] = tokens
    return tokens, bad


class Operators:
    def __init__(self, options: object, parts: object) -> None:
        self.ops = {("draw", "plain"): draw}


@hookimpl
def register_operators() -> list[Provider]:
    return [
        Provider("fused-draw", "operators", f"{__name__}:Operators", priority=50, accepts=lambda n, o: Accept(), options=Options)
    ]


ASKS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.6, "seed": 5, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "seed": 6, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 7, "logprobs": 2},
    {"temperature": 1.0, "seed": 8, "min_tokens": 5},
]


@pytest.mark.parametrize("late", [0, {"depth": 1, "padded": True}, {"depth": 3, "padded": True}], ids=["eager", "padded", "late"])
def test_a_rows_tokens_do_not_depend_on_its_company(
    tiny: Path, late: int | dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = harness.discover
    monkeypatch.setattr(
        harness, "discover", lambda *a, extra_modules=(), **k: find(*a, extra_modules=[*extra_modules, __name__], **k)
    )
    engine = harness.make_engine(tiny, late=late, block_size=4, num_gpu_blocks_override=128, max_num_seqs=8)
    assert "fused-draw" in str(engine.explain)
    asks = [{"prompt": list(range(40, 52)), "max_tokens": 12, "ignore_eos": True, **ask} for ask in ASKS]
    together = harness.run(engine, [harness.request(engine, str(i), **ask) for i, ask in enumerate(asks)])
    for i, ask in enumerate(asks):
        solo = harness.alone(engine, harness.request(engine, "solo", **ask))
        assert together[str(i), 0].tokens == solo["solo", 0].tokens
    assert together["0", 0].tokens != together["1", 0].tokens
