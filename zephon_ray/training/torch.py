"""PyTorch: a rank's rows as an iterable of int64 tensors, for any training loop.

    loader = zephon_ray.Loader("recipe.yaml", runner="threads", dp_rank=rank, dp_world_size=world_size)
    dataset = RankDataset(loader, local_batch_size=4)
    for batch in torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=0):
        ...                        # batch["input"], batch["labels"], batch["positions"]: int64 [4, sequence_length]
    state = dataset.state_dict()   # at the end of a step

Labels are shifted already: `labels[i]` follows `input[i]`, and -100 is to be ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self

import torch
from torch.utils.data import IterableDataset, get_worker_info

from zephon_ray.errors import UserError
from zephon_ray.loader import State
from zephon_ray.training.microbatches import MicroBatches, RankLoader, Rows


class RankDataset(IterableDataset[dict[str, torch.Tensor]]):
    """The rows of one rank. Iterating again goes on where it stopped.

    Args:
        loader: a `Loader`, or what `connect` gives; closed with this.
        local_batch_size: b, rows of each item; a divisor of B/R. None for all B/R rows of the rank.

    Yields:
        "input", "labels" and "positions", int64 [b, T] each.

    Raises:
        UserError: it is iterated in a worker of a DataLoader.
        RecipeError: `local_batch_size` does not divide the rank's rows. Further those of the loader.
    """

    def __init__(self, loader: RankLoader, *, local_batch_size: int | None = None) -> None:
        super().__init__()
        self._batches = MicroBatches(loader, local_batch_size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        if worker is not None:
            raise UserError(
                f"this dataset is in worker {worker.id} of a DataLoader with num_workers={worker.num_workers}. Each worker would make the"
                " whole stream again, and its state would be lost with it; rows are read ahead in the background without workers. Use"
                " DataLoader(dataset, batch_size=None, num_workers=0)"
            )
        return map(as_tensors, self._batches)

    def state_dict(self) -> dict[str, bytes]:
        """The state after the last step, whatever was read ahead: one key, the same bytes on every rank.

        Raises:
            RecipeError: some rows of the step were not taken yet.
        """
        return self._batches.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Go on from a state of any number of ranks instead, from the next item on.

        Raises:
            StateError: it is no state, or (when first used) not one of this run.
        """
        self._batches.load_state_dict(state)

    def close(self) -> None:
        """Close the loader. The state can still be asked for."""
        self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def as_tensors(rows: Rows) -> dict[str, torch.Tensor]:
    """Rows as int64 [b, T] tensors, without a copy."""
    return {
        "input": torch.from_numpy(rows.input), "labels": torch.from_numpy(rows.labels), "positions": torch.from_numpy(rows.positions)
    }  # fmt: skip
