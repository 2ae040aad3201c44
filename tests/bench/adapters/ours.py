"""zephon_ray for the loader harness: whole global batches with inputs, labels, positions, digests and chain.

The harness gives `cfg`: data, tok, seq, batch, mix, scratch, and the options of a plan's line: runner, workers, engine, fmt
("parquet", "jsonl", "jsonl.zst"), lanes, packing, unit_bytes. Units are small, so that what was tokenised before the timed
window, and is delivered in it, is little beside what is tokenised in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from zephon_ray.loader import Loader
from zephon_ray.recipe import Recipe, recipe_from_dict

STATE: dict[str, Loader] = {}


def recipe(cfg: Any) -> Recipe:
    where = Path(cfg.data) / getattr(cfg, "fmt", "parquet")
    sources = [{"name": name, "uri": str(where / name), "weight": weight} for name, weight in zip(("prose", "code"), cfg.mix, strict=True)]
    fields = {
        "schema": 1, "name": "bench", "seed": 42, "lanes": getattr(cfg, "lanes", 8), "sequence_length": cfg.seq,
        "unit_bytes": getattr(cfg, "unit_bytes", 131_072),
        "global_batch_size": cfg.batch, "tokenizer": {"path": cfg.tok, "eos": "<|endoftext|>", "pad": "<|endoftext|>"},
        "packing": {"algorithm": getattr(cfg, "packing", "wrap")}, "sources": sources,
        "execution": {"engine": getattr(cfg, "engine", "auto")},
    }  # fmt: skip
    return recipe_from_dict(fields, str(where))


def batches(cfg: Any) -> Iterator[np.ndarray]:
    loader = STATE["loader"] = Loader(recipe(cfg), runner=getattr(cfg, "runner", "threads"), workers=getattr(cfg, "workers", 1))
    for batch in loader:
        yield batch.inputs


def report(cfg: Any) -> dict[str, float]:
    """Size and time of a state."""
    began = time.perf_counter()
    state = STATE["loader"].state_dict()
    return {"ckpt_bytes": sum(map(len, state.values())), "ckpt_ms": round((time.perf_counter() - began) * 1e3, 1)}
