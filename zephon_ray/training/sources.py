"""Sources: where a rank of a trainer gets its batches from. A feed that is served, one that the ranks of this host share, or a runner here.

What it costs to have no feed is refused where it is large: every rank would read and tokenise everything for itself.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from zephon_ray.errors import RecipeError, UserError
from zephon_ray.hashing import canonical_json, sha256_hex
from zephon_ray.loader import Loader
from zephon_ray.recipe import Recipe
from zephon_ray.training.microbatches import RankLoader

if TYPE_CHECKING:
    from zephon_ray.feed.host import HostFeed

_log = logging.getLogger(__name__)

RunnerName = Literal["threads", "processes", "inline", "ray"]
StreamName = Literal["train", "validation"]

_HERE = ("threads", "processes", "inline")
"""Runners that every rank may have in its own process."""

OUT = "outputs/zephon_ray"
"""Below the folder that the trainer was started in: run directories of feeds that the ranks of a host share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """What is wanted.

    Args:
        recipe: of the stream; None for that of the feed.
        feed: name of a feed that is served; None for none.
        address: "host:port" of its cluster's head; None for RAY_ADDRESS.
        runner: without a feed: "threads", "processes" or "inline" in this process, whatever number of ranks does the same; "ray" or
            None for a feed that the ranks of this host share, and for a single rank in its process, on Ray or (None) threads.
        workers: of "threads" or "processes" in this process; None for as many as the recipe allows and the machine has.
        out: run directory of a feed that the ranks of this host share; None for one below `OUT`. A single rank writes none.
        stream: of the feed.
        incarnation: "RUN_ID:COUNT"; None for that of torchrun.
        takeover: push out the ranks of another run.
        token_file: of the feed's token.
        allow_duplicate_work: a runner in every rank may be on several hosts.
    """

    recipe: Recipe | None
    feed: str | None = None
    address: str | None = None
    runner: RunnerName | None = None
    workers: int | None = None
    out: str | None = None
    stream: StreamName = "train"
    incarnation: str | None = None
    takeover: bool = False
    token_file: str | None = None
    allow_duplicate_work: bool = False


def check(options: SourceOptions) -> None:
    """Refuse options that contradict each other, or that are none: an override's come from JSON, which knows no types of ours.

    Opens nothing.

    Raises:
        UserError: they are to be refused.
    """
    for name, wanted in (("runner", RunnerName), ("stream", StreamName)):
        value = getattr(options, name)
        if value is not None and value not in get_args(wanted):
            raise UserError(f"{name}={value!r}: expected one of {', '.join(get_args(wanted))}")
    if options.recipe is None and options.feed is None:
        raise UserError("neither recipe nor feed is given. Give the path of a recipe, or the name of a feed that is served")
    if options.feed is not None:
        _refuse(options, f"feed={options.feed!r} is read", "runner", "workers", "out", "allow_duplicate_work")
    else:
        _refuse(options, "there is no feed", "address", "takeover", "token_file", "incarnation")
    if options.runner in _HERE:
        _refuse(options, f"runner={options.runner!r} shares nothing", "out")
    else:
        _refuse(options, "there is no runner in every rank", "workers", "allow_duplicate_work")


def open_loader(options: SourceOptions, dp_rank: int, dp_world_size: int, state: bytes | None) -> RankLoader:
    """The batches of a rank.

    Args:
        options: checked.
        dp_rank: in [0, dp_world_size).
        dp_world_size: R, a divisor of B.
        state: to go on from; None for the beginning.

    Raises:
        UserError: ranks cannot share work as asked.
        FeedError, RefusedError, StateError, RecipeError, SourceError, StorageError, RunnerError: as the loader or the feed.
    """
    if options.feed is not None:
        return _of_feed(options, options.feed, options.address, options.stream, dp_rank, dp_world_size, state)
    recipe = options.recipe
    assert recipe is not None
    if dp_world_size > 1 and options.runner not in _HERE:
        _check_one_host()
        host = _host_feed(recipe, options.out or default_out(recipe))
        return _of_feed(options, host.name, host.address, "train", dp_rank, dp_world_size, state)
    _check_duplicates(options, dp_world_size)
    return Loader(
        recipe, runner=options.runner or "threads", workers=options.workers, dp_rank=dp_rank, dp_world_size=dp_world_size, state=state
    )  # fmt: skip


def check_same_recipe(ours: Recipe, served: Recipe, feed: str) -> None:
    """Refuse a feed that was served with another recipe than the one that this rank was given.

    Raises:
        RecipeError: fields that differ, with both values.
    """
    here, there = ours.identity(), served.identity()
    differ = [f"{name}={here[name]!r} here, {there[name]!r} there" for name in here if here[name] != there[name]]
    if differ:
        raise RecipeError([f"feed {feed!r} serves another recipe: {'; '.join(differ)}. Give its recipe, or none, or another feed"])


def default_out(recipe: Recipe) -> str:
    """The run directory of a feed that the ranks of a host share: another one for each identity, absolute."""
    return str(Path(OUT, _stem(recipe)).absolute())


def hosts() -> tuple[int, int]:
    """(processes of this job, hosts that they run on), as torchrun or SLURM tells; (1, 1) where neither does."""
    world, local = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    if world and local:
        return int(world), max(1, int(world) // int(local))
    return int(world or os.environ.get("SLURM_NTASKS", "1")), int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))


def _refuse(options: SourceOptions, why: str, *names: str) -> None:
    given = [f"{name}={getattr(options, name)!r}" for name in names if getattr(options, name)]
    if given:
        raise UserError(f"{', '.join(given)}: {why}. Leave it out")


def _of_feed(
    options: SourceOptions, name: str, address: str | None, stream: StreamName, dp_rank: int, dp_world_size: int, state: bytes | None
) -> RankLoader:
    from zephon_ray.feed.client import connect  # Ray is a second to import, and threads do without

    feed = connect(
        name, address=address, dp_rank=dp_rank, dp_world_size=dp_world_size, state=state, incarnation=options.incarnation,
        stream=stream, takeover=options.takeover, token_file=options.token_file,
    )  # fmt: skip
    if options.recipe is not None and options.feed is not None:
        check_same_recipe(options.recipe, feed.recipe, name)
    return feed


def _check_one_host() -> None:
    processes, nodes = hosts()
    if nodes > 1:
        raise UserError(
            f"{processes} ranks are on {nodes} hosts, and only those of one host can share a feed without a cluster. Start a Ray cluster"
            " with all of them, `zephon-ray serve` on it, and give the feed's name and the cluster's address"
        )


def _check_duplicates(options: SourceOptions, dp_world_size: int) -> None:
    processes, nodes = hosts()
    ranks = max(processes, dp_world_size)
    if ranks == 1:
        return
    cost = f"each of {ranks} ranks reads and tokenises the whole stream for itself: {ranks} times the work of a feed"
    if dp_world_size > 1 and nodes > 1 and not options.allow_duplicate_work:
        raise UserError(
            f"runner={options.runner!r} on {nodes} hosts: {cost}. Serve a feed (`zephon-ray serve`) and give its name, or set"
            " allow_duplicate_work"
        )
    _log.warning("runner=%r: %s. Without `runner` the ranks of a host share one", options.runner or "threads", cost)


_host_feeds: dict[tuple[str, str], HostFeed] = {}
"""Those of this process, oldest first. They outlive the loaders: a validator makes a new one for each validation."""


def _host_feed(recipe: Recipe, out: str) -> HostFeed:
    name = _host_feed_name(recipe)
    from zephon_ray.feed.host import HostFeed
    from zephon_ray.feed.service import Order

    if (name, out) not in _host_feeds:
        if not _host_feeds:
            atexit.register(close_host_feeds)
        _host_feeds[name, out] = HostFeed(Order(name=name, recipe=recipe, out=out))
    return _host_feeds[name, out]


def _host_feed_name(recipe: Recipe) -> str:
    """The same for all ranks that one torchrun started, and for no others: its run id need not be unique, its process is."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if not run:
        raise UserError(
            "the ranks of a host find the feed that they share by the torchrun that started them, and this one was not. Start them with"
            " torchrun, or serve a feed (`zephon-ray serve`) and give its name and an incarnation"
        )
    return re.sub(r"[^\w.-]", "_", f"{_stem(recipe)}-{run}-{os.getppid()}")


def _stem(recipe: Recipe) -> str:
    """Other recipes have another one, whatever they are called."""
    return f"{recipe.name}-{sha256_hex(canonical_json(recipe.identity()))[:8]}"


def close_host_feeds() -> None:
    """Be done with the feeds that this process shares, the newest first. Again does nothing."""
    while _host_feeds:
        _host_feeds.popitem()[1].close()
