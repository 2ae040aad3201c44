"""A feed says little: one line a minute at most, and nothing is lost without being counted."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from zephon_ray.cli.feed import QUIET_S, Troubles, _facts
from zephon_ray.feed.protocol import StreamStatus
from zephon_ray.telemetry import OneAMinute


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


def test_the_feed_s_log_is_one_line_a_minute_and_counts_what_it_leaves_out(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    logger, handler = logging.getLogger("test_quiet"), logging.StreamHandler()
    handler.addFilter(OneAMinute(lambda: clock[0]))
    logger.addHandler(handler)
    logger.propagate = False
    for second in range(0, 600, 5):
        clock[0] = float(second)
        logger.warning("production failed after step %d", second)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[:2] == [
        "production failed after step 0",
        "production failed after step 60 (11 lines since the last one were left out)",
    ]
    logger.error("the stream ends")
    logger.error("and so does the other")
    assert len(capsys.readouterr().err.splitlines()) == 2, "what ends a stream is always said"


def test_serve_says_what_goes_wrong_at_once_and_then_once_a_minute() -> None:
    lines: list[tuple[float, str]] = []
    tell = Troubles(lambda line: lines.append((now, line)))
    for second in range(300):
        now = float(second)
        tell([f"train: the run's directory refuses since {second} s"] if 10 <= second < 200 else [], now)
    assert [at for at, _ in lines] == [10.0, 10 + QUIET_S, 10 + 2 * QUIET_S, 10 + 3 * QUIET_S]
    lines.clear()
    for second in range(300, 600):
        now = float(second)
        tell(["train: ranks 3 have not come yet"], now)
    assert len(lines) == 1, "what stays the same is said once"


def test_status_shows_the_mixture_beside_what_is_due() -> None:
    status = StreamStatus(stream="train", step=4, names=("web", "code"), pairs=(69, 31), due=(0.7, 0.3))
    facts = dict(_facts(status))
    assert "web 69.00 %" in facts["mixture"]
    assert "70.00 %" in facts["mixture"]
    assert "mixture" not in dict(_facts(replace(status, pairs=()))), "before the first step"
