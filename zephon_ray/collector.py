"""The collector: tokenised units in, proven global batches out.

It decides what is needed next, asks a runner for it, feeds the lanes, and folds the rows' digests into the chain. It is
the one ordered part of the pipeline and does nothing expensive. It knows nothing of ranks.
"""

from __future__ import annotations

import time

import numpy as np

from zephon_ray.batches import GlobalBatch, fold
from zephon_ray.chunk import Chunk
from zephon_ray.errors import RunnerError, SourceError
from zephon_ray.lanes import LaneGroup, Want, beginning
from zephon_ray.ledger.line import Recorded, UnitDigests
from zephon_ray.manifest import build_manifests
from zephon_ray.plan.windows import SourceCursor
from zephon_ray.recipe import SHARE_BITS, Recipe, fingerprint, fingerprint_fields
from zephon_ray.runners.base import Job, Runner
from zephon_ray.stages.tokenise import make_options
from zephon_ray.state import Identity, StreamState
from zephon_ray.storage import Storage
from zephon_ray.supply import Memory, SourceSupply

MEMORY_BYTES = 64 << 20
"""Ids that small sources keep in memory, all together, so that their later epochs read nothing."""

WAIT_S = 600.0
"""How long a unit may take before the runner is said to be stuck."""

LEAD_WINDOWS = 2
"""Windows of a source, at least, that a runner may make ahead of those that were fed."""
_MOST_WINDOWS = 4096


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


class Collector:
    """One stream of global batches.

    Args:
        job: recipe, manifests and options.
        runner: not started yet; the caller closes it.
        state: where to go on; None for the beginning.
        recorded: digests of windows that will be read again, to be compared.

    Attributes:
        state: after the last batch that was made.

    Raises:
        StateError: a position of the state does not fit the data.
        SourceError: a source has no group.
        RunnerError: the runner was started before, or its workers cannot be.
    """

    def __init__(self, job: Job, runner: Runner, state: StreamState | None = None, recorded: Recorded | None = None) -> None:
        self._job, self._runner = job, runner
        recipe = job.recipe
        if state is None:
            first = [SourceCursor(recipe, m).position for m in job.manifests]
            state = StreamState(step=0, chain=bytes(16), lanes=beginning(recipe, first))
        self.state = state
        memory = Memory(MEMORY_BYTES)
        positions = [s.position for s in state.lanes.sources]
        self._supplies = [
            SourceSupply(recipe, m, p, memory, _of_source(recorded or {}, m.source)) for m, p in zip(job.manifests, positions, strict=True)
        ]
        self._lanes = LaneGroup(recipe, state.lanes, pad_id=job.options.pad or 0)
        self._chunk: Chunk | None = None
        for supply, source in zip(self._supplies, state.lanes.sources, strict=True):
            supply.skip_used(int((source.windows - (source.indices == 0)).max()))
            if supply.done:
                self._lanes.end(supply.source)
        runner.start(job, positions)
        if runner.reads_ahead:
            for supply in self._supplies:
                self._allow(supply)

    def next_batch(self) -> GlobalBatch | None:
        """The next global batch; None at the end of the stream.

        Raises:
            BadRecordError, SourceError, DataChangedError, StorageError: the data cannot be used, or does not make one batch.
            RunnerError: the workers gave nothing in time, or go on dying.
        """
        if self._chunk is None or not self._chunk.left:
            self._chunk = self._next_chunk()
        if self._chunk is None:
            if not self.state.step:
                raise self._no_batch_at_all()
            return None
        rows = self._chunk.next_step()
        step = self.state.step + 1
        digest, chain = fold(step, self.state.chain, rows.digests)
        lanes = self._lanes.state_after(rows)
        self.state = StreamState(step=step, chain=chain, lanes=lanes)
        uses = [s.use(int(newest)) for s, newest in zip(self._supplies, rows.used, strict=True)]
        return GlobalBatch(
            step=step,
            rows=rows.rows,
            row_digests=tuple(rows.digests),
            digest=digest,
            chain=chain,
            pairs=tuple(rows.pairs.tolist()),
            padding=rows.padding,
            windows={source: windows for source, (windows, _) in enumerate(uses) if windows},
            left_out={source: counts for source, (_, counts) in enumerate(uses) if any(counts)},
            lanes=lanes,
        )

    def _no_batch_at_all(self) -> SourceError:
        recipe = self._job.recipe
        return SourceError(
            f"recipe {recipe.name!r}: its stream ends before the first global batch. The epochs of its sources give"
            f" {sum(s.pairs for s in self._supplies)} next-token pairs, and a batch of {recipe.global_batch_size} rows takes"
            f" {recipe.global_batch_size * recipe.sequence_length}, as many from every lane. Give it more epochs or a smaller batch,"
            " or write final_batch: pad"
        )

    def _next_chunk(self) -> Chunk | None:
        while (want := self._lanes.want()) is not None:
            self._feed(want)
        if self._lanes.over:
            return None
        chunk = self._lanes.chunk()
        for supply, newest in zip(self._supplies, chunk.used_before, strict=True):
            supply.skip_used(int(newest))
        return chunk

    def _feed(self, want: Want) -> None:
        """Feed the lanes at least one window of the source that they want."""
        supply = self._supplies[want.source]
        windows = supply.next_windows(want.pairs, _MOST_WINDOWS)
        deadline = time.monotonic() + WAIT_S
        while windows is None:
            self._allow(supply)
            left = deadline - time.monotonic()
            if left <= 0:
                raise RunnerError(
                    f"source {supply.name!r}: its next window did not come within {WAIT_S:.0f} s, though other units did."
                    " Look whether its storage answers, or lower its unit_bytes"
                )
            unit = self._runner.take(left)
            self._supplies[unit.source].put(unit)
            windows = supply.next_windows(want.pairs, _MOST_WINDOWS)
        self._lanes.feed(supply.source, windows)
        if self._runner.reads_ahead:
            self._allow(supply)
        if supply.done:
            self._lanes.end(supply.source)

    def _allow(self, supply: SourceSupply) -> None:
        """Say how far the runner may go: two windows, or as many small ones as two steps take."""
        if supply.remembered or supply.done:
            return
        lead = 1
        if self._runner.reads_ahead:
            recipe = self._job.recipe
            step_pairs = recipe.global_batch_size * recipe.sequence_length * recipe.shares()[supply.source] >> SHARE_BITS
            lead = int(np.clip(2 * step_pairs // supply.mean_pairs if supply.fed else 0, LEAD_WINDOWS, _MOST_WINDOWS))
        self._runner.allow(supply.source, supply.fed + lead)


def _of_source(recorded: Recorded, source: int) -> dict[tuple[int, int], UnitDigests]:
    return {(epoch, window): digests for (s, epoch, window), digests in recorded.items() if s == source}
