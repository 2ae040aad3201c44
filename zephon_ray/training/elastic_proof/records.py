"""What ranks wrote down, put together again: the digests of whole global batches, from the rows that each of them trained on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from zephon_ray.batches import fold
from zephon_ray.errors import DifferenceError
from zephon_ray.training.elastic_proof.jobs import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedStep:
    """A step as it was trained on, by all ranks together.

    Args:
        step: from 1.
        rows: digests of its rows in the order of the global batch, 16 bytes each.
        loss: mean over the labels of the whole batch.
        peers: ranks that were given equal rows because they share a data-parallel rank; 0 where none does.
    """

    step: int
    rows: tuple[bytes, ...]
    loss: float
    peers: int

    def folded(self, chain: bytes) -> tuple[bytes, bytes]:
        """(digest of the batch, chain up to it), from the chain up to the step before; 16 bytes each."""
        return fold(self.step, chain, self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    dp_rank: int
    rows: tuple[bytes, ...]
    loss: float


def trained(job: Job) -> dict[int, TrainedStep]:
    """The steps that all ranks of a job have done, by their numbers.

    Raises:
        DifferenceError: ranks that share a data-parallel rank trained on other rows, or ranks were told other losses.
    """
    lines = [_lines(job, rank) for rank in range(job.mesh.ranks)]
    steps = sorted(set.intersection(*(set(of_rank) for of_rank in lines)))
    return {step: _joined(job, step, [of_rank[step] for of_rank in lines]) for step in steps}


def _lines(job: Job, rank: int) -> dict[int, _Line]:
    path = job.record(rank)
    if not path.exists():
        return {}
    found = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        rows = tuple(bytes.fromhex(row) for row in line["rows"])
        found[line["step"]] = _Line(dp_rank=line["dp_rank"], rows=rows, loss=line["loss"])
    return found


def _joined(job: Job, step: int, lines: Sequence[_Line]) -> TrainedStep:
    rows: dict[int, tuple[bytes, ...]] = {}
    for rank, line in enumerate(lines):
        if rows.setdefault(line.dp_rank, line.rows) != line.rows:
            raise DifferenceError(
                f"{job.name}, step {step}: rank {rank} was given other rows than a peer of data-parallel rank {line.dp_rank}"
            )
    losses = {line.loss for line in lines}
    if len(losses) > 1 or not math.isfinite(min(losses)):
        raise DifferenceError(f"{job.name}, step {step}: ranks were told the losses {sorted(losses)}, and there is one for all")
    peers = len(lines) if len(rows) < len(lines) else 0
    in_order = tuple(row for dp_rank in sorted(rows) for row in rows[dp_rank])
    return TrainedStep(step=step, rows=in_order, loss=losses.pop(), peers=peers)
