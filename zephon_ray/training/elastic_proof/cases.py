"""The cases of the proof: ways to resume one checkpoint, each with what has to come out of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from zephon_ray.errors import DifferenceError, RunnerError
from zephon_ray.training.elastic_proof import start
from zephon_ray.training.elastic_proof.jobs import Job, Mesh
from zephon_ray.training.elastic_proof.outcomes import Outcome, compare
from zephon_ray.training.elastic_proof.ranks import RankDied, ask, run_ranks
from zephon_ray.training.elastic_proof.records import TrainedStep, trained
from zephon_ray.training.elastic_proof.reference import Reference
from zephon_ray.training.elastic_proof.setting import BASE, SAVED, Setting

LIMIT_S = 600.0
"""Seconds that a job may take."""

KEY, KIND = "dataloader.zephon_ray", "BytesStorageMetadata"
"""What a checkpoint holds of our loader: one key, and bytes."""

_RAY_TOKEN = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")

_KILLED, _EVERY = 10, 2
_ASYNC_EVERY = 3

Steps = Mapping[int, TrainedStep]


class Cases:
    """Runs cases, one after the other, and keeps what came of them.

    Args:
        setting: of the proof.
        reference: of its recipe.
        say: told in a sentence what is being done.
    """

    def __init__(self, setting: Setting, reference: Reference, say: Callable[[str], None]) -> None:
        self.outcomes: list[Outcome] = []
        self.saved: list[tuple[Path, int]] = []
        self.left_out: list[str] = []
        self._setting, self._reference, self._say = setting, reference, say
        self._resumed: dict[Mesh, Steps] = {}

    def save(self) -> None:
        """From the beginning to the checkpoint that all others are resumed from."""
        job = self._setting.job("saved", BASE, SAVED)
        steps, seconds = self._run(job)
        self._saved = job.checkpoint(SAVED)
        self.saved.append((self._saved, SAVED))
        self._compare("from the beginning", job, steps, range(1, SAVED + 1), seconds, losses=steps)

    def resume_on_all(self) -> None:
        """On other numbers of ranks, with copies of the model, and with tensor parallel peers."""
        sizes = [Mesh(shard=size) for size in self._setting.sizes]
        for mesh in dict.fromkeys([BASE, *sizes, Mesh(replicate=2, shard=2), Mesh(shard=2, tensor=2)]):
            if not self._setting.fits(mesh):
                self.left_out.append(f"{mesh}: {mesh.dp_size} ranks cannot share the rows of a batch")
                continue
            job = self._job(f"resumed-{mesh.replicate}x{mesh.shard}x{mesh.tensor}", mesh)
            if self._setting.short and mesh not in (BASE, Mesh()):
                job = replace(job, steps=SAVED + 2)
            self._resumed[mesh], seconds = self._run(job)
            self._compare("resumed", job, self._resumed[mesh], range(SAVED + 1, job.steps + 1), seconds)

    def change_in_a_chain(self) -> None:
        """On one number of ranks after the other, each from the checkpoint of the one before."""
        load, first = self._saved, SAVED + 1
        chain, ends = self._setting.chain, self._setting.chain_ends()
        for number, (size, end) in enumerate(zip(chain, ends, strict=True)):
            job = replace(self._job(f"chain-{number}-{size}", Mesh(shard=size)), load=load, steps=end)
            steps, seconds = self._run(job)
            self._compare(f"chain {'→'.join(map(str, chain[: number + 1]))}", job, steps, range(first, end + 1), seconds)
            load, first = job.checkpoint(end), end + 1
            self.saved.append((load, end))

    def kill(self) -> None:
        """Ranks killed in the midst of a step, and started again as a launcher does it: the same command line, a count higher."""
        job = replace(self._job("killed", BASE), save_every=_EVERY, killed_at=_KILLED)
        began = time.monotonic()
        try:
            self._run(job)
        except RankDied as death:
            if (death.rank, death.code) != (BASE.ranks - 1, -signal.SIGKILL):
                raise
        else:
            raise RunnerError(f"{job.name}: the rank that was to kill itself in step {_KILLED} ended well")
        before = range(SAVED + 1, _KILLED)
        self._compare(f"killed in step {_KILLED}", job, trained(job), before, time.monotonic() - began, like=BASE)
        again = replace(job, attempt=1)
        steps, seconds = self._run(again)
        last_save = (_KILLED - 1) // _EVERY * _EVERY
        self.saved.append((job.checkpoint(last_save), last_save))
        self._compare("started again", again, steps, range(last_save + 1, self._setting.last + 1), seconds, like=BASE)

    def save_while_training(self) -> None:
        """Checkpoints written by TorchTitan's `async` mode, beside steps that go on; and one of them resumed on other ranks."""
        job = replace(self._job("async", BASE), save_every=_ASYNC_EVERY, save_while_training=True)
        steps, seconds = self._run(job)
        self._compare("saving asynchronously", job, steps, self._span(), seconds, like=BASE)
        step = SAVED // _ASYNC_EVERY * _ASYNC_EVERY + _ASYNC_EVERY
        self.saved.append((job.checkpoint(step), step))
        mesh = Mesh(shard=next(size for size in self._setting.chain if size != BASE.dp_size))
        resumed = replace(self._job("async-resumed", mesh), load=job.checkpoint(step))
        steps, seconds = self._run(resumed)
        self._compare("… resumed from that", resumed, steps, range(step + 1, self._setting.last + 1), seconds)

    def feed(self) -> None:
        """Fed by Ray: a feed that the ranks of this host start for themselves, one that is served to them, and Ray in a single rank."""
        self._fed("the feed of the host", replace(self._job("host-feed", BASE), source="host"))
        self._served(self._job("served-feed", BASE))
        if Mesh() in self._resumed:
            self._fed("embedded Ray", replace(self._job("embedded-ray", Mesh()), source="ray"))

    def _served(self, job: Job) -> None:
        from zephon_ray.feed.service import Order, Service  # Ray is seconds to import

        with Service(None) as service:
            service.start(Order(name="proof", recipe=self._setting.recipe, out=str(job.folder / "run")))
            try:
                token = {name: os.environ[name] for name in _RAY_TOKEN if name in os.environ}  # of a cluster of our own
                self._fed("a served feed", replace(job, source="feed", feed="proof", address=service.address, environment=token))
            finally:
                service.stop("proof", force=True)

    def _fed(self, rows: str, job: Job) -> None:
        steps, seconds = self._run(job)
        self._compare("resumed", job, steps, self._span(), seconds, like=job.mesh, rows=rows)

    def read_checkpoints(self) -> int:
        """Look into all checkpoints that were resumed from: one key, and the bytes of the state after that step.

        Returns:
            The bytes of the last one.

        Raises:
            DifferenceError: one holds something else.
        """
        self._say(f"reading {len(self.saved)} checkpoints")
        found = ask(start.loader_states, [path for path, _ in self.saved], limit_s=LIMIT_S)
        for (path, step), held in zip(self.saved, found, strict=True):
            if (held.keys, held.kinds) != ((KEY,), (KIND,)):
                raise DifferenceError(f"{path}: holds {held.keys} ({held.kinds}) of the loader, and expected was {KEY} ({KIND}) alone")
            if held.value != self._reference.states[step]:
                raise DifferenceError(f"{path}: its state of the loader is not that of a single rank after step {step}")
        return len(found[-1].value)

    def _job(self, name: str, mesh: Mesh) -> Job:
        return self._setting.job(name, mesh, self._setting.last, load=self._saved)

    def _span(self) -> range:
        return range(SAVED + 1, self._setting.last + 1)

    def _run(self, job: Job) -> tuple[Steps, float]:
        self._say(f"{job.name}: {job.mesh}, to step {job.steps}")
        seconds = run_ranks(job, limit_s=LIMIT_S)
        return trained(job), seconds

    def _compare(
        self, title: str, job: Job, steps: Steps, span: range, seconds: float, *, losses: Steps | None = None, like: Mesh | None = None,
        rows: str = "threads",
    ) -> None:  # fmt: skip
        outcome = compare(
            steps, span, self._reference, losses or self._resumed[like or BASE], bitwise=like is not None, title=title,
            ranks=str(job.mesh), rows=rows, seconds=seconds,
        )  # fmt: skip
        self.outcomes.append(outcome)
