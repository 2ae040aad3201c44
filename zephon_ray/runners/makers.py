"""Makers: what makes a worker's units, one at a time, in its thread or in a process behind it.

A process is started when it is first needed. Where it dies its unit is made again in a new one, which changes nothing but
time; a unit that kills every process that tries it is an error that names it. A maker belongs to one thread; only
`interrupt` may come from another.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from zephon_ray.cache import Tokeniser, open_tokeniser
from zephon_ray.errors import RunnerError
from zephon_ray.plan.windows import UnitTask
from zephon_ray.runners.base import name_of
from zephon_ray.runners.wire import receive, send
from zephon_ray.runners.worker import SHELTERED, Made, make
from zephon_ray.stages.tokenise import Options

MAX_DEATHS = 3
"""So many processes may die of one unit, or while they start."""
_REAP_S = 10.0


class Interrupted(Exception):
    """`interrupt` was called."""


class InThread:
    """Makes units in the thread that asks."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._tokeniser: Tokeniser | None = None

    def make(self, task: UnitTask) -> Made:
        self._tokeniser = self._tokeniser or open_tokeniser(self._options)
        return make(self._tokeniser, task)

    def interrupt(self) -> None:
        """Nothing can stop a thread; it ends after the unit in hand."""

    def close(self) -> None:
        if self._tokeniser:
            self._tokeniser.close()


class InChild:
    """Makes units in a process of its own."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._interrupted = False

    def make(self, task: UnitTask) -> Made:
        """Make a unit, in a new process if need be.

        Raises:
            RunnerError: processes go on dying.
            Interrupted: `interrupt` was called.
        """
        deaths = 0
        while True:
            sock = self._ready()
            try:
                send(sock, task)
                made: Made = receive(sock)
            except (EOFError, OSError):
                deaths += 1
                how = self._bury()
            else:
                return replace(made, retries=deaths)
            if self._interrupted:
                raise Interrupted
            if deaths == MAX_DEATHS:
                raise RunnerError(
                    f"{name_of(task)}: {deaths} worker processes died of it, the last one {how}."
                    " If memory ran out, use fewer workers (execution.workers.max) or a smaller unit_bytes; else look at the shard"
                )

    def interrupt(self) -> None:
        """End what is being made, from any thread. The maker is of no use afterwards."""
        # The flag first: whoever starts a process looks at it after the socket is there.
        self._interrupted = True
        sock = self._sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._process is not None:
            self._bury()

    def _ready(self) -> socket.socket:
        """The socket of a process that has loaded the tokenizer."""
        if self._process is not None and self._process.poll() is not None:
            self._bury()  # it died between two units, of neither
        deaths = 0
        while self._sock is None:
            self._start()
            assert self._sock is not None
            try:
                send(self._sock, self._options)
                error: Exception | None = receive(self._sock)
            except (EOFError, OSError):
                deaths += 1
                how = self._bury()
            else:
                if error is not None:
                    self._bury()
                    raise error
                break
            if self._interrupted:
                raise Interrupted
            if deaths == MAX_DEATHS:
                raise RunnerError(
                    f"{deaths} worker processes died while they started, the last one {how}. Look at what they wrote to stderr,"
                    " or use another runner: --set execution.runner=threads"
                )
        return self._sock

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(None)  # whatever `socket.setdefaulttimeout` says
        with theirs:
            # Not multiprocessing: its spawn runs the user's script again, and a fork copies locks that other threads hold.
            code = f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}"
            code += f"; from zephon_ray.runners.worker import main; main({theirs.fileno()}, {os.getpid()})"
            try:
                with _sheltered():
                    self._process = subprocess.Popen(
                        [sys.executable, "-c", code],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        pass_fds=(theirs.fileno(),),
                        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                    )
            except OSError as error:
                ours.close()
                raise RunnerError(
                    f"a worker process cannot be started with {sys.executable!r}: {error}."
                    " Use fewer workers (execution.workers.max), or another runner: --set execution.runner=threads"
                ) from error
        self._sock = ours
        if self._interrupted:
            self._bury()
            raise Interrupted

    def _bury(self) -> str:
        """End the process, whatever it does. Returns how it ended."""
        process, sock = self._process, self._sock
        assert process is not None
        assert sock is not None
        self._process = self._sock = None
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)  # one that died of itself tells of what
        sock.close()
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_S)
        code = process.returncode
        return f"of signal {-code} ({signal.strsignal(-code)})" if code is not None and code < 0 else f"with exit code {code}"


Maker = InThread | InChild


@contextmanager
def _sheltered() -> Iterator[None]:
    """Block signals in this thread. A process that is started inherits that, so there is no moment at which they could end it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SHELTERED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
