"""What the GPU tests of attention backends have in common: rows of many lengths, and checks that a comparison of one step does not make."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from octavo.testing.attention import check
from octavo.testing.paged import Scene, reference, stored

Work = tuple[int, int, int]
"""Row, first new token, new tokens."""

LENGTHS = (1, 15, 64, 65, 127, 128, 129, 257, 1000, 40, 300, 700)
WORK: list[Work] = [(i, n - 1, 1) for i, n in enumerate(LENGTHS[:9])] + [(9, 0, 40), (10, 0, 300), (11, 200, 500)]
"""One step of rows of these lengths: nine decode, a prompt of 40, one of 300, and 500 tokens behind 200."""


def check_a_step_of_all_kinds(scene: Scene) -> None:
    """A scene of LENGTHS, filled up to WORK, gives for WORK what float64 does."""
    scene.fill([start for _, start, _ in WORK])
    check(scene, WORK, lse=True)


def check_it_repeats(scene: Scene) -> None:
    """One new token in every row, attended twice: right, and equal bit for bit. For rows that are split into many parts."""
    scene.fill([n - 1 for n in scene.lengths])
    work = [(i, n - 1, 1) for i, n in enumerate(scene.lengths)]
    first, second = (check(scene, work, lse=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.out, other.out), "out differs between runs"


def check_a_captured_graph(
    scene: Scene, replays: Sequence[tuple[int, ...]] = ((17, 300, 1, 1999), (512, 256, 63, 128), (1, 299, 0, 65))
) -> None:
    """A decode step of plan, write and run over two layers, captured at the scene's lengths and replayed at those and others, none of
    them longer. A row of length 0 is padding: slot -1, NaN for K and V, and zeros as its output."""
    shape, rows, size, v_dim = scene.shape, len(scene.rows), scene.shape.block_size, scene.shape.v_dim or scene.shape.k_dim
    for layer in (0, 1):
        scene.fill(scene.lengths, layer=layer)
    step = scene.step([(i, n - 1, 1) for i, n in enumerate(scene.lengths)])
    q = torch.cat([row.q[0][-1:] for row in scene.rows])
    k = torch.zeros(rows, shape.heads[1], shape.k_dim, dtype=q.dtype, device=q.device)
    v = k[..., :v_dim] if shape.latent else torch.zeros(rows, shape.heads[1], v_dim, dtype=q.dtype, device=q.device)
    outs = torch.empty(2, rows, shape.heads[0], v_dim, dtype=q.dtype, device=q.device)
    lses = torch.empty(2, rows, shape.heads[0], device=q.device)

    def work() -> None:
        scene.backend.plan(step)
        for layer in (0, 1):
            scene.backend.write(layer, step, k, v)
            scene.backend.run(layer, step, q, outs[layer], lse=lses[layer])

    def setup(now: tuple[int, ...]) -> None:
        step.seq_lens.copy_(torch.tensor(now))
        slots = []
        for i, n in enumerate(now):
            block = int(scene.table[scene.rows[i].slot, max(n - 1, 0) // size])
            slots.append(block * size + (n - 1) % size if n else -1)
            k[i] = float(i + 1) / 8 if n else math.nan
            if not shape.latent:
                v[i] = 0.5 if n else math.nan
        step.slot_mapping[0].copy_(torch.tensor(slots))

    setup(tuple(scene.lengths))
    scene.backend.prepare(step)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    written: dict[int, list[int]] = {i: [n - 1] for i, n in enumerate(scene.lengths)}
    for now in (tuple(scene.lengths), *replays):
        setup(now)
        outs.fill_(math.nan)
        graph.replay()
        for i, n in enumerate(now):
            if not n:
                assert bool((outs[:, i] == 0).all()), "a padding row's output is not zero"
                continue
            written[i].append(n - 1)
            for layer in (0, 1):
                keys, values = (x[layer][:n].clone() for x in (scene.rows[i].k, scene.rows[i].v))
                for at in written[i]:  # every replay so far wrote one token over what was there
                    keys[at:][:1] = float(i + 1) / 8
                    values[at:][:1] = float(i + 1) / 8 if shape.latent else 0.5
                found = [stored(x, shape.kv_dtype, 1.0) for x in (keys, values)]
                right = reference(q[i : i + 1], *found, scale=shape.k_dim**-0.5)
                assert float((outs[layer, i].double() - right.out[0]).abs().max()) < 2e-2, f"row {i} at {now}"
                assert float((lses[layer, i].double() - right.lse[0]).abs().max()) < 1e-2, f"lse of row {i} at {now}"
    scene.check_untouched()
