"""Who may call a feed. The actor's body is called here without Ray: who is refused is refused before anything is started."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.feed.stand_in import Here
from tests.small import a_recipe
from zephon_ray.errors import RefusedError
from zephon_ray.feed.feed import Feed, FeedOptions
from zephon_ray.feed.generations import UnknownSessionError
from zephon_ray.feed.protocol import PROTOCOL, Caller, OpenRequest, TakeRequest

TOKEN = "a long random word"
CALLS: dict[str, Callable[[Feed, Caller], Coroutine[Any, Any, Any]]] = {
    "open": lambda feed, caller: feed.open(
        OpenRequest(caller=caller, session="mine", stream="train", dp_rank=0, dp_world_size=1, incarnation="run:0")
    ),
    "ready": lambda feed, caller: feed.ready(caller),
    "status": lambda feed, caller: feed.status(caller),
    "stop": lambda feed, caller: feed.stop(caller, force=True),
}


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    return Feed(
        FeedOptions(
            name="first",
            recipes={"train": a_recipe(tmp_path)},
            directories={"train": str(tmp_path / "run")},
            open_production=Here(),
            token_sha256=hashlib.sha256(TOKEN.encode()).hexdigest(),
        )
    )


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("caller", "said"),
    [
        (Caller(client="x:1"), "wants its token, and x:1 gave none"),
        (Caller(client="x:1", token=""), "gave none"),
        (Caller(client="x:1", token=TOKEN + "s"), "gave another"),
        (Caller(client="x:1", token=hashlib.sha256(TOKEN.encode()).hexdigest()), "gave another"),
        (Caller(client="x:1", token=TOKEN, protocol=PROTOCOL + 1), rf"speaks protocol {PROTOCOL}, and x:1 {PROTOCOL + 1}"),
        (Caller(client="x:1", token=TOKEN, protocol=PROTOCOL - 1), "Use one version of zephon_ray on both sides"),
    ],
)
def test_without_the_token_or_with_another_protocol_nothing_is_done(
    feed: Feed, tmp_path: Path, call: str, caller: Caller, said: str
) -> None:
    with pytest.raises(RefusedError, match=said):
        asyncio.run(CALLS[call](feed, caller))
    assert not feed._streams
    assert not (tmp_path / "run").exists()


def test_a_session_cannot_be_made_up(feed: Feed) -> None:
    feed._streams = {"train": None}  # type: ignore[dict-item]  # started, and nobody has opened a stream
    with pytest.raises(UnknownSessionError):
        asyncio.run(feed.take(TakeRequest(session="guessed", taken=0, count=1)))
    with pytest.raises(UnknownSessionError):
        asyncio.run(feed.saved("guessed", 3))
    asyncio.run(feed.leave("guessed"))


def test_the_token_is_not_shown(feed: Feed) -> None:
    caller = Caller(client="x:1", token=TOKEN)
    request = OpenRequest(caller=caller, session="secret", stream="train", dp_rank=0, dp_world_size=1, incarnation="run:0")
    assert TOKEN not in f"{caller} {request} {feed._options}"
    assert "secret" not in str(request)
