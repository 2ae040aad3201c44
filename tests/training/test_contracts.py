"""TorchTitan's contracts, old and new: the form of a batch follows from what is installed, not from a version's number.

Main cannot be installed beside a release: small stand-ins of its modules tell what it tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from zephon_ray.errors import UserError
from zephon_ray.training.microbatches import Rows

torch = pytest.importorskip("torch")
from zephon_ray.training.contracts import form_of, sizes_of  # noqa: E402

pytestmark = pytest.mark.xdist_group("torch")

RELEASE = {"seq_len": 4, "local_batch_size": 2, "snapshot_every_n_steps": 7}
MAIN = {"max_context_length": 4, "num_tokens_per_batch": 8}
ROWS = Rows(
    input=np.arange(8).reshape(2, 4), labels=np.array([[1, 2, 3, 4], [5, 6, -100, -100]]), positions=np.array([[0, 1, 2, 3], [0, 1, 0, 1]])
)


@dataclass(kw_only=True)
class TokenizedTrainingMicrobatch:
    input: Any
    labels: Any
    positions: Any
    padding_mask: Any
    num_valid_tokens: int
    model_kwargs: Any = None


class CountingCollator:
    def __call__(self, rows: Any) -> dict[str, Any]:
        return {"input": rows, "labels": rows, "positions": rows, "num_valid_tokens": 0}


class PlainCollator:
    def __call__(self, rows: Any) -> Any:
        return {"input": rows, "positions": rows}, rows


def _module(**names: Any) -> ModuleType:
    module = ModuleType("stand_in")
    vars(module).update(names)
    return module


def test_the_release_gets_rows_by_rows() -> None:
    values, labels = form_of(RELEASE, {})(ROWS)
    assert values.keys() == {"input", "positions"}
    assert values["input"].tolist() == ROWS.input.tolist()
    assert values["positions"].tolist() == ROWS.positions.tolist()
    assert labels.tolist() == ROWS.labels.tolist()
    assert {tensor.dtype for tensor in (*values.values(), labels)} == {torch.int64}


@pytest.mark.parametrize("name", ["num_tokens_per_batch", "num_tokens_per_microbatch"])
def test_main_gets_one_flat_row_after_the_other(name: str) -> None:
    built = {"max_context_length": 4, name: 8}
    collators = _module(TrainerBatch=tuple[dict[str, Any], torch.Tensor], TextCollator=PlainCollator)
    values, labels = form_of(built, {"collators": collators, "types": _module()})(ROWS)
    assert values.keys() == {"input", "positions"}
    assert values["input"].tolist() == list(range(8))
    assert values["positions"].tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert labels.tolist() == [1, 2, 3, 4, 5, 6, -100, -100]


def test_main_with_one_dict_gets_labels_and_their_number_in_it() -> None:
    collators = _module(TrainerBatch=dict[str, Any], TextCollator=CountingCollator)
    values = form_of(MAIN, {"collators": collators})(ROWS)
    assert values.keys() == {"input", "labels", "positions", "num_valid_tokens"}
    assert values["num_valid_tokens"] == 6
    assert values["labels"].shape == (8,)


def test_main_with_a_class_for_micro_batches_gets_one() -> None:
    batch = form_of(MAIN, {"types": _module(TokenizedTrainingMicrobatch=TokenizedTrainingMicrobatch)})(ROWS)
    assert isinstance(batch, TokenizedTrainingMicrobatch)
    assert batch.input.shape == batch.labels.shape == batch.positions.shape == (8,)
    assert batch.num_valid_tokens == 6
    assert batch.padding_mask.tolist() == [False] * 6 + [True] * 2


def test_sizes_are_read_from_either_contract() -> None:
    for built in (RELEASE, MAIN, RELEASE | MAIN):
        sizes = sizes_of(1, 2, built)
        assert (sizes.sequence_length, sizes.local_batch_size, sizes.dp_rank, sizes.dp_world_size) == (4, 2, 1, 2)


def test_micro_batches_of_broken_rows_and_unknown_contracts_are_refused() -> None:
    with pytest.raises(UserError, match="9 tokens at a time, and its rows have 4"):
        sizes_of(0, 1, MAIN | {"num_tokens_per_batch": 9})
    with pytest.raises(UserError, match="builds its loader with window, and max_context_length or seq_len is not among them"):
        sizes_of(0, 1, {"window": 4})
