"""Contracts of TorchTitan's versions: what a loader is told when it is built, and the form in which a trainer wants its batches.

Versions are known by what they have and never by their numbers: TorchTitan's main calls itself older than its releases. Nothing here
imports TorchTitan; what it has is handed in.

    release 0.3.0   seq_len, local_batch_size        ({"input": [b, S], "positions": [b, S]}, labels [b, S])
    main            max_context_length and           the same with flat [b * S] tensors, or
                    num_tokens_per_(micro)batch      one dict of them, "labels" among them, or a TokenizedTrainingMicrobatch

The later of them count the labels that are learnt (`num_valid_tokens`) or mark padding (`padding_mask`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, get_origin

from zephon_ray.errors import UserError
from zephon_ray.training.fit import TrainerSizes
from zephon_ray.training.microbatches import Rows
from zephon_ray.training.torch import as_tensors

IGNORED = -100
_COUNTED = ("num_valid_tokens", "padding_mask")


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a trainer wants a micro-batch.

    Args:
        flat: one dimension, row after row, instead of [b, S].
        one: everything in one mapping, the labels too, instead of (mapping, labels).
        make: what the mapping is given to by name; None where the mapping itself is wanted. Of meaning with `one` only.
        counted: which of "num_valid_tokens" and "padding_mask" it wants besides.
    """

    flat: bool
    one: bool = False
    make: Callable[..., Any] | None = None
    counted: frozenset[str] = frozenset()

    def __call__(self, rows: Rows) -> Any:
        """A micro-batch in this form; int64 tensors."""
        tensors = as_tensors(rows)
        if self.flat:
            tensors = {name: tensor.flatten() for name, tensor in tensors.items()}
        values: dict[str, Any] = {"input": tensors["input"], "positions": tensors["positions"]}
        padding = tensors["labels"] == IGNORED if self.counted else None
        if padding is not None and "num_valid_tokens" in self.counted:
            values["num_valid_tokens"] = padding.numel() - int(padding.sum())
        if padding is not None and "padding_mask" in self.counted:
            values["padding_mask"] = padding
        if not self.one:
            return values, tensors["labels"]
        values["labels"] = tensors["labels"]
        return self.make(**values) if self.make else values


def form_of(built: Mapping[str, object], modules: Mapping[str, ModuleType]) -> Form:
    """The form that the installed TorchTitan wants.

    Args:
        built: what the loader was built with.
        modules: of TorchTitan's `components.data` those that there are, by their last name: "types", "collators".
    """
    if not any(name.startswith("num_tokens_per_") for name in built):
        return Form(flat=False)
    make = getattr(modules.get("types"), "TokenizedTrainingMicrobatch", None)
    collators = modules.get("collators")
    one = make is not None or get_origin(getattr(collators, "TrainerBatch", None)) is dict
    if make is not None:
        counted = frozenset(name for name in _COUNTED if name in getattr(make, "__dataclass_fields__", {}))
    else:
        counted = frozenset(name for name in _COUNTED if name in _named_by(getattr(collators, "TextCollator", None)))
    return Form(flat=True, one=one, make=make, counted=counted)


def _named_by(collator: Any) -> frozenset[str]:
    """The strings in the text of a collator's call: the only place where it tells the keys of the dict that it makes."""
    code = getattr(vars(collator).get("__call__"), "__code__", None) if collator is not None else None
    names: list[object] = []
    for constant in code.co_consts if code is not None else ():
        names += constant if isinstance(constant, tuple) else [constant]
    return frozenset(name for name in names if isinstance(name, str))


def sizes_of(dp_rank: int, dp_world_size: int, built: Mapping[str, object]) -> TrainerSizes:
    """What the trainer has been told to train on.

    Args:
        dp_rank: in [0, dp_world_size).
        dp_world_size: R.
        built: what else the loader was built with.

    Raises:
        UserError: it does not say it, or its micro-batches are no whole rows.
    """
    length = _number(built, "max_context_length", "seq_len")
    tokens = next((value for name, value in built.items() if name.startswith("num_tokens_per_")), None)
    if isinstance(tokens, int):
        if tokens % length:
            raise UserError(f"the trainer takes {tokens} tokens at a time, and its rows have {length}. Give it a multiple of {length}")
        rows = tokens // length
    else:
        rows = _number(built, "local_batch_size")
    return TrainerSizes(dp_rank=dp_rank, dp_world_size=dp_world_size, sequence_length=length, local_batch_size=rows)


def _number(built: Mapping[str, object], *names: str) -> int:
    for name in names:
        value = built.get(name)
        if isinstance(value, int):
            return value
    raise UserError(
        f"this version of TorchTitan builds its loader with {', '.join(sorted(built)) or 'nothing'}, and {' or '.join(names)} is not among"
        " them. This version of zephon_ray does not know it; docs/torchtitan.md says which it does"
    )
