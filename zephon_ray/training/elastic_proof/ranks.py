"""The ranks of a job as processes: started, watched, ended.

They are forked from one process that has imported torch and TorchTitan and does nothing else, so that each is there in no time and
shares that memory. It starts no thread of its own, opens no connection and never uses Ray, so that a fork of it is whole.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from zephon_ray.errors import RunnerError
from zephon_ray.training.elastic_proof import start
from zephon_ray.training.elastic_proof.jobs import Job

_LOG_LINES = 25
_IMPORTS = ["zephon_ray.training.elastic_proof.preload"]


class RankDied(RunnerError):
    """A rank ended as no rank should, or not at all.

    Args:
        message: which, how, and the end of its log.
        rank: of the job.
        code: its exit code, negative for a signal; None for one that did not end in time.
    """

    def __init__(self, message: str, rank: int, code: int | None) -> None:
        super().__init__(message)
        self.rank, self.code = rank, code


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
    context = _context()
    ports = context.Queue()
    began = time.monotonic()
    ranks = [context.Process(target=start.rank, args=(job, rank, ports)) for rank in range(job.mesh.ranks)]
    try:
        for rank in ranks:
            rank.start()
        _wait(job, ranks, began + limit_s)
    finally:
        _end(ranks)
        ports.close()
    return time.monotonic() - began


def ask(function: Callable[..., Any], *args: object, limit_s: float) -> Any:
    """What a function of `start` gives, in a process of its own that has imported torch.

    Raises:
        RunnerError: it failed, or took too long.
    """
    context = _context()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(there, *args))
    process.start()
    there.close()
    try:
        if not here.poll(limit_s):
            raise RunnerError(f"{function.__name__} did not answer within {limit_s:g} s")
        return here.recv()
    except EOFError as error:
        raise RunnerError(f"{function.__name__} failed: its error stands above") from error
    finally:
        _end([process])
        here.close()


def _context() -> ForkServerContext:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks are as many as cores, or more
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTS)
    return context


def _wait(job: Job, ranks: list[ForkServerProcess], until: float) -> None:
    running = dict(enumerate(ranks))
    while running:
        left = until - time.monotonic()
        if left <= 0 or not multiprocessing.connection.wait([rank.sentinel for rank in running.values()], timeout=left):
            first = min(running)
            raise RankDied(f"{job.name}: ranks {sorted(running)} did not end in time.{_tail(job.log(first))}", first, None)
        for number in [number for number, rank in running.items() if rank.exitcode is not None]:
            code = running.pop(number).exitcode
            if code:
                raise RankDied(f"{job.name}: rank {number} ended with {code}.{_tail(job.log(number))}", number, code)


def _end(processes: list[ForkServerProcess]) -> None:
    for process in processes:
        if process.pid is not None:
            process.kill()
            process.join()
            process.close()


def _tail(log: Path) -> str:
    if not log.exists():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    return f" The end of {log}:\n" + "\n".join(f"    {line}" for line in lines)
