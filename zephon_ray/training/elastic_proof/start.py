"""How processes of the proof begin: functions that can be named without importing torch. What they call has been imported where they run."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zephon_ray.training.elastic_proof.jobs import Job


def rank(job: Job, number: int, ports: Any) -> None:
    """Be a rank of a job."""
    from zephon_ray.training.elastic_proof.rank import run_rank

    try:
        run_rank(job, number, ports)
    finally:
        atexit._run_exitfuncs()  # a forked process ends without, and a rank that torchrun started does not


def loader_states(answer: Any, checkpoints: Sequence[Path]) -> None:
    """Send what checkpoints hold of the loader."""
    from zephon_ray.training.elastic_proof import checkpoints as module

    answer.send(module.loader_states(checkpoints))
