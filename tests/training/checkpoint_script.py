"""A rank of several that saves a checkpoint through TorchTitan's manager, or goes on from one, and says what it trained on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.training.loops import row_digests
from tests.training.test_torchtitan import build, manager


def main() -> None:
    folder, mode, rank, ranks, save_at, last = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{ranks}-{last}", rank=rank, world_size=ranks)
    loader = build(folder, ranks=ranks, rank=rank, size=1, runner="inline")
    checkpoints = manager(folder, loader, mode)
    begun = save_at if checkpoints.load() else 0
    batches = iter(loader)
    for step in range(begun + 1, last + 1):
        rows = []
        for _ in range(4 // ranks):
            values, labels = next(batches)
            rows += [row.hex() for row in row_digests(values["input"], labels, values["positions"])]
        print(json.dumps({"step": step, "rows": rows}), flush=True)
        if step == save_at and not begun:
            checkpoints.save(step)
    checkpoints.maybe_wait_for_saving()
    checkpoints.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
