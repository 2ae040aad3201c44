"""Every metric of the list is set, from a status, and counters only grow."""

from __future__ import annotations

from typing import Any

import pytest

from zephon_ray.feed import metrics
from zephon_ray.feed.metrics import FeedMetrics, readings
from zephon_ray.feed.protocol import PROTOCOL, FeedStatus, StreamStatus
from zephon_ray.telemetry import FEED_METRICS


def status(**over: Any) -> FeedStatus:
    stream = StreamStatus(stream="train", step=7, names=("web", "code"), pairs=(70, 30), retries=2, replays_hot=1, **over)
    return FeedStatus(name="run", protocol=PROTOCOL, host="here", pid=1, seconds=2.5, nodes=3, streams={"train": stream})


class Recorder:
    """Stands for a metric of Ray's, which cannot be read back."""

    made: dict[str, Recorder]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self._tag_keys = tag_keys
        Recorder.made[name] = self

    def _key(self, tags: dict[str, str]) -> tuple[str, ...]:
        assert tuple(tags) == self._tag_keys
        return tuple(tags.values())

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values[self._key(tags)] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray raises"
        self.values[self._key(tags)] = self.values.get(self._key(tags), 0.0) + value


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    Recorder.made = {}
    monkeypatch.setattr(metrics, "Gauge", Recorder)
    monkeypatch.setattr(metrics, "Counter", Recorder)
    return Recorder.made


def test_every_metric_of_the_list_is_read_from_a_status_and_has_its_tags() -> None:
    listed = {metric.name: metric for metric in FEED_METRICS}
    found = list(readings(status()))
    assert {reading.name for reading in found} == set(listed)
    assert all(len(reading.tags) == len(listed[reading.name].tags) for reading in found)
    assert len({(reading.name, reading.tags) for reading in found}) == len(found)


def test_a_metric_stands_at_what_the_status_says(recorded: dict[str, Recorder]) -> None:
    shown = FeedMetrics()
    shown.show(status(error="no such bucket"))
    assert recorded["zephon_feed_made_steps"].values == {("run", "train"): 7}
    assert recorded["zephon_feed_cluster_nodes"].values == {("run",): 3}
    assert recorded["zephon_feed_failed"].values == {("run", "train"): 1}
    assert recorded["zephon_feed_pairs_total"].values == {("run", "train", "web"): 70, ("run", "train", "code"): 30}
    assert recorded["zephon_feed_rewinds_total"].values == {("run", "train", "hot"): 1}


def test_a_counter_grows_by_what_came_since_and_never_goes_back(recorded: dict[str, Recorder]) -> None:
    shown = FeedMetrics()
    for waited in (1.0, 4.0, 4.0, 0.5, 2.0):
        shown.show(status(waited_seconds=waited))
    assert recorded["zephon_feed_waited_seconds_total"].values == {("run", "train"): 4.0 + 1.5}


def test_a_stream_that_was_not_looked_at_yet_has_no_sources() -> None:
    blank = FeedStatus(
        name="run", protocol=PROTOCOL, host="here", pid=1, seconds=0.0, nodes=1, streams={"validation": StreamStatus(stream="validation")}
    )
    assert not [reading for reading in readings(blank) if reading.name == "zephon_feed_pairs_total"]
