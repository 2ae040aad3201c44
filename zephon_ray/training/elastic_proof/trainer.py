"""TorchTitan's trainer, writing down what it is given: the digest of each row that reaches the model, and the loss of each step.

Importing this module installs what lets it train on the CPU. It is for the processes of ranks only.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from zephon_ray.hashing import digest128
from zephon_ray.training.elastic_proof import cpu
from zephon_ray.training.elastic_proof.jobs import Job
from zephon_ray.training.elastic_proof.model import tiny_llama

cpu.install()

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.config import CommConfig, DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.override import OverrideConfig  # noqa: E402
from torchtitan.tools.logging import logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

LIMIT_S = 120
"""How long a rank waits for the others in a collective."""


class LossKeeper(MetricsProcessor):
    """TorchTitan's metrics, of which the last loss is kept."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    loss = float("nan")

    def log(self, step: int, global_avg_loss: float, *args: Any, **options: Any) -> None:
        self.loss = global_avg_loss
        super().log(step, global_avg_loss, *args, **options)


class RecordingTrainer(Trainer):
    """The trainer as it is, with a line for each step: which rows, and what loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def watch(self, job: Job, rank: int) -> None:
        """Write down from now on.

        Args:
            job: says where, and whether this rank is to die.
            rank: of all ranks, from 0.
        """
        self._rows: list[bytes] = []
        self._killed_at = job.killed_at if job.attempt == 0 and rank == job.mesh.ranks - 1 else None
        path = job.record(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._record = path.open("w", encoding="utf-8")
        mesh = self.parallel_dims.get_mesh("batch") if self.parallel_dims.dp_enabled else None
        self._dp_rank = mesh.get_local_rank() if mesh else 0

    def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: Any) -> Any:
        self._rows += digests_of(input_dict["input"], labels, input_dict["positions"])
        if self.step == self._killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward_backward_step(input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens)

    def train_step(self, data_iterator: Any) -> None:
        self._rows.clear()
        super().train_step(data_iterator)
        line = {"step": self.step, "dp_rank": self._dp_rank, "loss": self.metrics_processor.loss, "rows": [d.hex() for d in self._rows]}
        self._record.write(json.dumps(line) + "\n")
        self._record.flush()  # a rank that is killed leaves the steps that it has done

    def close(self) -> None:
        super().close()
        self._record.close()
        logger.info("this rank took %.2f s of CPU time", time.process_time())


def digests_of(inputs_bT: Any, labels_bT: Any, positions_bT: Any) -> list[bytes]:
    """Digests of rows, 16 bytes each, of the contract's row arrays again, from what the model is given.

    Args:
        inputs_bT: int64 tensor [micro-batch, T].
        labels_bT: likewise.
        positions_bT: likewise.

    Raises:
        OverflowError: a value does not fit the contract's 32 bits.
    """
    kinds = ((inputs_bT, np.uint32), (labels_bT, np.int32), (positions_bT, np.int32))
    rows: list[list[Any]] = []
    for tensor, kind in kinds:
        wide = tensor.cpu().numpy()
        narrow = wide.astype(kind)
        if not np.array_equal(narrow, wide):
            raise OverflowError(f"the trainer was given values that are no {np.dtype(kind).name}: {wide.min()} to {wide.max()}")
        rows.append(list(narrow))
    return [digest128(b"".join(array.astype(array.dtype.newbyteorder("<")).tobytes() for array in row)) for row in zip(*rows, strict=True)]


def trainer_config(job: Job, dataloader: Any, overrides: list[Any]) -> Any:
    """The whole configuration of a job's trainer.

    Args:
        job: of the trainer.
        dataloader: configuration of a loader.
        overrides: as `--override.imports` takes them.
    """
    mesh, size = job.mesh, job.global_batch_size
    return RecordingTrainer.Config(
        model_spec=tiny_llama(job.vocabulary, job.width),
        hf_assets_path=str(job.tokenizer),
        dump_folder=str(job.folder),
        dataloader=dataloader,
        override=OverrideConfig(imports=overrides),
        loss=CrossEntropyLoss.Config(global_vocab_size=job.vocabulary),
        optimizer=default_adamw(lr=job.learning_rate),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=job.local_batch_size, global_batch_size=size, seq_len=job.sequence_length, steps=job.steps,
            disable_cuda_graphs=True, mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=mesh.replicate, data_parallel_shard_degree=mesh.shard, tensor_parallel_degree=mesh.tensor,
            spmd_backend="partial_dtensor",
        ),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=job.save_every or job.steps, last_save_model_only=False, keep_latest_k=0,
            initial_load_path=str(job.load) if job.load else None, initial_load_model_only=False,
            exclude_from_loading=["dataloader"] if job.skip_data_state else [],
            async_mode="async" if job.save_while_training else "disabled",
        ),
        metrics=LossKeeper.Config(log_freq=1, disable_color_printing=True),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0),
        comm=CommConfig(init_timeout_seconds=LIMIT_S, train_timeout_seconds=LIMIT_S, trace_buf_size=0),
    )  # fmt: skip
