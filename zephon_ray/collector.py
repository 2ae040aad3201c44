"""The collector: tokenised units in, proven global batches out.

It feeds the lane groups what they ask for, joins what they say of each step, and folds the rows' digests into the chain.
It is the one ordered part of the pipeline and does nothing expensive. It knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zephon_ray.batches import GlobalBatch
from zephon_ray.errors import SourceError
from zephon_ray.feeding import Want
from zephon_ray.joining import batch_of, is_over, join_blocks
from zephon_ray.lane_blocks import beginning
from zephon_ray.lanes import LaneGroup
from zephon_ray.ledger.line import Recorded
from zephon_ray.manifest import build_manifests
from zephon_ray.plan.windows import SourceCursor
from zephon_ray.recipe import Recipe, fingerprint, fingerprint_fields
from zephon_ray.runners.base import Job, Runner
from zephon_ray.stages.tokenise import make_options
from zephon_ray.stages.unit import TokenisedUnit
from zephon_ray.state import Identity, StreamState
from zephon_ray.storage import Storage
from zephon_ray.supplies import Supplies


def prepare(recipe: Recipe) -> tuple[Job, Identity]:
    """Look at tokenizer and shards: everything that a stream needs before the first read.

    Raises:
        RecipeError, SourceError, StorageError: as `make_options` and `build_manifests`.
    """
    options = make_options(recipe)
    manifests = build_manifests(recipe, Storage(recipe.execution.storage))
    digests = [m.digest() for m in manifests]
    identity = Identity(
        fingerprint=fingerprint(recipe, options.tokenizer_sha256, digests),
        fields=fingerprint_fields(recipe, options.tokenizer_sha256, digests),
    )
    return Job(recipe=recipe, manifests=manifests, options=options), identity


def first_state(job: Job) -> StreamState:
    """The state before step 1.

    Raises:
        SourceError: a source has no group.
    """
    first = [SourceCursor(job.recipe, m).position for m in job.manifests]
    return StreamState(step=0, chain=bytes(16), lanes=beginning(job.recipe, first))


class Collector:
    """One stream of global batches.

    Args:
        job: recipe, manifests and options.
        runner: not started yet; the caller closes it.
        state: where to go on; None for the beginning.
        recorded: digests of windows that will be read again, to be compared.
        groups: lanes of each lane group, contiguous and in order; one group of all by default. In one process more of them
            only deal more often; they cannot change a byte.

    Attributes:
        state: after the last batch that was made.

    Raises:
        StateError: a position of the state does not fit the data.
        SourceError: a source has no group.
        RunnerError: the runner was started before, or its workers cannot be.
    """

    def __init__(
        self,
        job: Job,
        runner: Runner,
        state: StreamState | None = None,
        recorded: Recorded | None = None,
        *,
        groups: Sequence[range] | None = None,
    ) -> None:
        self._recipe = recipe = job.recipe
        self.state = state = state or first_state(job)
        self._supplies = Supplies[TokenisedUnit](job, runner, state.lanes, recorded)
        self._groups = [
            LaneGroup(recipe, state.lanes, step=state.step, pad_id=job.options.pad or 0, lanes=lanes)
            for lanes in groups or [range(recipe.lanes)]
        ]
        for group in self._groups:
            for source in self._supplies.done:
                group.end(source)

    def next_batch(self) -> GlobalBatch | None:
        """The next global batch; None at the end of the stream.

        Raises:
            BadRecordError, SourceError, DataChangedError, StorageError: the data cannot be used, or does not make one batch.
            RunnerError: the workers gave nothing in time, or go on dying.
        """
        if not self._get_ready():
            if not self.state.step:
                raise no_batch_at_all(self._recipe, self._supplies.pairs)
            return None
        recipe, height = self._recipe, self._recipe.rows_per_lane
        rows = np.empty((recipe.global_batch_size, 3, recipe.sequence_length), np.int32)
        blocks = [g.next_step(rows[g.lanes.start * height : g.lanes.stop * height]) for g in self._groups]
        joined = join_blocks(self.state.chain, blocks)
        batch = batch_of(joined, *self._supplies.first_used(joined), rows)
        self.state = batch.state
        return batch

    def _get_ready(self) -> bool:
        """Feed the groups what they want for the next step; False where the stream is over.

        A window that cannot be used stops the stream only where the step cannot be made without it, whatever was asked for first:
        so a stream ends in the same way however its lanes are grouped.
        """
        pads = self._recipe.final_batch == "pad"
        for group in self._groups:
            while (want := group.want(self._supplies.failed)) is not None:
                self._feed(want)
            if group.over and not pads:
                return False
        if is_over([g.over for g in self._groups], pads=pads):
            return False
        if not all(g.ready for g in self._groups):
            raise self._supplies.failed[min(self._supplies.failed)]
        return True

    def _feed(self, want: Want) -> None:
        """Feed all groups the same, so that all deal alike."""
        windows = self._supplies.next_windows(want)
        if windows is None:
            return
        ended = want.source in self._supplies.done
        for group in self._groups:
            group.feed(want.source, windows)
            if ended:
                group.end(want.source)


def no_batch_at_all(recipe: Recipe, pairs: int) -> SourceError:
    """What is wrong with a stream that ends before its first step, though its sources gave so many pairs."""
    return SourceError(
        f"recipe {recipe.name!r}: its stream ends before the first global batch. The epochs of its sources give"
        f" {pairs} next-token pairs, and a batch of {recipe.global_batch_size} rows takes"
        f" {recipe.global_batch_size * recipe.sequence_length}, as many from every lane. Give it more epochs or a smaller batch,"
        " or write final_batch: pad"
    )
