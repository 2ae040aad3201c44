"""A feed's metrics: what `telemetry.FEED_METRICS` lists, set in the feed's own process through Ray, which exports them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ray.util.metrics import Counter, Gauge

from zephon_ray.feed.protocol import FeedStatus, StreamStatus
from zephon_ray.telemetry import FEED_METRICS, Metric


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a metric stands at.

    Args:
        name: one of `FEED_METRICS`.
        tags: values of its tags, in their order.
        value: the total, for a counter.
    """

    name: str
    tags: tuple[str, ...]
    value: float


def readings(status: FeedStatus) -> Iterator[Reading]:
    """Every metric of a feed as it stands."""
    yield _reading("up_seconds", status.seconds, status.name)
    yield _reading("cluster_nodes", status.nodes, status.name)
    for stream in status.streams.values():
        yield from _of_stream(stream, (status.name, stream.stream))


def _of_stream(stream: StreamStatus, tags: tuple[str, str]) -> Iterator[Reading]:
    plain = {
        "made_steps": stream.step,
        "taken_steps": stream.taken_step,
        "ahead_steps": stream.steps_ahead,
        "kept_steps": stream.kept_steps,
        "kept_bytes": stream.kept_bytes,
        "ranks": stream.ranks,
        "generation": stream.generation,
        "workers": stream.workers,
        "failed": stream.error is not None,
        "waited_seconds_total": stream.waited_seconds,
        "text_bytes_total": stream.text_bytes,
        "units_total": stream.units,
        "retried_units_total": stream.retries,
        "reopened_total": stream.reopened,
    }
    for name, value in plain.items():
        yield _reading(name, value, *tags)
    for source, pairs in zip(stream.names, stream.pairs, strict=False):  # the names are known before the first step
        yield _reading("pairs_total", pairs, *tags, source)
    yield _reading("rewinds_total", stream.replays_hot, *tags, "hot")
    yield _reading("rewinds_total", stream.replays_cold, *tags, "cold")


def _reading(name: str, value: float, *tags: str) -> Reading:
    return Reading(name=f"zephon_feed_{name}", tags=tags, value=float(value))


class FeedMetrics:
    """Sets a feed's metrics. One a process."""

    def __init__(self) -> None:
        self._metrics = {metric.name: (metric, _made(metric)) for metric in FEED_METRICS}
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}

    def show(self, status: FeedStatus) -> None:
        """Let them be what the status says."""
        for reading in readings(status):
            metric, made = self._metrics[reading.name]
            tags = dict(zip(metric.tags, reading.tags, strict=True))
            if metric.kind == "gauge":
                made.set(reading.value, tags)
                continue
            # Ray counts by what is added. Where a total goes back, as after a rewind, it is counted on from there.
            key = reading.name, reading.tags
            added = reading.value - self._totals.get(key, 0.0)
            self._totals[key] = reading.value
            if added > 0:
                made.inc(added, tags)


def _made(metric: Metric) -> Any:
    kind = Gauge if metric.kind == "gauge" else Counter
    return kind(metric.name, description=metric.description, tag_keys=metric.tags)
