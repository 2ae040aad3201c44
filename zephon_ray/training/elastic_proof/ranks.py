"""The ranks of a job as processes: started, watched, ended.

They are forked from one process that has imported torch and TorchTitan and does nothing else, so that each is there in no time and
shares that memory. It starts no thread of its own, opens no connection and never uses Ray, so that a fork of it is whole.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from zephon_ray.errors import RunnerError
from zephon_ray.training.elastic_proof.jobs import Job

_LOG_LINES = 25


def run_ranks(job: Job, *, limit_s: float) -> float:
    """Run all ranks of a job to their end.

    Args:
        job: what they do.
        limit_s: seconds that they may take.

    Returns:
        Seconds that they took.

    Raises:
        RankDied: one ended as no rank should; the others were ended then.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks are as many as cores, or more
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["zephon_ray.training.elastic_proof.rank"])
    from zephon_ray.training.elastic_proof.started import start

    ports = context.Queue()
    began = time.monotonic()
    ranks = [context.Process(target=start, args=(job, rank, ports), daemon=True) for rank in range(job.mesh.ranks)]
    try:
        for rank in ranks:
            rank.start()
        _wait(job, ranks, began + limit_s)
    finally:
        _end(ranks)
        ports.close()
    return time.monotonic() - began


class RankDied(RunnerError):
    """A rank ended as no rank should."""


def _wait(job: Job, ranks: list[ForkServerProcess], until: float) -> None:
    running = dict(enumerate(ranks))
    while running:
        left = until - time.monotonic()
        if left <= 0 or not multiprocessing.connection.wait([rank.sentinel for rank in running.values()], timeout=left):
            raise RankDied(f"{job.name}: ranks {sorted(running)} did not end in time.{_tail(job.log(min(running)))}")
        for number in [number for number, rank in running.items() if rank.exitcode is not None]:
            code = running.pop(number).exitcode
            if code:
                raise RankDied(f"{job.name}: rank {number} ended with {code}.{_tail(job.log(number))}")


def _end(ranks: list[ForkServerProcess]) -> None:
    for rank in ranks:
        if rank.pid is not None:
            rank.kill()
            rank.join()
            rank.close()


def _tail(log: Path) -> str:
    if not log.exists():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    return f" The end of {log}:\n" + "\n".join(f"    {line}" for line in lines)
