"""Needs: the computation behind a forecast. Integers and floats in, integers and floats out; nothing is read.

What the contract promises is exact here (shares, the bound of the mixture, legal sizes); what depends on texts is an
estimate from a sample, and named `about_...`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from zephon_ray.forecast.samples import Sample
from zephon_ray.manifest import SourceManifest
from zephon_ray.recipe import Recipe
from zephon_ray.recipe_checks import nearest
from zephon_ray.supplies import LEAD_WINDOWS

ID_BYTES = 4
PLACE_BYTES = 12
"""Of a pair in a batch: input, label and position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Whether a number of data-parallel ranks can share the batches.

    Args:
        dp_size: the number that was asked for.
        legal: it divides `global_batch_size`.
        rows: of each rank, where it is legal.
        nearest: the legal numbers next to it, below and above; (dp_size,) where it is legal itself.
    """

    dp_size: int
    legal: bool
    rows: int | None
    nearest: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceForecast:
    """One source.

    Args:
        name: of the source.
        target: its part of all pairs, exact but for rounding to 2^-20.
        bound_pairs: a lane is never further than this from its due of the source: proven, and does not grow with time.
        pairs_a_step: of a global batch, on average.
        slots: groups that are read side by side.
        about_epoch_pairs, about_epoch_documents, about_epoch_bytes: in one epoch; bytes are raw text.
        about_bytes_a_pair: raw text for each pair.
        about_stored_bytes_a_pair: read from the store for each pair.
        about_window_bytes, about_window_pairs, about_window_documents: of a window, which is shuffled together.
        about_windows: of an epoch.
        about_epochs: that the steps of the forecast take.
        about_last_step: at which its epochs are over; None where it repeats for ever.
        start_windows, about_start_bytes: needed before the first batch.
        about_resident_ids: held at a time, windows read ahead included.
        restore_windows, about_restore_bytes: tokenised again by a restore, at worst.
        about_decoded_bytes: decoded besides by a restore, at worst, since compressed files and cut groups are entered at their start.
    """

    name: str
    target: float
    bound_pairs: int
    pairs_a_step: float
    slots: int
    about_epoch_pairs: int
    about_epoch_documents: int
    about_epoch_bytes: int
    about_bytes_a_pair: float
    about_stored_bytes_a_pair: float
    about_window_bytes: int
    about_window_pairs: int
    about_window_documents: int
    about_windows: int
    about_epochs: float
    about_last_step: int | None
    start_windows: int
    about_start_bytes: int
    about_resident_ids: int
    restore_windows: int
    about_restore_bytes: int
    about_decoded_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A whole recipe.

    Args:
        lanes, rows_a_lane, pairs_a_step: of a global batch.
        legal_dp_sizes: every number of ranks that can share a batch.
        asked: the numbers that were asked for.
        steps: that the forecast is for.
        about_last_step: at which the stream ends, if before that; None where it does not end because of epochs.
        sources: one each.
        about_start_bytes, about_restore_bytes, about_decoded_bytes: sums over sources.
        about_resident_bytes: of ids in the collector.
        batches_bytes: of the batches made ahead (`prefetch_steps`).
        state_bytes_at_most: of a checkpoint's state.
        tokens_per_second: that the forecast is for; None where it was not asked.
        cpu_per_mtok: CPU seconds for a million pairs: an assumption, given by the caller.
        cores: CPU cores that this takes.
        about_text_bytes_per_second, about_stored_bytes_per_second: to tokenise, and to read from the store.
    """

    lanes: int
    rows_a_lane: int
    pairs_a_step: int
    legal_dp_sizes: tuple[int, ...]
    asked: tuple[Ranks, ...]
    steps: int
    about_last_step: int | None
    sources: tuple[SourceForecast, ...]
    about_start_bytes: int
    about_restore_bytes: int
    about_decoded_bytes: int
    about_resident_bytes: int
    batches_bytes: int
    state_bytes_at_most: int
    tokens_per_second: float | None
    cpu_per_mtok: float
    cores: float | None
    about_text_bytes_per_second: float | None
    about_stored_bytes_per_second: float | None


def forecast(
    recipe: Recipe,
    manifests: Sequence[SourceManifest],
    samples: Sequence[Sample],
    *,
    steps: int,
    dp_sizes: Sequence[int] = (),
    tokens_per_second: float | None = None,
    cpu_per_mtok: float = 1.6,
) -> Forecast:
    """Estimate what a run will need.

    Args:
        recipe: what is to be run.
        manifests: one a source.
        samples: one a source.
        steps: of the run, at least 1.
        dp_sizes: numbers of ranks to look at, each at least 1.
        tokens_per_second: that training takes, above 0.
        cpu_per_mtok: CPU seconds that a million pairs take to read and tokenise, above 0.
    """
    shares = recipe.shares()
    sources = tuple(
        _source(recipe, manifest, sample, shares[i] / sum(shares), steps)
        for i, (manifest, sample) in enumerate(zip(manifests, samples, strict=True))
    )
    batch = recipe.global_batch_size * recipe.sequence_length
    speed = tokens_per_second
    return Forecast(
        lanes=recipe.lanes,
        rows_a_lane=recipe.rows_per_lane,
        pairs_a_step=batch,
        legal_dp_sizes=tuple(recipe.legal_dp_sizes()),
        asked=tuple(_ranks(recipe, size) for size in dp_sizes),
        steps=steps,
        about_last_step=_last_step(recipe, sources),
        sources=sources,
        about_start_bytes=sum(s.about_start_bytes for s in sources),
        about_restore_bytes=sum(s.about_restore_bytes for s in sources),
        about_decoded_bytes=sum(s.about_decoded_bytes for s in sources),
        about_resident_bytes=ID_BYTES * sum(s.about_resident_ids for s in sources),
        batches_bytes=batch * PLACE_BYTES * max(1, recipe.execution.prefetch_steps),
        state_bytes_at_most=2048 + 64 * recipe.lanes * len(sources),
        tokens_per_second=speed,
        cpu_per_mtok=cpu_per_mtok,
        cores=None if speed is None else speed * cpu_per_mtok / 1e6,
        about_text_bytes_per_second=None if speed is None else speed * sum(s.target * s.about_bytes_a_pair for s in sources),
        about_stored_bytes_per_second=None if speed is None else speed * sum(s.target * s.about_stored_bytes_a_pair for s in sources),
    )


def _ranks(recipe: Recipe, size: int) -> Ranks:
    legal = recipe.legal_dp_sizes()
    if size in legal:
        return Ranks(dp_size=size, legal=True, rows=recipe.global_batch_size // size, nearest=(size,))
    return Ranks(dp_size=size, legal=False, rows=None, nearest=tuple(nearest(size, legal)))


def _source(recipe: Recipe, manifest: SourceManifest, sample: Sample, target: float, steps: int) -> SourceForecast:
    batch = recipe.global_batch_size * recipe.sequence_length
    a_step = batch * target
    slots = min(recipe.window_groups_of(manifest.source), manifest.num_groups)
    density = max(1, sample.pairs) / sample.raw_bytes
    epoch_pairs = max(1, round(sample.source_bytes * density))
    window_bytes = slots * sample.source_bytes / max(1, sample.source_units)
    window_pairs = max(1.0, window_bytes * density)
    windows = max(1, ceil(sample.source_bytes / max(1.0, window_bytes)))
    bound = mixture_bound(recipe, target)
    start = ceil(a_step / window_pairs)
    restore = min(1 + ceil(_spread(recipe, sample, bound) / window_pairs), windows + 1)
    epochs = recipe.sources[manifest.source].epochs
    return SourceForecast(
        name=manifest.name,
        target=target,
        bound_pairs=bound,
        pairs_a_step=a_step,
        slots=slots,
        about_epoch_pairs=epoch_pairs,
        about_epoch_documents=sample.source_documents,
        about_epoch_bytes=sample.source_bytes,
        about_bytes_a_pair=1 / density,
        about_stored_bytes_a_pair=sample.stored_bytes / epoch_pairs,
        about_window_bytes=round(window_bytes),
        about_window_pairs=round(window_pairs),
        about_window_documents=ceil(slots * sample.source_documents / max(1, sample.source_units)),
        about_windows=windows,
        about_epochs=steps * a_step / epoch_pairs,
        about_last_step=None if epochs is None else int(epochs * epoch_pairs / a_step),
        start_windows=start,
        about_start_bytes=round(start * window_bytes),
        about_resident_ids=round((1 + LEAD_WINDOWS) * window_pairs) + recipe.lanes * (recipe.sequence_length + _piece(recipe, sample)),
        restore_windows=restore,
        about_restore_bytes=round(restore * window_bytes),
        about_decoded_bytes=sum(sample.largest_groups),
    )


def mixture_bound(recipe: Recipe, target: float) -> int:
    """Pairs that a lane can be away from its due of a source at most: see `docs/contract.md`, mixing."""
    return ceil((recipe.max_piece_pairs + recipe.sequence_length) * (1 + target * (len(recipe.sources) - 2)))


def _piece(recipe: Recipe, sample: Sample) -> int:
    """Pairs of a long piece: of the longest document in the sample, as far as it is not cut."""
    return min(recipe.max_piece_pairs, sample.longest)


def _spread(recipe: Recipe, sample: Sample, bound: int) -> int:
    """Pairs of a source between the places of the lanes that are furthest apart, at most.

    Two lanes have taken of it what is their due, each within the bound; what they were dealt differs by a piece at most.
    With `best_fit` a lane's place is that at the start of a fill.
    """
    fill = 0
    if recipe.packing.algorithm == "best_fit":
        fill = recipe.fill_pieces * min(recipe.max_piece_pairs, sample.pairs // max(1, sample.documents) + 1)
    return recipe.lanes * (2 * bound + _piece(recipe, sample) + fill)


def _last_step(recipe: Recipe, sources: Sequence[SourceForecast]) -> int | None:
    """Where the stream ends because epochs are over."""
    if recipe.on_exhausted == "stop":
        last = min((s.about_last_step if s.about_last_step is not None else inf for s in sources), default=inf)
        return None if last == inf else int(last)
    if any(s.about_last_step is None for s in sources):
        return None
    pairs = sum(s.about_epoch_pairs * (recipe.sources[i].epochs or 0) for i, s in enumerate(sources))
    return pairs // (recipe.global_batch_size * recipe.sequence_length)
