"""Fresh processes: one measurement each, with the memory of everything that it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zephon_ray.errors import RunnerError, UserError
from zephon_ray.telemetry import descendants, resident_bytes

LOOK_S = 0.5
_SHOWN = 1500
_ENV = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}
"""One thread a worker, for everybody: CPU seconds are compared, and the parallelism of libraries only adds to them. Nothing is fetched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a process measured.

    Args:
        result: what it said, as JSON.
        peak_pss_mb: the most memory that it and its descendants held together, in MB of 10^6 bytes.
    """

    result: dict[str, Any]
    peak_pss_mb: float


def measure(what: str, arguments: dict[str, Any], limit_s: float) -> Measured:
    """Have a fresh process measure something.

    Args:
        what: name of a measurement of `child`.
        arguments: of it, as JSON.
        limit_s: seconds that it may take.

    Raises:
        UserError: the recipe cannot be measured so.
        RunnerError: it failed, or did not end in time.
    """
    code = f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}; from zephon_ray.benchmark.child import main; main(sys.argv[1])"
    with tempfile.TemporaryDirectory(prefix="zephon-bench-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(answer)], stdin=subprocess.PIPE, stdout=out, stderr=out, env={**os.environ, **_ENV},
            )  # fmt: skip
        assert process.stdin is not None
        with _Watcher(process, limit_s) as watcher, suppress(BrokenPipeError):
            process.stdin.write(json.dumps({"what": what, "spawned": time.time(), "arguments": arguments}).encode())
            process.stdin.close()
            process.wait()
        if not answer.exists():
            why = f"took more than {limit_s:.0f} s" if watcher.late else f"ended with {process.returncode}"
            raise RunnerError(f"the measurement {what!r} {why}: {log.read_bytes()[-_SHOWN:].decode(errors='replace').strip()}")
        result = json.loads(answer.read_text())
    if "error" in result:
        raise (UserError if result["is_users"] else RunnerError)(result["error"])
    return Measured(result=result, peak_pss_mb=watcher.peak / 1e6)


class _Watcher:
    """Looks at a process and its descendants again and again, and ends all of them when it is late, or when its context is left."""

    def __init__(self, process: subprocess.Popen[bytes], limit_s: float) -> None:
        self._process, self._limit_s = process, limit_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="zephon-bench-watcher", daemon=True)
        self.peak, self.late = 0, False

    def __enter__(self) -> _Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._end()

    def _watch(self) -> None:
        began = time.monotonic()
        while not self._over.wait(LOOK_S):
            pids = [self._process.pid, *(process.pid for process in descendants(self._process.pid))]
            self.peak = max(self.peak, resident_bytes(pids))
            if time.monotonic() - began > self._limit_s:
                self.late = True
                self._end()
                return

    def _end(self) -> None:
        below = descendants(self._process.pid)
        if self._process.poll() is None:
            self._process.kill()
        for process in below:
            with suppress(ProcessLookupError):
                os.kill(process.pid, 9)
