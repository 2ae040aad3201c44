"""How a rank's process begins: a name for it that can be sent without importing torch here."""

from __future__ import annotations

from typing import Any

from zephon_ray.training.elastic_proof.jobs import Job


def start(job: Job, rank: int, ports: Any) -> None:
    """Be that rank (`rank.run_rank`)."""
    from zephon_ray.training.elastic_proof.rank import run_rank

    run_rank(job, rank, ports)
