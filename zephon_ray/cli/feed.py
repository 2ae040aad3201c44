"""`serve`, `stop` and `status`: feeds started, ended and looked at."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from zephon_ray.cli.render import emit, mixture, number, pairs_of, say, show, size, table
from zephon_ray.cli.run import Stop
from zephon_ray.errors import FeedError, UserError, ZephonError
from zephon_ray.feed.protocol import FeedStatus, StreamStatus
from zephon_ray.feed.service import Order, Service, read_token
from zephon_ray.recipe import load_recipe

QUIET_S = 60.0
"""Between two lines of a feed that is served in the foreground."""

_LOOK_S = 1.0
_LIST_S = 5.0
"""A feed that does not answer within it is listed without its numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The command line of `serve`."""

    recipe: str
    overrides: tuple[str, ...]
    name: str
    out: str
    validation: str | None
    address: str | None
    token_file: str | None
    local_out_ok: bool
    detach: bool
    as_json: bool


def serve(wanted: Wanted) -> int:
    """Start a feed, and stay until it ends or a signal comes, which ends it. Returns the exit code."""
    if wanted.detach and wanted.address is None:
        raise UserError("--detach: without --address the cluster is this command's own and ends with it. Give --address HOST:PORT of one")
    token = read_token(wanted.token_file)
    order = Order(
        name=wanted.name,
        recipe=load_recipe(wanted.recipe, wanted.overrides),
        out=wanted.out,
        validation=None if wanted.validation is None else load_recipe(wanted.validation),
        token=token,
        local_out_ok=wanted.local_out_ok,
    )
    stop = Stop()
    with stop.listening(), Service(wanted.address, token) as service:
        status = service.start(order)
        _introduce(service, status, wanted)
        if wanted.detach:
            return 0
        ours = _stay(service, wanted.name, stop)
        if ours:
            service.stop(wanted.name, force=True)  # who sends a signal means it, whoever reads
        if wanted.as_json:
            emit({"event": "stopped", "name": wanted.name, "by": "signal" if ours else "another"})
        else:
            say(f"zephon-ray: feed {wanted.name} is stopped")
    return 0


def _introduce(service: Service, status: FeedStatus, wanted: Wanted) -> None:
    directories = {name: stream.directory for name, stream in status.streams.items()}
    if wanted.as_json:
        known = {"name": status.name, "address": service.address, "host": status.host, "pid": status.pid, "directories": directories}
        emit({"event": "serving", **known, "detached": wanted.detach})
        return
    token = ", token_file=..." if wanted.token_file else ""
    facts = [
        ("feed", f"{status.name}, process {status.pid} on {status.host}"),
        *(("directory" if name == "train" else name, directory) for name, directory in directories.items()),
        ("ranks", f'zephon_ray.connect("{status.name}", address="{service.address}"{token}, dp_rank=..., dp_world_size=...)'),
    ]
    if wanted.address is None:
        auth = "; RAY_AUTH_MODE=token must be set there" if os.environ.get("RAY_AUTH_MODE") != "disabled" else ""
        facts.append(("cluster", f"started by this command on this machine, and ends with it{auth}"))
    show(pairs_of(facts))


class Troubles:
    """Says what goes wrong: what is new at once, but never more than a line in `QUIET_S`.

    Args:
        tell: is given the line.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._told: str | None = None
        self._until = -math.inf

    def __call__(self, troubles: Sequence[str], now: float) -> None:
        """What goes wrong at a time, in seconds on a clock that never goes back."""
        line = "; ".join(troubles)
        if line and line != self._told and now >= self._until:
            self._tell(line)
            self._until = now + QUIET_S
            self._told = line
        elif not line:
            self._told = None


def _stay(service: Service, name: str, stop: Stop) -> bool:
    """Until a signal comes (True), or the feed is no more (False). What goes wrong meanwhile is told."""
    tell = Troubles(lambda line: say(f"zephon-ray: {line}"))
    while not stop():
        try:
            status = service.status(name)
        except FeedError as error:
            if name not in service.names():
                return False
            troubles = [str(error)]
        else:
            troubles = [f"{s.stream}: {s.error or s.waiting}" for s in status.streams.values() if s.error or s.waiting]
        tell(troubles, time.monotonic())
        time.sleep(_LOOK_S)
    return True


def stop(name: str, address: str | None, token_file: str | None, *, force: bool, as_json: bool) -> int:
    """Stop a feed. Returns the exit code."""
    with Service(_cluster(address), read_token(token_file)) as service:
        service.stop(name, force=force)
    if as_json:
        emit({"stopped": name, "force": force})
    else:
        show(f"feed {name} is stopped")
    return 0


def look(name: str | None, address: str | None, token_file: str | None, *, once: bool, as_json: bool) -> int:
    """List feeds, or show one, again and again on a terminal. Returns the exit code."""
    with Service(_cluster(address), read_token(token_file)) as service:
        if name is None:
            _list(service, as_json=as_json)
        elif as_json:
            emit(service.status(name))
        elif once or not sys.stdout.isatty():
            show(*_status_parts(service.status(name)))
        else:
            _watch(service, name)
    return 0


def _cluster(address: str | None) -> str:
    """Where to look: a cluster that is there already."""
    found = address or os.environ.get("RAY_ADDRESS")
    if not found:
        raise UserError("a feed lives on a Ray cluster, and none is named. Give --address HOST:PORT, or set RAY_ADDRESS")
    return found


def _list(service: Service, *, as_json: bool) -> None:
    found: list[tuple[str, FeedStatus | str]] = []
    for name in service.names():
        try:
            found.append((name, service.status(name, _LIST_S)))
        except ZephonError as error:  # a feed of another version, with a token, or that is starting again
            found.append((name, str(error)))
    if as_json:
        emit([{"name": name, "error": s} if isinstance(s, str) else {"name": name, "status": s} for name, s in found])
    elif not found:
        show(f"no feed at {service.address}")
    else:
        rows = [row for name, status in found for row in _rows(name, status)]
        show(table(("feed", "stream", "step", "ahead", "ranks", "tokens/s", "how it is"), rows, words=(0, 1, 6)))


def _rows(name: str, status: FeedStatus | str) -> list[tuple[str, ...]]:
    if isinstance(status, str):
        return [(name, "", "", "", "", "", status)]
    return [
        (name, s.stream, f"{s.step:,}", f"{s.steps_ahead}", f"{s.ranks}", number(s.pairs_per_second), _health(s))
        for s in status.streams.values()
    ]


def _health(stream: StreamStatus) -> str:
    if stream.error:
        return stream.error
    ended = f"ends with step {stream.ended:,}" if stream.ended is not None else ""
    return stream.waiting or ended or "well"


def _watch(service: Service, name: str) -> None:
    """Until Ctrl-C."""
    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        try:
            while True:
                try:
                    parts: Sequence[Any] = _status_parts(service.status(name))
                except FeedError as error:
                    if name not in service.names():
                        raise
                    parts = [str(error)]
                live.update(Group(*parts), refresh=True)
                time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            return


def _status_parts(status: FeedStatus) -> list[Table]:
    nodes = f"{status.nodes} node{'s' if status.nodes > 1 else ''}"
    head = [("feed", f"{status.name}, process {status.pid} on {status.host}, for {_duration(status.seconds)}; {nodes}")]
    return [pairs_of(head), *(pairs_of(_facts(stream)) for stream in status.streams.values())]


def _facts(s: StreamStatus) -> list[tuple[str, str]]:
    wait = f"; the slowest has waited {_duration(s.waited_seconds)}"
    of = f" of {s.dp_world_size}" if s.dp_world_size else ""
    again = f"; made again {s.retries} times; opened again {s.reopened} times" if s.retries or s.reopened else ""
    facts = [
        (s.stream, _health(s)),
        ("step", f"{s.step:,} made, {s.taken_step:,} taken by every rank: {s.steps_ahead} ahead"),
        ("ranks", f"{s.ranks}{of} in generation {s.generation}{f' ({s.incarnation})' if s.incarnation else ''}{wait}"),
        ("speed", f"{number(s.pairs_per_second)} tokens/s"),
        ("workers", f"{s.workers}; {s.units:,} units, {size(s.text_bytes)} of text read{again}"),
        ("mixture", mixture(s.names, s.pairs, s.due) if s.pairs else ""),
        ("replay", f"{s.replay}; {s.kept_steps:,} steps kept ({size(s.kept_bytes)}); rewinds: {s.replays_hot} hot, {s.replays_cold} cold"),
        ("directory", s.directory),
    ]
    return [(name, value) for name, value in facts if value]


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
