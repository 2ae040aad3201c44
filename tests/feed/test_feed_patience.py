"""How long a feed and its ranks go on trying before they say what is wrong."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, ObjectStoreFullError, OutOfDiskError

from tests.feed.stand_in import Here
from tests.feed.test_feed_streams import LIMIT_S, serving
from tests.small import a_recipe
from zephon_ray.collector import first_state, prepare
from zephon_ray.errors import FeedError, RunnerError
from zephon_ray.feed import feed as feed_module
from zephon_ray.feed import making
from zephon_ray.feed import reader as reader_module
from zephon_ray.feed.blocks import RowBlock
from zephon_ray.feed.feed import RayStates
from zephon_ray.feed.protocol import StepReply, TakeReply, TakeRequest
from zephon_ray.feed.reader import Reader
from zephon_ray.runners.ray_cluster import one_line


def test_production_that_fails_slowly_is_tried_once_more_and_status_says_so_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "FAILING_S", 0.0)
    here = Slow(faults=[RunnerError("no unit came"), RunnerError("no unit came")])
    with serving(a_recipe(tmp_path), tmp_path / "out", here) as served:
        rank = served.rank()
        assert rank.ask() is None
        assert served.until(lambda: served.status().waiting) == "production failed after step 0, attempt 1 of 5: no unit came"
        here.seen.set()
        with pytest.raises(RunnerError, match="no unit came"):
            rank.take()
        assert (served.status().reopened, served.status().waiting) == (1, None)
        again = served.rank(incarnation="run:1")
        assert again.steps(5)[-1].step == 5
        assert served.status().error is None


class Slow(Here):
    """The second production is opened when the first's failure was seen."""

    seen = threading.Event()

    def __call__(self, *args: Any) -> Any:
        if self.opened:
            assert self.seen.wait(LIMIT_S)
        return super().__call__(*args)


class Feeding:
    """Stands for a link: gives the same step to whoever asks, and remembers what they say was lost."""

    def __init__(self, step: StepReply) -> None:
        self.step, self.lost = step, deque[Any]()

    def take(self, request: TakeRequest) -> TakeReply:
        self.lost.append(request.lost)
        return TakeReply(steps=(self.step,))

    def leave(self) -> None:
        pass


def test_rows_that_do_not_come_are_an_error_that_names_the_store_after_three_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, identity = prepare(a_recipe(tmp_path))
    block = RowBlock(first_row=0, rows=4, ref=SimpleNamespace(hex=lambda: "ab"))
    state = first_state(job)
    step = StepReply(step=1, digest=bytes(16), chain=bytes(16), pairs=(1,), state=state, blocks=(block,))

    def get(refs: object, timeout: float) -> None:
        raise GetTimeoutError

    monkeypatch.setattr(reader_module.ray, "get", get)
    link = Feeding(step)
    reader = Reader(link, identity, state, (0, 4), 1)  # type: ignore[arg-type]
    with pytest.raises(FeedError, match=r"rows of step 1 did not come within 60 s \(3 times .* object store here is full"):
        reader.take()
    reader.close()
    assert list(link.lost) == [None, (1, "ab"), (1, "ab")]


def test_a_state_that_the_store_has_no_room_for_goes_with_the_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = first_state(prepare(a_recipe(tmp_path))[0])
    monkeypatch.setattr(feed_module, "_INLINE_BYTES", 0)

    def put(value: object) -> None:
        raise ObjectStoreFullError

    monkeypatch.setattr(ray, "put", put)
    assert RayStates().put(state) is state


def test_a_store_without_room_is_said_in_words_and_colours_are_left_out() -> None:
    assert one_line(OutOfDiskError(("01f6", b"\n\x1c", ""))).startswith("the object store of a node is full, and so is the disk")  # type: ignore[arg-type]
    assert one_line(ObjectStoreFullError()).startswith("the object store of a node is full.")
    assert one_line("\x1b[36mray::It()\x1b[39m\n failed") == "ray::It() failed"
    assert one_line(ValueError()) == "ValueError"
