"""How processes of the proof begin: functions that can be named without importing torch, which has been imported where they run."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zephon_ray.training.elastic_proof.jobs import Job


def rank(job: Job, number: int, ports: Any) -> None:
    """Be a rank of a job."""
    from zephon_ray.training.elastic_proof.rank import run_rank

    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run_rank(job, number, ports)
    finally:
        atexit._run_exitfuncs()  # a forked process ends without, and a rank that torchrun started does not


def loader_states(answer: Any, checkpoints: Sequence[Path]) -> None:
    """Send what checkpoints hold of the loader."""
    from zephon_ray.training.elastic_proof import checkpoints as module

    answer.send(module.loader_states(checkpoints))


def _end_with_parent() -> None:
    """A rank must not train on when who started it was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
