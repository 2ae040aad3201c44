"""A rank as torchrun starts it, without a feed: trains and validates on what the ranks of its host share, and says what it got."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

from tests.training.loops import row_digests
from zephon_ray.recipe import load_recipe
from zephon_ray.training import sources
from zephon_ray.training.microbatches import MicroBatches, Rows
from zephon_ray.training.sources import SourceOptions


def say(what: str, batches: Iterator[Rows]) -> None:
    rows = [row.hex() for batch in batches for row in row_digests(batch.input, batch.labels, batch.positions)]
    print(json.dumps({"what": what, "rows": rows}), flush=True)


def opened(recipe: str, folder: str, state: bytes | None = None) -> MicroBatches:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return MicroBatches(sources.open_loader(SourceOptions(recipe=load_recipe(recipe), out=folder), rank, size, state), 1)


def main() -> None:
    train, validation, folder, steps = sys.argv[1:]
    batches = opened(train, f"{folder}/run")
    say("train", (next(batches) for _ in range(int(steps))))
    for _ in range(2):
        say("validation", opened(validation, f"{folder}/held-out"))
    say("train", (next(batches) for _ in range(int(steps))))
    (state,) = batches.state_dict().values()
    print(json.dumps({"what": "state", "rows": [state.hex()]}), flush=True)


if __name__ == "__main__":
    main()
