"""What clients and the feed say to each other: small values that can be pickled. Rows go through the object store.

Every call carries the version of the protocol, and the token where the feed asks for one. A step's rows lie in *row blocks*: objects
of contiguous rows, the same whatever the number of ranks; a reply names those that hold the rows of the one who asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zephon_ray.feed.blocks import RowBlock
from zephon_ray.state import Identity, StreamState

PROTOCOL = 1
"""Other versions are refused."""

NAMESPACE = "zephon"
"""Of Ray, where feeds are found by name."""

STREAMS = ("train", "validation")
StreamName = Literal["train", "validation"]

POLL_S = 20.0
"""A call waits no longer than this for a step, so that a feed which has died is noticed."""

ALIVE_S = 60.0
"""A rank that has not called for so long counts as gone."""


def actor_name(name: str) -> str:
    """The name of a feed's actor."""
    return f"zephon:{name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who calls.

    Args:
        client: "host:pid", for messages and the audit trail.
        token: what the feed was given as its token; None where it has none.
        protocol: version that the caller speaks.
    """

    client: str
    token: str | None = field(default=None, repr=False)
    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenRequest:
    """A rank wants to read a stream.

    Args:
        caller: who it is.
        session: a new name for it, which nobody can guess; the same when it comes back, so that it is not counted twice.
        stream: which one.
        dp_rank: in [0, dp_world_size).
        dp_world_size: a divisor of the global batch size.
        incarnation: "RUN_ID:COUNT"; COUNT grows with each restart of the same run.
        restores: how often this rank has loaded a state since it connected: ranks agree on where they start once a restore.
        start_step: the step after which it started, 0 for the beginning.
        start_chain: chain of that step, 16 bytes.
        state: bytes of the state after which it goes on; None for the beginning. Where it comes back to a feed that restarted, it is
            further than the start.
        takeover: push ranks of another run out.
        fingerprint: that the run must have; None for any.
    """

    caller: Caller
    session: str = field(repr=False)
    stream: StreamName
    dp_rank: int
    dp_world_size: int
    incarnation: str
    restores: int = 0
    start_step: int = 0
    start_chain: bytes = bytes(16)
    state: bytes | None = field(default=None, repr=False)
    takeover: bool = False
    fingerprint: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """The answer.

    Args:
        generation: from 1, one more whenever a new incarnation takes over.
        identity: of the stream.
        recipe_yaml: of the stream, as resolved.
        state: from which the rank goes on.
    """

    generation: int
    identity: Identity
    recipe_yaml: str
    state: StreamState


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeRequest:
    """A rank asks for its next steps, and says where it is. It calls at least every `POLL_S`, or it counts as gone after `ALIVE_S`.

    Args:
        session: as it was opened.
        taken: the step up to which it has its rows.
        count: steps that it has room for; 0 only says that it lives.
        lost: (step, hex of the reference of a row block) that it was given, and whose rows are gone: the step has to be made again.
        waited_s: seconds that it has waited for steps since it was opened.
    """

    session: str
    taken: int
    count: int
    lost: tuple[int, str] | None = None
    waited_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReply:
    """One step for one rank.

    Args:
        step: from 1.
        digest: of the global batch, 16 bytes.
        chain: 16 bytes.
        pairs: of each source, pairs begun since the run began.
        state: after the step; where it is large, Ray's reference to it.
        blocks: those that hold rows of the rank, in order.
    """

    step: int
    digest: bytes
    chain: bytes
    pairs: tuple[int, ...]
    state: Any
    blocks: tuple[RowBlock, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeReply:
    """Consecutive steps.

    Args:
        steps: none where none was made in time.
        ended: the stream ends with the last of them (or, if there is none, with the step that the rank has already).
    """

    steps: tuple[StepReply, ...] = ()
    ended: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamStatus:
    """How a stream stands.

    Args:
        stream: its name.
        fingerprint: of its run; "" before it was looked at.
        directory: where it is written down.
        generation: of ranks, 0 before the first.
        incarnation: theirs.
        dp_world_size: theirs.
        ranks: how many clients have called within `ALIVE_S`.
        step: the newest that was made, 0 before the first.
        taken_step: the newest that every rank has; where none lives, that they had.
        steps_ahead: made, and not taken by the slowest rank.
        pairs: of each source, begun up to `step`.
        names: of the sources.
        due: of each source, the part of all pairs that its weight gives it while no source has ended, in [0, 1].
        pairs_per_second: next-token pairs made, over about the last minute.
        waited_seconds: that the slowest of the ranks has waited for steps, since the feed started.
        workers: units that can be in the making at a time.
        retries: units made again since their worker died or hung.
        text_bytes: UTF-8 bytes of text tokenised since the feed started.
        units: tokenised since the feed started.
        reopened: how often production was opened again after it failed.
        kept_steps, kept_bytes: steps that can be given again at once, and the size of their rows.
        replays_hot, replays_cold: rewinds that needed no reading, and those that did.
        replay: what the last rewind was: "none", "hot" or "cold".
        ended: the step that the stream ends with; None while that is not known.
        error: why no further step is made; None where all is well.
        waiting: what the stream waits for, in words; None for nothing out of the ordinary.
    """

    stream: StreamName
    fingerprint: str = ""
    directory: str = ""
    generation: int = 0
    incarnation: str = ""
    dp_world_size: int = 0
    ranks: int = 0
    step: int = 0
    taken_step: int = 0
    steps_ahead: int = 0
    pairs: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    due: tuple[float, ...] = ()
    pairs_per_second: float = 0.0
    waited_seconds: float = 0.0
    workers: int = 0
    retries: int = 0
    text_bytes: int = 0
    units: int = 0
    reopened: int = 0
    kept_steps: int = 0
    kept_bytes: int = 0
    replays_hot: int = 0
    replays_cold: int = 0
    replay: Literal["none", "hot", "cold"] = "none"
    ended: int | None = None
    error: str | None = None
    waiting: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedStatus:
    """How a feed stands.

    Args:
        name: of the feed.
        protocol: version that it speaks.
        host, pid: where its actor runs.
        seconds: since it started, or restarted.
        nodes: alive in the cluster.
        streams: by name; "train" always, "validation" where it has one.
    """

    name: str
    protocol: int
    host: str
    pid: int
    seconds: float
    nodes: int
    streams: Mapping[StreamName, StreamStatus]
