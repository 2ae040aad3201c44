"""What tests of trainers share: stand-ins for what a trainer builds a loader with, and batches hashed as a loader's are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zephon_ray.batches import fold
from zephon_ray.hashing import digest128
from zephon_ray.loader import Loader
from zephon_ray.recipe import Recipe, load_recipe
from zephon_ray.recipe_yaml import read_yaml, write_yaml
from zephon_ray.testing import tiny_corpus

STEPS = 6
LENGTH = 32
"""Of a row of the tiny corpus; 4 rows a step."""

VALIDATION: dict[str, Any] = {
    "name": "held-out", "shuffle": {"groups": False, "documents": False, "window_groups": 1}, "on_exhausted": "continue",
    "final_batch": "pad",
}  # fmt: skip


@dataclass
class TrainersTokenizer:
    """As TorchTitan's: it tells the folder that it was read from."""

    tokenizer_path: str


def corpus(folder: Path, **changes: Any) -> Recipe:
    return load_recipe(tiny_corpus(folder, **changes))


def held_out(folder: Path, texts: int = 21, **changes: Any) -> Path:
    """A recipe that is validated on: once, in file order, its last rows padded."""
    path = tiny_corpus(folder, sources=("web",), texts=texts, **VALIDATION | changes)
    data, _ = read_yaml(path.read_text(encoding="utf-8"), str(path))
    path.write_text(write_yaml(data | {"sources": [{"name": "web", "uri": "web", "epochs": 1}]}), encoding="utf-8")
    return path


def digests_of(recipe: Recipe, steps: int = STEPS) -> list[str]:
    """Of the global batches, as a loader tells them."""
    with Loader(recipe) as loader:
        return [batch.digest.hex() for batch, _ in zip(loader, range(steps), strict=False)]


def row_digests(input_bT: Any, labels_bT: Any, positions_bT: Any) -> list[bytes]:
    """Of the rows of int64 tensors, narrowed again."""
    rows = np.stack([np.asarray(array).astype(np.int32) for array in (input_bT, labels_bT, positions_bT)], axis=1)
    return [digest128(row) for row in rows]


def folded(rows: Iterable[bytes]) -> str:
    """The digest of a global batch of all its rows in order."""
    return fold(1, bytes(16), list(rows))[0].hex()
