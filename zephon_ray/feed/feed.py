"""The feed: the actor that ranks call. It only speaks; streams decide, and their threads work.

Make an actor of `Feed` with `max_restarts=-1`, no task retries, and as many concurrent calls as there are ranks: a rank that waits
for a step holds one. An actor that restarts knows nothing: it goes on from the run's directory, where its ranks come back to it.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from zephon_ray.errors import RefusedError
from zephon_ray.feed.generations import UnknownSessionError
from zephon_ray.feed.making import OpenProduction, state_nbytes
from zephon_ray.feed.protocol import (
    POLL_S,
    PROTOCOL,
    Caller,
    FeedStatus,
    Opened,
    OpenRequest,
    StreamName,
    TakeReply,
    TakeRequest,
)
from zephon_ray.feed.streams import FeedStream, StreamOptions
from zephon_ray.recipe import Recipe
from zephon_ray.runners.ray_cluster import NO_ROOM
from zephon_ray.state import StreamState
from zephon_ray.telemetry import quieten

T = TypeVar("T")

OBSERVE_S = 5.0
KEEP_STEPS = 2
PATIENCE_S = 120.0
HOT_SHARE = 0.3
"""Of an object store, for rewinds, where the recipe does not say."""

_LAST_WORDS_S = 2.0
"""For a feed that was stopped to tell its ranks so."""

_INLINE_BYTES = 32 << 10
_START_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedOptions:
    """What a feed feeds, and how.

    Args:
        name: of the feed.
        recipes: of each stream; "train" always.
        directories: of each stream, where it is written down.
        open_production: opens productions; it is pickled.
        token_sha256: of the token that clients must present, hex; None where anyone may call.
        observe: told the status every `OBSERVE_S`, for metrics; it is pickled.
        keep_steps: kept behind the slowest rank in any case.
        patience_s: how long the run's directory may refuse before that is an error on every rank.
    """

    name: str
    recipes: Mapping[StreamName, Recipe]
    directories: Mapping[StreamName, str]
    open_production: OpenProduction
    token_sha256: str | None = None
    observe: Callable[[FeedStatus], None] | None = None
    keep_steps: int = KEEP_STEPS
    patience_s: float = PATIENCE_S


class Feed:
    """The body of the actor. Nothing is read before a rank asks.

    Args:
        options: what it feeds.
    """

    def __init__(self, options: FeedOptions) -> None:
        self._options = options
        self._began = time.monotonic()
        self._streams: dict[StreamName, FeedStream] = {}
        self._sessions: dict[str, FeedStream] = {}
        self._changed: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._observer: asyncio.Task[None] | None = None
        self._seen: FeedStatus | None = None

    # --- ranks -----------------------------------------------------------------------------------------------------------

    async def open(self, request: OpenRequest) -> Opened:
        """A rank joins, comes back, or begins a new generation.

        Raises:
            RefusedError, FencedError, StateError, RecipeError: it cannot.
            ZephonError: why the stream cannot be fed at all.
        """
        self._check(request.caller)
        self._start()
        stream = self._streams.get(request.stream)
        if stream is None:
            raise RefusedError(
                f"feed {self._options.name} has no {request.stream} stream, only {', '.join(self._streams)}. Serve it with --validation"
            )
        await self._until(lambda: True if stream.ready() else None, _START_S)
        opened = stream.open(request)
        self._sessions[request.session] = stream
        return opened

    async def take(self, request: TakeRequest) -> TakeReply:
        """The next steps of a rank, as soon as there is one; none after `POLL_S`.

        Raises:
            FencedError: a newer incarnation reads.
            UnknownSessionError: the rank has to open again.
            ZephonError: why no further step is made.
        """
        self._start()
        stream = self._stream_of(request.session)
        try:
            return await self._until(lambda: stream.ask(request), POLL_S) or TakeReply()
        finally:
            stream.unask(request.session)

    async def saved(self, session: str, step: int) -> None:
        """A rank has saved its state after a step."""
        self._stream_of(session).saved(session, step)

    async def leave(self, session: str) -> None:
        """A rank is done."""
        stream = self._sessions.pop(session, None)
        if stream is not None:
            stream.leave(session)

    # --- whoever looks after it --------------------------------------------------------------------------------------------

    async def ready(self, caller: Caller) -> FeedStatus:
        """How it stands, once it has looked at its data.

        Raises:
            RefusedError: the caller speaks another protocol, or has no right to call.
            ZephonError: why a stream cannot be fed.
        """
        self._check(caller)
        self._start()
        await self._until(lambda: True if all(stream.ready() for stream in self._streams.values()) else None, _START_S)
        for stream in self._streams.values():
            stream.check()
        return self._status()

    async def status(self, caller: Caller) -> FeedStatus:
        """How it stands.

        Raises:
            RefusedError: the caller has no right to call.
        """
        self._check(caller)
        self._start()
        return self._status()

    async def stop(self, caller: Caller, force: bool = False) -> None:
        """Make no further step, save everything. The actor then ends, also where who asked has gone meanwhile.

        Raises:
            RefusedError: ranks read, and `force` is not set.
        """
        self._check(caller)
        ranks = [rank for stream in self._streams.values() for rank in stream.ranks()]
        if ranks and not force:
            raise RefusedError(f"{len(ranks)} ranks read feed {self._options.name}: {', '.join(ranks[:4])}. End them first, or use --force")
        for stream in self._streams.values():
            stream.stop(caller.client)
        await asyncio.gather(*(asyncio.to_thread(stream.close) for stream in self._streams.values()))
        actor = ray.get_runtime_context().current_actor
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, functools.partial(ray.kill, actor, no_restart=True))

    # --- within ----------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """The first call starts the streams: the constructor has no event loop yet."""
        if self._streams:
            return
        quieten()
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        hot = _hot_bytes(self._options.recipes["train"])
        for name, recipe in self._options.recipes.items():
            options = StreamOptions(
                name=name,
                recipe=recipe,
                out=self._options.directories[name],
                open_production=self._options.open_production,
                states=RayStates(),
                hot_bytes=hot // len(self._options.recipes),
                keep_steps=self._options.keep_steps,
                patience_s=self._options.patience_s,
                feed=ray.get_runtime_context().get_actor_id() or "",
            )
            self._streams[name] = FeedStream(options, self._wake)
        if self._options.observe:
            self._observer = asyncio.create_task(self._observe(self._options.observe))

    async def _observe(self, observe: Callable[[FeedStatus], None]) -> None:
        while True:
            observe(self._status())
            await asyncio.sleep(OBSERVE_S)

    def _status(self) -> FeedStatus:
        return FeedStatus(
            name=self._options.name,
            protocol=PROTOCOL,
            host=socket.gethostname(),
            pid=os.getpid(),
            seconds=time.monotonic() - self._began,
            nodes=sum(bool(node["Alive"]) for node in ray.nodes()),  # type: ignore[no-untyped-call]
            streams={name: stream.status() for name, stream in self._streams.items()},
        )

    def _wake(self) -> None:
        """From any thread: something has changed."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._wake_here)

    def _wake_here(self) -> None:
        assert self._changed is not None
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, look: Callable[[], T | None], seconds: float) -> T | None:
        """What `look` gives, once it is something; None where that takes too long."""
        deadline = time.monotonic() + seconds
        while True:
            changed = self._changed
            assert changed is not None
            found = look()
            left = deadline - time.monotonic()
            if found is not None or left <= 0:
                return found
            try:
                await asyncio.wait_for(changed.wait(), left)
            except TimeoutError:
                continue

    def _stream_of(self, session: str) -> FeedStream:
        stream = self._sessions.get(session)
        if stream is None:
            raise UnknownSessionError("the feed does not know this session: it was closed, or the feed restarted. Connect again")
        return stream

    def _check(self, caller: Caller) -> None:
        if caller.protocol != PROTOCOL:
            raise RefusedError(
                f"feed {self._options.name} speaks protocol {PROTOCOL}, and {caller.client} {caller.protocol}."
                " Use one version of zephon_ray on both sides"
            )
        if self._options.token_sha256 is not None:
            given = hashlib.sha256((caller.token or "").encode()).hexdigest()
            if not hmac.compare_digest(given, self._options.token_sha256):
                raise RefusedError(
                    f"feed {self._options.name} wants its token, and {caller.client} gave {'another' if caller.token else 'none'}"
                )


class RayStates:
    """Small states go with the reply, large ones once into the object store, unless that is full."""

    def put(self, state: StreamState) -> Any:
        """What stands for a state in replies."""
        if state_nbytes(state) <= _INLINE_BYTES:
            return state
        try:
            return ray.put(state)
        except NO_ROOM:
            return state

    def get(self, kept: Any) -> StreamState:
        """The state that it stands for."""
        return kept if isinstance(kept, StreamState) else ray.get(kept)


def _hot_bytes(recipe: Recipe) -> int:
    """The recipe's budget, else a share of the smallest object store of those nodes that can have workers."""
    if recipe.execution.hot_replay_bytes is not None:
        return recipe.execution.hot_replay_bytes
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    stores = [node["Resources"].get("object_store_memory", 0) for node in nodes if node["Alive"] and node["Resources"].get("CPU")]
    return int(HOT_SHARE * min(stores, default=0))
