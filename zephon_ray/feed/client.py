"""The client: a rank's side of a feed, with the loader's interface.

feed = zephon_ray.connect("my-run", address="head:6379", dp_rank=0, dp_world_size=4)
for batch in feed:
    ...
state = feed.state_dict()
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
import weakref
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from zephon_ray.batches import Batch
from zephon_ray.errors import UserError
from zephon_ray.feed.generations import parse_incarnation
from zephon_ray.feed.link import Link
from zephon_ray.feed.protocol import STREAMS, Caller, Opened, OpenRequest, StreamName
from zephon_ray.feed.reader import Reader
from zephon_ray.loader import STATE_KEY, State, bytes_of
from zephon_ray.recipe import Recipe, recipe_from_dict
from zephon_ray.recipe_yaml import read_yaml
from zephon_ray.runners import ray_cluster
from zephon_ray.state import Identity, StreamState, place_in, to_bytes

RECONNECT_S = 120.0
PREFETCH = 2

_Path = str | os.PathLike[str]


def connect(
    name: str,
    *,
    address: str | None = None,
    dp_rank: int = 0,
    dp_world_size: int = 1,
    state: State | None = None,
    incarnation: str | None = None,
    stream: StreamName = "train",
    takeover: bool = False,
    token_file: _Path | None = None,
    fingerprint: str | None = None,
    reconnect_s: float = RECONNECT_S,
    prefetch: int = PREFETCH,
) -> FeedLoader:
    """Read a stream of a feed. Nothing is called before the first use, so a state can be loaded first.

    Args:
        name: of the feed.
        address: of its cluster ("host:port"); None for the one that this process is in, else for RAY_ADDRESS.
        dp_rank: in [0, dp_world_size). Peers that share it (tensor, context, pipeline parallel) connect alike.
        dp_world_size: a divisor of the global batch size; any, whatever it was when the state was saved.
        state: what `state_dict` gave; None for the beginning.
        incarnation: "RUN_ID:COUNT", the same on all ranks, COUNT growing with each restart of the job. None for that of torchrun
            (TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT), and for a fresh one where there is only one rank.
        stream: "train" or "validation".
        takeover: push out the ranks of another run.
        token_file: of the feed's token, where it asks for one.
        fingerprint: that the run must have; None for any.
        reconnect_s: how long a feed that does not answer is waited for.
        prefetch: batches fetched ahead, at least 1.

    Raises:
        UserError: an argument does not fit, or an incarnation is needed.
        RefusedError: `incarnation` is none.
        StateError: `state` is none.
    """
    return FeedLoader(
        name, address=address, dp_rank=dp_rank, dp_world_size=dp_world_size, state=state, incarnation=incarnation, stream=stream,
        takeover=takeover, token_file=token_file, fingerprint=fingerprint, reconnect_s=reconnect_s, prefetch=prefetch,
    )  # fmt: skip


class FeedLoader:
    """An iterator over one rank's `Batch`es, as `Loader`, from a feed. Made by `connect`, which says what the arguments are.

    Arrays may be read-only views of the object store: drop a batch to give the memory back.

    Raises:
        When first used: FeedError (the feed is not there), RefusedError (it does not take this rank), FencedError, RecipeError (the
        sizes do not fit), StateError (of another run), RunnerError (the cluster does not take us). While iterating also what making
        the steps raises: BadRecordError, SourceError, DataChangedError, ReplayError, RunDirectoryError, StorageError, RunnerError.
    """

    def __init__(
        self,
        name: str,
        *,
        address: str | None,
        dp_rank: int,
        dp_world_size: int,
        state: State | None,
        incarnation: str | None,
        stream: StreamName,
        takeover: bool,
        token_file: _Path | None,
        fingerprint: str | None,
        reconnect_s: float,
        prefetch: int,
    ) -> None:
        if stream not in STREAMS:
            raise UserError(f"stream={stream!r}: expected one of {', '.join(STREAMS)}")
        if prefetch < 1:
            raise UserError(f"prefetch={prefetch}: at least one batch has to be fetched")
        self.name, self.dp_rank, self.dp_world_size, self.stream = name, dp_rank, dp_world_size, stream
        self.incarnation = incarnation or _incarnation(dp_world_size)
        parse_incarnation(self.incarnation)
        self._address, self._takeover, self._fingerprint = address, takeover, fingerprint
        self._token = None if token_file is None else Path(token_file).read_text(encoding="utf-8").strip()
        self._reconnect, self._prefetch = reconnect_s, prefetch
        self._bytes = None if state is None else bytes_of(state)
        self._restores = 0
        self._cluster: ray_cluster.Cluster | None = None
        self._opened: Opened | None = None
        self._state: StreamState | None = None
        self._link: Link | None = None
        self._reader: Reader | None = None
        self._closer: weakref.finalize[[int, Reader, ray_cluster.Cluster], FeedLoader] | None = None
        self._closed = False
        self._lock, self._taking = threading.RLock(), threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        if self._opened is not None:
            raise TypeError("a feed's loader in use cannot be pickled: connect there, with state_dict()")
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_taking")}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        vars(self).update(fields)
        self._lock, self._taking = threading.RLock(), threading.Lock()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        with self._lock:
            if self._closed and self._opened is not None:
                raise StopIteration
            reader, _ = self._open()
        with self._taking:  # two threads may take from one loader; each batch goes to one of them
            taken = reader.take()
            if taken is None:
                raise StopIteration
            self._state = taken.state
        return taken.batch

    @property
    def step(self) -> int:
        """The last step that was taken; 0 before the first."""
        return self._place()[0].step

    @cached_property
    def recipe(self) -> Recipe:
        """That the feed was served with."""
        data, _ = read_yaml(self._place()[1].recipe_yaml, f"feed {self.name}")
        return recipe_from_dict(data, "/")

    @property
    def identity(self) -> Identity:
        """Of the stream that it is served with."""
        return self._place()[1].identity

    def state_dict(self) -> dict[str, bytes]:
        """The state after the last batch that was taken, whatever was read ahead: the same on every rank. The feed need not live."""
        state, opened = self._place()
        if self._link is not None and not self._closed:
            self._link.saved(state.step)
        return {STATE_KEY: to_bytes(state, opened.identity)}

    def load_state_dict(self, state: State) -> None:
        """Go on from a state instead, from the next batch on. All ranks of an incarnation have to.

        Raises:
            StateError: it is no state, or (when first used) not one of this run.
        """
        loaded = bytes_of(state)
        place_in(loaded)
        with self._lock:
            if self._opened is not None:
                self._restores += 1
            self._leave()
            self._opened, self._state, self._bytes, self._closed = None, None, loaded, False

    def close(self) -> None:
        """Leave the feed. The state can still be asked for."""
        self._closed = True
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _place(self) -> tuple[StreamState, Opened]:
        with self._lock:
            if self._opened is None or self._state is None:
                self._open()
            assert self._state is not None
            assert self._opened is not None
            return self._state, self._opened

    def _open(self) -> tuple[Reader, Opened]:
        if self._reader is not None and self._opened is not None:
            return self._reader, self._opened
        if self._closed:
            raise UserError("this feed's loader was closed before it was used. Connect again, or give it a state with load_state_dict")
        step, chain = (0, bytes(16)) if self._bytes is None else place_in(self._bytes)
        request = OpenRequest(
            caller=Caller(client=f"{socket.gethostname()}:{os.getpid()}", token=self._token),
            session=uuid.uuid4().hex,
            stream=self.stream, dp_rank=self.dp_rank, dp_world_size=self.dp_world_size, incarnation=self.incarnation,
            restores=self._restores, start_step=step, start_chain=chain, takeover=self._takeover, fingerprint=self._fingerprint,
        )  # fmt: skip
        cluster = ray_cluster.join(self._address)
        link = Link(self.name, request, self._reconnect)
        try:
            opened = link.open(self._bytes)
        except BaseException:
            cluster.leave()
            raise
        size = int(opened.identity.fields["global_batch_size"]) // self.dp_world_size
        rows = self.dp_rank * size, (self.dp_rank + 1) * size
        reader = Reader(link, opened.identity, opened.state, rows, self._prefetch)
        self._link, self._reader, self._opened, self._state = link, reader, opened, opened.state
        self._closer = weakref.finalize(self, _close, os.getpid(), reader, cluster)
        return reader, opened

    def _leave(self) -> None:
        if self._closer is not None:
            self._closer()
        self._reader = self._link = self._closer = None


def _close(pid: int, reader: Reader, cluster: ray_cluster.Cluster) -> None:
    if pid != os.getpid():
        return  # a forked child has neither the thread nor the cluster
    reader.close()
    cluster.leave()


def _incarnation(dp_world_size: int) -> str:
    run_id, count = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if run_id and count:
        if run_id == "none":  # what torchrun calls every run that was given no id
            run_id = f"none@{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
        return f"{run_id}:{count}"
    if dp_world_size > 1:
        raise UserError(
            f"dp_world_size={dp_world_size} needs an incarnation, so that ranks of one start are known from those of another. Start them"
            " with torchrun, or give all of them incarnation='RUN_ID:COUNT', COUNT growing with each restart"
        )
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}:0"
