"""A rank as torchrun starts it, in no cluster: it shares the feed of its host, takes some steps, and says what it got.

For each line that it reads then it takes another step; where there are no more lines, it ends.
"""

from __future__ import annotations

import json
import os
import sys

from zephon_ray.batches import Batch, row_digests
from zephon_ray.feed.client import connect
from zephon_ray.feed.host import HostFeed
from zephon_ray.feed.service import Order
from zephon_ray.recipe import load_recipe


def tell(batch: Batch) -> None:
    rows = [digest.hex() for digest in row_digests(batch)]
    print(json.dumps({"step": batch.step, "digest": batch.digest.hex(), "rows": rows}), flush=True)


def main() -> None:
    path, out, steps, state = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with (
        HostFeed(Order(name="", recipe=load_recipe(path), out=out)) as shared,
        connect(shared.name, address=shared.address, dp_rank=rank, dp_world_size=size, state=bytes.fromhex(state) or None) as feed,
    ):
        for _ in range(int(steps)):
            tell(next(feed))
        (saved,) = feed.state_dict().values()
        print(json.dumps({"started": shared.started, "state": saved.hex(), "address": shared.address}), flush=True)
        while sys.stdin.readline():
            tell(next(feed))


if __name__ == "__main__":
    main()
