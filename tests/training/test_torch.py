"""PyTorch loops: a dataset of a rank's tensors that any loop can iterate, save and resume."""

from __future__ import annotations

import pytest

from tests.training.loops import LENGTH, corpus, digests_of, folded, row_digests
from zephon_ray.errors import RecipeError, StateError, UserError
from zephon_ray.loader import Loader
from zephon_ray.recipe import Recipe

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

from zephon_ray.training.torch import RankDataset  # noqa: E402

pytestmark = pytest.mark.xdist_group("torch")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return corpus(tmp_path_factory.mktemp("corpus"))


def _loop(dataset: RankDataset) -> DataLoader[dict[str, torch.Tensor]]:
    return DataLoader(dataset, batch_size=None, num_workers=0)


def _rows(batch: dict[str, torch.Tensor]) -> list[bytes]:
    return row_digests(batch["input"], batch["labels"], batch["positions"])


def test_a_dataloader_without_workers_gives_a_ranks_rows_as_int64_tensors(recipe: Recipe) -> None:
    halves = [_loop(RankDataset(Loader(recipe, dp_rank=rank, dp_world_size=2), local_batch_size=2)) for rank in range(2)]
    for expected, (first, second) in zip(digests_of(recipe), zip(*halves, strict=True), strict=False):
        assert first.keys() == {"input", "labels", "positions"}
        assert {(tensor.dtype, tensor.shape) for tensor in first.values()} == {(torch.int64, (2, LENGTH))}
        assert folded(_rows(first) + _rows(second)) == expected


def test_a_loop_is_resumed_in_the_middle_of_an_epoch_of_its_own_and_at_another_size(recipe: Recipe) -> None:
    dataset = RankDataset(Loader(recipe, dp_world_size=2), local_batch_size=1)
    for taken, _ in enumerate(_loop(dataset), 1):
        if taken == 2 * 2:
            break
    state = dataset.state_dict()
    dataset.close()
    resumed = RankDataset(Loader(recipe), local_batch_size=4)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    with resumed:
        assert folded(_rows(next(iter(_loop(resumed))))) == digests_of(recipe)[2]
        assert folded(_rows(next(iter(_loop(resumed))))) == digests_of(recipe)[3], "iterating again goes on"


def test_it_refuses_to_be_in_a_worker_and_says_why(recipe: Recipe) -> None:
    loop = iter(DataLoader(RankDataset(Loader(recipe)), batch_size=None, num_workers=1, timeout=60))
    with pytest.raises(UserError, match=r"worker 0 of a DataLoader with num_workers=1.*num_workers=0"):
        next(loop)
    loop._shutdown_workers()  # type: ignore[attr-defined]


def test_a_step_that_was_not_taken_whole_and_a_strange_state_are_refused(recipe: Recipe) -> None:
    dataset = RankDataset(Loader(recipe), local_batch_size=2)
    next(iter(dataset))
    with pytest.raises(RecipeError, match=r"taken 2 rows"):
        dataset.state_dict()
    with pytest.raises(StateError, match="no state of zephon_ray"):
        dataset.load_state_dict({"dp_rank_0": b""})


def test_tensors_may_be_changed_in_place(recipe: Recipe) -> None:
    batch = next(iter(RankDataset(Loader(recipe))))
    batch["labels"][:] = -100
    assert int(batch["input"].max()) > 0
