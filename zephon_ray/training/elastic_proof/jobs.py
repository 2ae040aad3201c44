"""A job: one start of TorchTitan's trainer on so many ranks of this machine. Values only; ranks are sent them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Source = Literal["threads", "ray", "host", "feed", "stock"]
"""Where ranks have their rows from: a runner of that name in each rank; the feed of the host; a feed that is there; TorchTitan's loader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """How ranks are laid out.

    Args:
        replicate: copies of the model (DDP; HSDP where `shard` is more than 1 too).
        shard: ranks that a copy is spread over (FSDP).
        tensor: ranks that share a data-parallel rank, each with a part of every layer (TP).
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def dp_size(self) -> int:
        return self.replicate * self.shard

    @property
    def ranks(self) -> int:
        return self.dp_size * self.tensor

    def __str__(self) -> str:
        data = (
            f"FSDP {self.shard}"
            if self.replicate == 1
            else f"DDP {self.replicate}"
            if self.shard == 1
            else f"HSDP {self.replicate}×{self.shard}"
        )
        return data if self.tensor == 1 else f"{data} · TP {self.tensor}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What the trainer is to do.

    Args:
        name: of the job, part of a file's name.
        folder: of its records, logs and checkpoints.
        recipe: path of the recipe that its data is made by.
        tokenizer: folder with that recipe's tokenizer.json.
        vocabulary: ids of that tokenizer.
        sequence_length: next-token pairs in a row.
        global_batch_size: rows of a step.
        local_batch_size: rows of a micro-batch; a divisor of global_batch_size / dp_size.
        mesh: of its ranks.
        steps: the last step, from 1.
        save_every: steps between checkpoints; None for the last step's only.
        load: a checkpoint to start from; None to start anew. A checkpoint of its own folder goes first, as after a fault.
        skip_data_state: leave the loader's state in the checkpoint unread: data starts anew.
        save_while_training: write checkpoints beside the steps that follow.
        source: of rows.
        texts: JSON lines with the field `text`, for the source "stock".
        feed: name of the feed, for the source "feed".
        address: of its cluster.
        killed_at: the last rank kills itself in the midst of this step, in the first attempt.
        attempt: from 0; restarts count up.
        width: of the model.
        learning_rate: of AdamW, the same in all steps.
    """

    name: str
    folder: Path
    recipe: Path
    tokenizer: Path
    vocabulary: int
    sequence_length: int
    global_batch_size: int
    local_batch_size: int
    mesh: Mesh
    steps: int
    save_every: int | None = None
    load: Path | None = None
    skip_data_state: bool = False
    save_while_training: bool = False
    source: Source = "threads"
    texts: Path | None = None
    feed: str | None = None
    address: str | None = None
    killed_at: int | None = None
    attempt: int = 0
    width: int = 32
    learning_rate: float = 1e-2

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint after a step lies."""
        return self.folder / "checkpoint" / f"step-{step}"

    def log(self, rank: int) -> Path:
        """Where a rank writes what it has to say."""
        return self.folder / "logs" / f"attempt-{self.attempt}-rank-{rank}.log"

    def record(self, rank: int) -> Path:
        """Where a rank writes what it trained on."""
        return self.folder / "records" / f"attempt-{self.attempt}-rank-{rank}.jsonl"
