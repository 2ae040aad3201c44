"""What TorchTitan's checkpoints hold of the loader. It is asked of a process that has imported torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed.checkpoint as dcp

PREFIX = "dataloader."


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """A loader's part of a checkpoint.

    Args:
        keys: all of it, as they stand in the checkpoint's metadata.
        kinds: what the metadata says of them: names of classes.
        value: of the first key.
    """

    keys: tuple[str, ...]
    kinds: tuple[str, ...]
    value: object


def loader_states(checkpoints: Sequence[Path]) -> list[LoaderState]:
    """Of each checkpoint, what it holds of the loader."""
    return [_loader_state(checkpoint) for checkpoint in checkpoints]


def _loader_state(checkpoint: Path) -> LoaderState:
    metadata = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    keys = tuple(sorted(key for key in metadata if key.startswith(PREFIX)))
    wanted: dict[str, object] = {keys[0]: b""} if keys else {}
    dcp.load(wanted, checkpoint_id=checkpoint, no_dist=True)
    kinds = tuple(type(metadata[key]).__name__ for key in keys)
    return LoaderState(keys=keys, kinds=kinds, value=wanted[keys[0]] if keys else None)
