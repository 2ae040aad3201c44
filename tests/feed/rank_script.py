"""A rank: reads a feed up to a step and says what it gets, a JSON line a step; then its state, or the error that it ends with."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ray

import zephon_ray
from zephon_ray.batches import row_digests
from zephon_ray.feed import client
from zephon_ray.loader import STATE_KEY


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def held() -> int:
    """How many objects this process refers to."""
    return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def main(order: dict[str, Any]) -> None:
    state = bytes.fromhex(order["state"]) if "state" in order else None
    feed = zephon_ray.connect(
        order["name"], dp_rank=order["rank"], dp_world_size=order["of"], incarnation=order["incarnation"], state=state,
        reconnect_s=order.get("reconnect_s", 60.0), prefetch=order.get("prefetch", client.PREFETCH),
    )  # fmt: skip
    try:
        with feed:
            while feed.step < order["last"] and (batch := next(feed, None)) is not None:
                rows = [row.hex() for row in row_digests(batch)]
                say(step=batch.step, digest=batch.digest.hex(), chain=batch.chain.hex(), rows=rows, held=held(), at=time.time())
                if feed.step % order.get("save_every", sys.maxsize) == 0:
                    say(saved=feed.step, state=feed.state_dict()[STATE_KEY].hex())
                del batch
                time.sleep(order.get("pace_s", 0.0))  # as if it trained
            say(state=feed.state_dict()[STATE_KEY].hex())
    except zephon_ray.ZephonError as error:
        say(error=type(error).__name__, said=str(error))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
