"""Telemetry: what is measured of a process and of a feed, each with its unit. Nothing here decides anything.

What runners count of their work stands in `runners.base.RunnerStats`. `FEED_METRICS` is the one list of what a feed can be watched by;
dashboards are checked against it, and `feed.metrics` sets them.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

_LOOK_S = 1.0

EXPORTED = "ray_"
"""What Ray puts before the name of a metric where it is scraped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """Something that a feed is watched by.

    Args:
        name: ends with what it is counted in; that of a counter also with `_total`.
        kind: "gauge": as it is now; "counter": it only grows, and begins again at 0 with the process.
        unit: what it is counted in.
        description: a sentence.
        tags: what there is one of it for, in order.
    """

    name: str
    kind: Literal["gauge", "counter"]
    unit: str
    description: str
    tags: tuple[str, ...]


def _metric(name: str, unit: str, description: str, *, tag: str | None = None, stream: bool = True) -> Metric:
    tags = ("feed", *(("stream",) if stream else ()), *((tag,) if tag else ()))
    kind: Literal["gauge", "counter"] = "counter" if name.endswith("_total") else "gauge"
    return Metric(name=f"zephon_feed_{name}", kind=kind, unit=unit, description=description, tags=tags)


FEED_METRICS: tuple[Metric, ...] = (
    _metric("up_seconds", "seconds", "Since the feed was started or restarted.", stream=False),
    _metric("cluster_nodes", "nodes", "Nodes of the cluster that are alive.", stream=False),
    _metric("made_steps", "steps", "Newest step that was made."),
    _metric("taken_steps", "steps", "Newest step that every rank has taken."),
    _metric("ahead_steps", "steps", "Steps made and not taken by the slowest rank."),
    _metric("kept_steps", "steps", "Steps that can be given again at once."),
    _metric("kept_bytes", "bytes", "Bytes of the rows of these."),
    _metric("ranks", "ranks", "Ranks that have called within the last minute."),
    _metric("generation", "generation", "Number of the ranks' generation: one more whenever a new incarnation takes over."),
    _metric("workers", "workers", "Units that can be in the making at a time."),
    _metric("failed", "failed", "1 where an error ends the stream, else 0."),
    _metric("pairs_total", "pairs", "Next-token pairs begun, of each source.", tag="source"),
    _metric("waited_seconds_total", "seconds", "Seconds that the slowest rank has waited for steps."),
    _metric("text_bytes_total", "bytes", "Bytes of text that were read and tokenised."),
    _metric("units_total", "units", "Units that were read and tokenised."),
    _metric("retried_units_total", "units", "Units asked for again because their worker died or hung."),
    _metric("reopened_total", "reopened", "How often the making of steps was opened again after it failed."),
    _metric("rewinds_total", "rewinds", "Rewinds: `hot` ones read nothing again, `cold` ones do.", tag="replay"),
)
"""Every metric of a feed. A test holds that each stands on the dashboard, and that the dashboard has no other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process as /proc tells of it.

    Args:
        pid, parent: process ids.
        born: clock ticks after the machine's start; with the pid it names one process for ever.
        cpu_seconds: user and system, of its own.
        waited_seconds: the same, of its children that have ended and that it waited for.
    """

    pid: int
    parent: int
    born: int
    cpu_seconds: float
    waited_seconds: float


QUIET_S = 60.0


class OneAMinute(logging.Filter):
    """Lets one record pass in `QUIET_S`, and with it says how many it held back; errors always pass.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._until, self._held = clock, -math.inf, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record may pass."""
        now = self._clock()
        if now < self._until and record.levelno < logging.ERROR:
            self._held += 1
            return False
        if self._held:
            record.msg, record.args = f"{record.getMessage()} ({self._held} lines since the last one were left out)", ()
        self._until, self._held = now + QUIET_S, 0
        return True


def quieten() -> None:
    """In a process that nobody looks at all the time: warnings and errors of ours to stderr, at most `OneAMinute`. Again does nothing."""
    ours = logging.getLogger(__name__.partition(".")[0])
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handler.addFilter(OneAMinute())
        ours.addHandler(handler)
        ours.propagate = False


def descendants(of: int | None = None) -> list[Process]:
    """The processes that a process, by default this one, started, and theirs, in order of pid. Empty where there is no /proc."""
    found = {process.pid: process for process in _processes()}
    root = os.getpid() if of is None else of
    families = {root}
    size = 0
    while size < len(families):
        size = len(families)
        families |= {process.pid for process in found.values() if process.parent in families}
    return [found[pid] for pid in sorted(families - {root}) if pid in found]


def resident_bytes(pids: Iterable[int]) -> int:
    """Memory of some processes, where pages that several share count once (PSS). Those that are gone, or not ours to look at, are none."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            for line in (Path("/proc") / str(pid) / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
    return total


def born(pid: int) -> int | None:
    """`Process.born` of a process; None where there is none of that number."""
    with suppress(OSError, IndexError):
        return int(_stat(Path("/proc") / str(pid))[19])
    return None


def _stat(process: Path) -> list[str]:
    """Of `man 5 proc_pid_stat`, the fields behind the name, which may hold anything: state is the first of them."""
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _processes() -> Iterator[Process]:
    ticks = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):  # it ended in the meantime
            fields = _stat(entry)
            own, waited = (int(fields[i]) + int(fields[i + 1]) for i in (11, 13))
            yield Process(
                pid=int(entry.name), parent=int(fields[1]), born=int(fields[19]), cpu_seconds=own / ticks, waited_seconds=waited / ticks
            )


class CpuMeter:
    """CPU seconds, user and system, since it was made: of this process and of its descendants, those of Ray too.

    Not every parent waits for its children (Ray's does not), so what one used would be lost with it. Therefore each descendant
    counts by what it had used when it was last seen. What nobody waits for and nobody saw is not counted.
    """

    def __init__(self) -> None:
        self._began = _used(resource.RUSAGE_SELF) + _used(resource.RUSAGE_CHILDREN)
        seen = {(process.pid, process.born): process for process in descendants()}
        self._first, self._last = seen, dict(seen)
        self._looked = time.monotonic()

    def look(self, *, now: bool = False) -> None:
        """See what runs: at most once a second, or `now`."""
        if now or time.monotonic() - self._looked > _LOOK_S:
            self._last |= {(process.pid, process.born): process for process in descendants()}
            self._looked = time.monotonic()

    def seconds(self) -> float:
        """What was used up to now. Ask before workers are ended, or look."""
        self.look(now=True)
        alive = {(process.pid, process.born) for process in descendants()}
        total = _used(resource.RUSAGE_SELF) + _used(resource.RUSAGE_CHILDREN) - self._began
        for key, last in self._last.items():
            first = self._first.get(key, replace(last, cpu_seconds=0.0, waited_seconds=0.0))
            if last.parent == os.getpid() and key not in alive:
                # It is among the children waited for, with all its life and with those it waited for itself, which count below.
                total -= first.cpu_seconds + last.waited_seconds
            else:
                total += last.cpu_seconds - first.cpu_seconds
        return max(0.0, total)


def _used(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime
