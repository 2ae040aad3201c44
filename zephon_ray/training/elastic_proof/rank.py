"""One rank of a job, in a process of its own: what `torchrun` would start, with the environment that it would give."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from zephon_ray.training.elastic_proof.jobs import Job
from zephon_ray.training.elastic_proof.loaders import loader_of
from zephon_ray.training.elastic_proof.trainer import LIMIT_S, RecordingTrainer, trainer_config


def run_rank(job: Job, rank: int, ports: Any) -> None:
    """Train.

    Args:
        job: all of it.
        rank: of `job.mesh.ranks`.
        ports: a queue: the first rank tells the others where the store for their rendezvous is.
    """
    from torchtitan.tools.logging import init_logger

    _redirect(job.log(rank))
    init_logger()
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.mesh.ranks), "LOCAL_WORLD_SIZE": str(job.mesh.ranks),
        "TORCHELASTIC_RUN_ID": f"{job.folder.parent.name}-{job.name}", "TORCHELASTIC_RESTART_COUNT": str(job.attempt), **job.environment,
    }  # fmt: skip
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)  # as TorchTitan does where it starts torch.distributed
    store = _store(job.mesh.ranks, rank, ports)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=job.mesh.ranks, timeout=timedelta(seconds=LIMIT_S))
    trainer = trainer_config(job, *loader_of(job)).build()
    assert isinstance(trainer, RecordingTrainer)
    trainer.watch(job, rank)
    try:
        trainer.train()
    finally:
        trainer.close()
    torch.distributed.barrier()  # the store is the first rank's: nobody may still need it when that ends
    torch.distributed.destroy_process_group()


def _redirect(log: Path) -> None:
    """All output into a file, that of C++ too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _store(ranks: int, rank: int, ports: Any) -> Any:
    """The store of the rendezvous, at a port that the system chose: two jobs at a time never meet."""
    tcp_store: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]
    wait = timedelta(seconds=LIMIT_S)
    if rank == 0:
        store = tcp_store("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)
        for _ in range(ranks - 1):
            ports.put(store.port)
        return store
    return tcp_store("127.0.0.1", ports.get(timeout=LIMIT_S), is_master=False, timeout=wait)
