"""What a step costs with rows of a given form in it: none, two, all; and beside them a penalty in all rows, which edits logits too.

    python benchmarks/constrained.py            the demo model, JSON of a schema
    python benchmarks/constrained.py --random   random weights of Qwen3-0.6B's widths and a vocabulary of 512: for a machine without a model

Rows decode at temperature 1 and share nothing. Times are of the engine's thread: wall and processor time of a step, the median of
--steps. Run from the repository's root.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.grammar import Grammar
from octavo.plugins import discover
from octavo.request import Request, SamplingParams

SCHEMA = Grammar.json(
    {
        "type": "object",
        "additionalProperties": {"type": "array", "items": {"type": "string", "minLength": 3}},
        "minProperties": 40,
    }
)
WIDTHS = {
    "layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 2048,
}


def measure(engine: Engine, rows: int, steps: int, formed: int, **fields: Any) -> tuple[np.ndarray, np.ndarray, int, int]:
    """(wall, processor) seconds of each step, and tokens that the first row, which has a form if any has, and the last one got."""
    for i in range(rows):
        form: dict[str, Any] = {"grammar": SCHEMA} if i < formed else {"ignore_eos": True}
        params = SamplingParams(temperature=1.0, seed=i, max_tokens=400, **form, **fields)
        ids = list(range(40, 72))
        engine.add(Request(id=str(i), prompt=ids, params=params, eos_token_ids=engine.info.eos_token_ids))
    for _ in range(12):
        engine.step()
    wall, worked, got = [], [], {"0": 0, str(rows - 1): 0}
    for _ in range(steps):
        began, busy = time.perf_counter(), time.thread_time()
        events = engine.step().events
        wall.append(time.perf_counter() - began)
        worked.append(time.thread_time() - busy)
        for event in events:
            if event.request_id in got:
                got[event.request_id] += len(event.tokens)
    for i in range(rows):
        engine.abort(str(i))
    while engine.busy:
        engine.step()
    return np.array(wall), np.array(worked), got["0"], got[str(rows - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, more = asked.model, {}
        if asked.random:
            from tests.tiny import tiny_llama

            model, more = str(tiny_llama(Path(folder) / "model", **WIDTHS)), {"dtype": "bfloat16"}
        blocks = asked.rows * 36
        config = EngineConfig(
            model=model, max_model_len=512, max_num_seqs=asked.rows, num_gpu_blocks_override=blocks, block_size=16, num_threads=asked.threads, **more
        )  # fmt: skip
        engine = build_engine(config, discover())
        print(f"{asked.rows} rows, {asked.steps} steps, median (best tenth) in ms")
        for turn in range(3):
            for name, formed, fields in (
                ("no form", 0, {}),
                ("two rows", 2, {}),
                ("all rows", asked.rows, {}),
                ("penalty", 0, {"presence_penalty": 0.1}),
            ):
                wall, worked, first, last = measure(engine, asked.rows, asked.steps, formed, **fields)
                shown = [f"{1e3 * np.median(t):7.2f} ({1e3 * np.percentile(t, 10):.2f})" for t in (wall, worked)]
                print(
                    f"{turn} {name:9} wall {shown[0]}  processor {shown[1]}  tokens of the first row {first}, of the last {last}"
                )
        engine.close()


if __name__ == "__main__":
    main()
