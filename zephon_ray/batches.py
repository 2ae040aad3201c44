"""Global batches: the rows of all lanes of one step, their digest, and what the ledger says of them.

A batch knows nothing of ranks but how to cut itself for them; it is the same for every number of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zephon_ray.hashing import chain_digest, digest128
from zephon_ray.lane_blocks import LanesState
from zephon_ray.ledger.line import LedgerLine, LeftOutCounts, WindowUse
from zephon_ray.state import StreamState


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """What one data-parallel rank gets of a global batch. B rows in all, R ranks, T pairs a row.

    Args:
        step: from 1.
        inputs: uint32 [B/R, T].
        labels: int32 [B/R, T]; -100 where there is nothing to learn.
        positions: int32 [B/R, T], from 0, beginning again with each piece.
        digest: of the global batch, 16 bytes.
        chain: of all global batches so far, 16 bytes.
        pairs: next-token pairs of each source begun so far, in the whole run.
    """

    step: int
    inputs: npt.NDArray[np.uint32]
    labels: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    digest: bytes
    chain: bytes
    pairs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GlobalStep:
    """One step of the whole run, without its rows: what state and ledger are made of.

    Args:
        step: from 1.
        row_digests: 16 bytes each.
        digest: xxh3-128 of the row digests, joined; 16 bytes.
        chain: of all global batches so far, 16 bytes.
        pairs: [sources], pairs of all pieces begun so far.
        padding: pairs of this step that are padding.
        windows: for each source that has any, the windows that this step is the first to use.
        left_out: for each source that has any, what was left out of these windows.
        lanes: where the lanes stand after the step.
    """

    step: int
    row_digests: tuple[bytes, ...]
    digest: bytes
    chain: bytes
    pairs: tuple[int, ...]
    padding: int
    windows: Mapping[int, tuple[WindowUse, ...]]
    left_out: Mapping[int, LeftOutCounts]
    lanes: LanesState

    @property
    def state(self) -> StreamState:
        """The state after the step."""
        return StreamState(step=self.step, chain=self.chain, lanes=self.lanes)

    @property
    def ledger_line(self) -> LedgerLine:
        """What the ledger keeps of the step."""
        return LedgerLine(
            step=self.step,
            digest=self.digest.hex(),
            chain=self.chain.hex(),
            pairs=self.pairs,
            padding=self.padding,
            left_out=self.left_out,
            windows=self.windows,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GlobalBatch(GlobalStep):
    """One step of the whole run.

    Args:
        rows: int32 [B, 3, T]: inputs, labels and positions of each row, lane by lane.
    """

    rows: npt.NDArray[np.int32]

    def of_rank(self, dp_rank: int, dp_world_size: int) -> Batch:
        """Rows [r*B/R, (r+1)*B/R) of rank r of R; views, no copy. R must divide B."""
        size = len(self.rows) // dp_world_size
        mine = self.rows[dp_rank * size : (dp_rank + 1) * size]
        return Batch(
            step=self.step,
            inputs=mine[:, 0].view(np.uint32),
            labels=mine[:, 1],
            positions=mine[:, 2],
            digest=self.digest,
            chain=self.chain,
            pairs=self.pairs,
        )


def row_digests(batch: Batch) -> list[bytes]:
    """The digests of a rank's rows in order, 16 bytes each, from a copy of its arrays: what `fold` makes the batch's digest of."""
    rows = np.stack([batch.inputs.view(np.int32), batch.labels, batch.positions], axis=1)
    return [digest128(row) for row in rows]


def fold(step: int, previous_chain: bytes, row_digests: Sequence[bytes]) -> tuple[bytes, bytes]:
    """(digest of the global batch, chain up to it), 16 bytes each, from its rows' digests in order.

    Args:
        step: from 1.
        previous_chain: the chain up to the step before, 16 bytes; all zero before the first.
        row_digests: 16 bytes each.
    """
    digest = digest128(b"".join(row_digests))
    return digest, chain_digest(previous_chain, step, digest)
