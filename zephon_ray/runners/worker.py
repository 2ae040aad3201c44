"""A worker: what makes units one after the other, in a thread or as a process of its own.

`main` is the whole of a worker process. It ends when the process that started it closes the socket or dies, at once and
even inside a unit: it holds nothing that is worth keeping.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import socket
import threading
import traceback
from dataclasses import dataclass, fields, replace

from zephon_ray.cache import Tokeniser, open_tokeniser
from zephon_ray.errors import RunnerError, ZephonError
from zephon_ray.plan.windows import UnitTask
from zephon_ray.runners.base import FailedUnit
from zephon_ray.runners.wire import receive, send
from zephon_ray.stages.tokenise import Options, UnitTokeniser
from zephon_ray.stages.unit import TokenisedUnit

SHELTERED = tuple(
    signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if name in signal.Signals.__members__
)
"""Signals that schedulers and terminals send to all processes of a job. They are for the trainer, which may still need units to save."""
_PARENT_CHECK_MS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """What a unit took.

    Args:
        skipped_bytes: bytes decoded, but not tokenised, on the way to it.
        remade: 1 where the reference made it again, because the fast engine gave other ids.
        cached: 1 where it came from the token cache.
        written: 1 where it was put there.
        corrupt: entries of the token cache that were damaged.
    """

    skipped_bytes: int = 0
    remade: int = 0
    cached: int = 0
    written: int = 0
    corrupt: int = 0


EFFORT = tuple(field.name for field in fields(Effort))


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What a worker did for one task.

    Args:
        unit: the unit, or why there is none.
        effort: what it took.
        retries: how often it was begun again.
    """

    unit: TokenisedUnit | FailedUnit
    effort: Effort
    retries: int = 0


def make(tokeniser: Tokeniser, task: UnitTask) -> Made:
    """Make a unit. Whatever goes wrong belongs to the unit and is raised by whoever needs it."""
    before = _spent(tokeniser)
    unit: TokenisedUnit | FailedUnit
    try:
        unit = tokeniser.tokenise(task)
    except Exception as error:  # noqa: BLE001  raised again where the unit is needed
        source, epoch, group, number = task.key
        unit = FailedUnit(source=source, epoch=epoch, group=group, unit=number, error=error)
    after = _spent(tokeniser)
    effort = Effort(**{name: getattr(after, name) - getattr(before, name) for name in EFFORT})
    return Made(unit=unit, effort=effort)


def _spent(tokeniser: Tokeniser) -> Effort:
    """By all units so far."""
    counters = tokeniser.counters
    effort = Effort(skipped_bytes=counters.skipped_bytes, remade=counters.remade)
    if isinstance(tokeniser, UnitTokeniser):
        return effort
    cache = tokeniser.cache_counters
    return replace(effort, cached=tokeniser.given, written=cache.written, corrupt=cache.corrupt)


def main(fd: int, parent: int) -> None:
    """Serve until the other end closes: first the options, then task after task.

    Args:
        fd: of the socket, inherited.
        parent: id of the process at its other end.
    """
    for number in SHELTERED:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    sock = socket.socket(fileno=fd)
    threading.Thread(target=_end_with, args=(fd, parent), daemon=True).start()
    try:
        _serve(sock)
    except (EOFError, ConnectionError):
        # Nothing is left to be written or told.
        os._exit(0)


def _serve(sock: socket.socket) -> None:
    options: Options = receive(sock)
    try:
        tokeniser = open_tokeniser(options)
    except Exception as error:  # noqa: BLE001  raised by the other end
        send(sock, portable(error))
        return
    send(sock, None)
    while True:
        made = make(tokeniser, receive(sock))
        if isinstance(made.unit, FailedUnit):
            made = replace(made, unit=replace(made.unit, error=portable(made.unit.error)))
        send(sock, made)


def _end_with(fd: int, parent: int) -> None:
    """End this process when the socket's other end is closed or the parent is dead.

    A forked child of the parent may hold the other end too, so that one alone would not tell.
    """
    poll = select.poll()
    poll.register(fd, 0)  # a hang-up is reported unasked
    while not poll.poll(_PARENT_CHECK_MS) and os.getppid() == parent:
        pass
    os._exit(0)


def portable(error: Exception) -> Exception:
    """An error that survives the way to another process, with the trace of one that nobody expected."""
    trace = "".join(traceback.format_exception(error))
    if not isinstance(error, ZephonError):
        error.add_note(f"in a worker process:\n{trace}")
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  our own
    except Exception:  # noqa: BLE001  whatever its class does: the next line names the error itself
        return RunnerError(f"a worker met an error that cannot be passed on as it is:\n{trace}")
    return error
