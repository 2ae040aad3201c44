"""The service: starts feeds on a Ray cluster, looks at them, and stops them.

A feed is a detached actor: it outlives whoever started it, and Ray starts it again where it died. Its name is looked up in one namespace
of the cluster, so ranks, notebooks and other jobs find it by it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import ray

from zephon_ray.errors import FeedError, RunDirectoryError, UserError, ZephonError
from zephon_ray.feed.feed import Feed, FeedOptions
from zephon_ray.feed.metrics import FeedMetrics
from zephon_ray.feed.production import Production
from zephon_ray.feed.protocol import NAMESPACE, Caller, FeedStatus, StreamName, actor_name
from zephon_ray.ledger import Recorded
from zephon_ray.recipe import Recipe
from zephon_ray.recipe_fields import is_url
from zephon_ray.runners.base import Job
from zephon_ray.runners.ray_cluster import Cluster, connect
from zephon_ray.state import Identity, StreamState
from zephon_ray.storage import is_local

T = TypeVar("T")

READY_S = 120.0
"""How long a feed may take to answer after it was started: its process starts, and manifests are made."""

ASK_S = 20.0
DRAIN_S = 60.0
"""How long a feed may take to write down what it has."""

_CALLS = 10_000
"""At a time: each rank that waits for a step holds one."""
_GONE_S = 20.0
_LOOK_S = 0.1
_HEAD, _A_BIT = "node:__internal_head__", 0.001
"""Of this Ray's head has 1, and no other node any."""
_JOBS_FOLDER = "working_dir_files"
"""Stands in the path of a folder that Ray made for a job, and deletes after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What feed is wanted.

    Args:
        name: it is found by.
        recipe: of the stream that is trained on.
        out: its run's directory, a path or URL; an existing one is continued.
        validation: recipe of the stream that is validated on, in the directory `OUT-validation`; None for none.
        token: that clients must present; None lets all that are in the cluster in.
        local_out_ok: `out` may be a local path though the cluster has several nodes, for it is the same on all.
    """

    name: str
    recipe: Recipe
    out: str
    validation: Recipe | None = None
    token: str | None = None
    local_out_ok: bool = False


class Service:
    """Feeds of one cluster. Close it; feeds go on.

    Args:
        address: "host:port" of the cluster's head; None for a cluster that ends with this process.
        token: presented to feeds.

    Raises:
        UserError, RunnerError: as `ray_cluster.connect`.
    """

    def __init__(self, address: str | None, token: str | None = None) -> None:
        self._cluster: Cluster = connect(address)
        self._caller = Caller(client=f"{socket.gethostname()}:{os.getpid()}", token=token)

    @property
    def address(self) -> str:
        """That others join the cluster with."""
        return str(ray.get_runtime_context().gcs_address)

    def start(self, order: Order) -> FeedStatus:
        """Start a feed, and wait until it has looked at its data.

        It is placed on the head: without the head there is no cluster anyway, and nodes of workers and ranks come and go.

        Raises:
            UserError: there is such a feed, or its name cannot be one.
            RecipeError, SourceError, StorageError: what it is to read cannot be read.
            RunDirectoryError: `out` is a path that other nodes would not see, or cannot be gone on with.
            FeedError: it does not answer.
        """
        _check_name(order.name)
        order = _placed(order, nodes=len(_nodes()))
        if actor_name(order.name) in self._actors():
            raise UserError(
                f"there is a feed {order.name!r} at {self.address}. `zephon-ray status {order.name}` shows it; stop it first, or give"
                " another --name"
            )
        actor = _new_actor(order)
        try:
            status: FeedStatus = self._ask(order.name, actor.ready.remote(self._caller), READY_S)
        except BaseException:
            ray.kill(actor, no_restart=True)
            raise
        return status

    def names(self) -> list[str]:
        """Of the feeds that there are, in order."""
        prefix = actor_name("")
        return sorted(name.removeprefix(prefix) for name in self._actors() if name.startswith(prefix))

    def status(self, name: str, timeout_s: float = ASK_S) -> FeedStatus:
        """How a feed stands.

        Raises:
            FeedError: there is none of the name, or it does not answer.
            RefusedError: it asks for another token, or speaks another version of the protocol.
        """
        status: FeedStatus = self._ask(name, self._actor(name).status.remote(self._caller), timeout_s)
        return status

    def stop(self, name: str, *, force: bool = False) -> None:
        """Stop a feed for good: it makes no further step, writes down what it has, and ends. Its directory can be continued.

        Args:
            name: of the feed.
            force: also where ranks read it, and where it does not answer; what it has not written is then made again when its
                directory is continued.

        Raises:
            FeedError: there is none of the name, or it did not write everything down in time.
            RefusedError: ranks read it, or it asks for another token.
        """
        actor = self._actor(name)
        try:
            self._ask(name, actor.stop.remote(self._caller, force), DRAIN_S)
        except FeedError:
            if not force:
                raise
        ray.kill(actor, no_restart=True)
        until = time.monotonic() + _GONE_S
        while actor_name(name) in self._actors():
            if time.monotonic() > until:
                raise FeedError(f"feed {name!r} was stopped, but Ray still lists it after {_GONE_S:g} s. Look at it in Ray's dashboard")
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Leave the cluster; end it if it is ours."""
        self._cluster.leave()

    def _actors(self) -> set[str]:
        named: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
        return {actor["name"] for actor in named if actor["namespace"] == NAMESPACE}

    def _actor(self, name: str) -> Any:
        try:
            return ray.get_actor(actor_name(name), namespace=NAMESPACE)
        except ValueError as error:
            there = ", ".join(self.names()) or "none"
            raise FeedError(f"there is no feed {name!r} at {self.address} (there: {there}). Start it with `zephon-ray serve`") from error

    def _ask(self, name: str, reply: Any, timeout_s: float) -> Any:
        try:
            return ray.get(reply, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise FeedError(f"feed {name!r} does not answer within {timeout_s:g} s. It may be starting again: ask later") from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ZephonError):
                raise error.cause from None
            raise FeedError(f"feed {name!r} failed: {error.cause!r}") from error
        except ray.exceptions.ActorUnavailableError as error:
            raise FeedError(f"feed {name!r} is away: Ray starts it again where its process died. Ask later") from error
        except ray.exceptions.RayActorError as error:
            raise FeedError(f"feed {name!r} ended: {' '.join(str(error).split())}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_token(path: str | None) -> str | None:
    """The token in a file; None for no file.

    Raises:
        UserError: there is none in it.
        OSError: it cannot be read.
    """
    if path is None:
        return None
    token = Path(path).read_text(encoding="utf-8").strip()
    if not token:
        raise UserError(f"--token-file {path}: is empty. Write a long random word into it, which only feed and ranks can read")
    return token


def _check_name(name: str) -> None:
    if not name or any(c in ":/" or c.isspace() or not c.isprintable() for c in name):
        raise UserError(f"name={name!r}: feeds are named with letters, digits and signs other than ':' and '/', without blanks")


def _placed(order: Order, nodes: int) -> Order:
    """The order with an `out` that means the same everywhere, or an error."""
    if not is_local(order.out):
        return order
    if not is_url(order.out) and not Path(order.out).is_absolute() and _JOBS_FOLDER in Path.cwd().parts:
        raise RunDirectoryError(
            f"--out {order.out}: lies in the folder that Ray has made for this job, and deletes after it. Give a URL or an absolute path"
        )
    if nodes > 1 and not order.local_out_ok:
        raise RunDirectoryError(
            f"--out {order.out}: is a path on one machine, and the cluster has {nodes} nodes; were the feed started again on another, it"
            " would not find its run. Give a URL such as s3://bucket/runs/first, or --local-out-ok if the path is shared by all nodes"
        )
    return order if is_url(order.out) else replace(order, out=str(Path(order.out).absolute()))


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def _on_head() -> dict[str, float] | None:
    """A resource that only the head has, so that an actor that takes of it waits for the head; None where no head says so.

    A soft affinity to the head would not do: for actors that take nothing, Ray 2.60 does not heed it.
    """
    return {_HEAD: _A_BIT} if any(_HEAD in node["Resources"] for node in _nodes()) else None


def _new_actor(order: Order) -> Any:
    options = FeedOptions(
        name=order.name,
        recipes=_streams(order.recipe, order.validation),
        directories=_streams(order.out, f"{order.out.rstrip('/')}-validation" if order.validation else None),
        open_production=_open_production,
        token_sha256=None if order.token is None else hashlib.sha256(order.token.encode()).hexdigest(),
        observe=_observe,
    )
    actor = ray.remote(Feed).options(
        name=actor_name(order.name), namespace=NAMESPACE, lifetime="detached", max_restarts=-1, max_task_retries=0, num_cpus=0,
        max_concurrency=_CALLS, resources=_on_head(), enable_task_events=False,
    )  # fmt: skip
    return actor.remote(options)


def _streams(train: T, validation: T | None) -> dict[StreamName, T]:
    return {"train": train} if validation is None else {"train": train, "validation": validation}


@functools.cache
def _metrics() -> FeedMetrics:
    return FeedMetrics()


def _observe(status: FeedStatus) -> None:
    """In the feed's process."""
    _metrics().show(status)


def _open_production(job: Job, identity: Identity, state: StreamState | None, recorded: Recorded) -> Production:
    """In the feed's process."""
    return Production(job, state, recorded)
