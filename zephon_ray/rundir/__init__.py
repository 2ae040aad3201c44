"""A run's directory: everything of a run that must outlive its processes, under any storage URL.

recipe.lock.yaml   the recipe as resolved, the fingerprint and what it is made of, versions (`lock`)
manifests/         one JSON file a source
ledger/            what every step was (`zephon_ray.ledger`)
states/            where the run can be taken up again (`states`)
readers.json       which ranks read its feed (`readers`)
audit.jsonl        who did what, and when; on object storage the folder audit/ (`audit`)
"""

from __future__ import annotations

from zephon_ray.rundir.directory import RunDirectory
from zephon_ray.rundir.lock import Lock
from zephon_ray.rundir.readers import Readers
from zephon_ray.rundir.states import STATE_EVERY, States
from zephon_ray.rundir.writer import RunWriter, recorded_since

__all__ = ["STATE_EVERY", "Lock", "Readers", "RunDirectory", "RunWriter", "States", "recorded_since"]
