"""The loader in TorchTitan's own hands: its overrides, its checkpoint manager, its validator's way of building. No trainer, one rank."""

from __future__ import annotations

import gc
import importlib
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import zephon_ray.training
from tests.training.loops import LENGTH, TrainersTokenizer, corpus, digests_of, folded, held_out, row_digests
from zephon_ray.errors import RecipeError, StateError, UserError
from zephon_ray.loader import STATE_KEY, Loader

torch = pytest.importorskip("torch")
pytest.importorskip("torchtitan")
import torch.distributed as dist  # noqa: E402
import tyro  # noqa: E402
from torch.distributed.checkpoint import CheckpointException, FileSystemReader  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.config import Configurable  # noqa: E402
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports  # noqa: E402
from torchtitan.observability import structured_logger  # noqa: E402

from zephon_ray.training.torchtitan import ZephonRayDataLoader  # noqa: E402

pytestmark = pytest.mark.xdist_group("torch")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    corpus(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _no_trainer_has_told_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.observability.structured_logger import step_state

    monkeypatch.setattr(step_state, "_RELATIVE_STEP_GLOBAL", None)
    step_state._RELATIVE_STEP_CV.set(None)


def build(folder: Path, *, ranks: int = 1, rank: int = 0, size: int = 2, length: int = LENGTH, **config: Any) -> ZephonRayDataLoader:
    """As the trainer of 0.3.0 builds it."""
    return ZephonRayDataLoader.Config(**{"recipe": str(folder / "recipe.yaml")} | config).build(
        dp_world_size=ranks, dp_rank=rank, tokenizer=TrainersTokenizer(str(folder)), seq_len=length, local_batch_size=size,
        snapshot_every_n_steps=4,
    )  # fmt: skip


def step(batches: Iterator[Any], count: int = 2) -> str:
    """The digest of the global batch that a single rank trains on."""
    rows = []
    for _ in range(count):
        values, labels = next(batches)
        rows += row_digests(values["input"], labels, values["positions"])
    return folded(rows)


# --- the switch -------------------------------------------------------------------------------------------------------


class Validator(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dataloader: BaseDataLoader.Config = field(default_factory=BaseDataLoader.Config)


class Trainer(Configurable):
    """What an override sees of a trainer's configuration."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        dataloader: BaseDataLoader.Config = field(default_factory=lambda: BaseDataLoader.Config(dataset="c4_test"))
        validator: Validator.Config = field(default_factory=Validator.Config)


def switched(*words: str) -> Trainer.Config:
    config = Trainer.Config()
    apply_overrides(OverrideConfig(imports=parse_cli_imports(list(words))), config)
    return config


def test_one_word_of_the_command_line_puts_the_loader_in_and_another_the_validators(folder: Path) -> None:
    config = switched(
        'zephon_ray.training.torchtitan={"recipe": "recipe.yaml", "runner": "threads"}',
        'zephon_ray.training.torchtitan.validation={"recipe": "validation.yaml"}',
    )
    assert config.dataloader == ZephonRayDataLoader.Config(recipe="recipe.yaml", runner="threads")
    assert config.validator.dataloader == ZephonRayDataLoader.Config(recipe="validation.yaml", stream="validation")
    only = switched('zephon_ray.training.torchtitan.validation={"recipe": "validation.yaml"}')
    assert only.dataloader.dataset == "c4_test"


def test_an_override_adds_to_a_loader_that_the_config_names_already(folder: Path) -> None:
    config = Trainer.Config(dataloader=ZephonRayDataLoader.Config(recipe="a.yaml", runner="threads"))
    apply_overrides(OverrideConfig(imports=parse_cli_imports(['zephon_ray.training.torchtitan={"recipe": "b.yaml"}'])), config)
    assert config.dataloader == ZephonRayDataLoader.Config(recipe="b.yaml", runner="threads")


def test_no_field_of_ours_has_the_name_of_an_argument_that_a_trainer_builds_with() -> None:
    arguments = {"dp_rank", "dp_world_size", "tokenizer", "seq_len", "local_batch_size", "snapshot_every_n_steps"}
    arguments |= {"max_context_length", "num_tokens_per_batch", "num_tokens_per_microbatch"}
    assert not arguments & set(ZephonRayDataLoader.Config.__dataclass_fields__)


def test_every_field_can_be_set_on_the_command_line() -> None:
    words = [
        "--recipe", "a.yaml", "--stream", "validation", "--runner", "processes", "--workers", "2", "--infinite", "--allow-duplicate-work"
    ]  # fmt: skip
    parsed = tyro.cli(ZephonRayDataLoader.Config, args=words, default=ZephonRayDataLoader.Config(out="runs/a"))
    assert parsed == ZephonRayDataLoader.Config(
        recipe="a.yaml", stream="validation", runner="processes", workers=2, infinite=True, allow_duplicate_work=True, out="runs/a"
    )
    words = ["--feed", "first", "--address", "head:6379", "--incarnation", "run:1", "--takeover", "--token-file", "token", "--repeat"]
    parsed = tyro.cli(ZephonRayDataLoader.Config, args=words, default=ZephonRayDataLoader.Config())
    assert parsed == ZephonRayDataLoader.Config(
        feed="first", address="head:6379", incarnation="run:1", takeover=True, token_file="token", repeat=True
    )


def test_options_of_another_loader_and_a_validators_on_the_training_stream_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"dataloader\.dataset='c4' is TorchTitan's own"):
        build(folder, dataset="c4")
    with pytest.raises(UserError, match="stream='validation'"):
        build(folder, infinite=True)


def test_importing_the_package_registers_the_override_where_torchtitan_is_looking_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = sys.modules["torchtitan.config.override"]  # the package has a function of that name
    monkeypatch.setattr(registry, "_REGISTRY", {})
    monkeypatch.setattr(zephon_ray.training, "torchtitan", None)
    monkeypatch.delitem(sys.modules, "zephon_ray.training.torchtitan")
    importlib.reload(zephon_ray.training)
    assert registry._REGISTRY.keys() == {"zephon_ray.training.torchtitan", "zephon_ray.training.torchtitan.validation"}


@pytest.mark.long
def test_the_override_is_found_by_a_process_that_has_imported_nothing_of_ours(folder: Path) -> None:
    program = (
        "from torchtitan.config.override import _resolve_active, _resolve_target\n"
        "target = _resolve_target('zephon_ray.training.torchtitan')\n"
        "((override, options),) = _resolve_active([(*target, {})])\n"
        "print(override.name, override.fqns)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.splitlines()[-1:] == ["zephon_ray.training.torchtitan ['dataloader']"], done.stderr


# --- rows -------------------------------------------------------------------------------------------------------------


def test_all_ranks_together_train_on_the_global_batches_in_the_form_of_the_release(folder: Path) -> None:
    ranks = [iter(build(folder, ranks=2, rank=rank, size=1, runner="inline")) for rank in range(2)]
    for expected in digests_of(corpus(folder), 3):
        rows = []
        for batches in ranks:
            for _ in range(2):
                values, labels = next(batches)
                assert values.keys() == {"input", "positions"}
                assert {(t.dtype, t.shape) for t in (*values.values(), labels)} == {(torch.int64, (1, LENGTH))}
                rows += row_digests(values["input"], labels, values["positions"])
        assert folded(rows) == expected


def test_a_trainer_that_does_not_fit_is_refused_when_its_loader_is_built(folder: Path) -> None:
    with pytest.raises(RecipeError) as error:
        build(folder, length=64, size=3)
    assert len(error.value.problems) == 2
    other = folder / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    config = ZephonRayDataLoader.Config(recipe=str(folder / "recipe.yaml"))
    with pytest.raises(RecipeError, match="the trainer's tokenizer is"):
        config.build(dp_world_size=1, dp_rank=0, tokenizer=TrainersTokenizer(str(other)), seq_len=LENGTH, local_batch_size=2)


def test_without_a_recipe_a_trainer_is_compared_with_that_of_its_feed_before_the_first_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = corpus(folder)
    monkeypatch.setattr("zephon_ray.training.sources.open_loader", lambda options, rank, ranks, state: Loader(served, state=state))
    assert step(iter(build(folder, recipe=None, feed="first"))) == digests_of(served, 1)[0]
    late = build(folder, recipe=None, feed="first", size=3)
    with pytest.raises(RecipeError, match="local_batch_size=3 does not divide"):
        iter(late)
    (folder / "assets").mkdir()
    (folder / "assets" / "tokenizer.json").write_text("{}")
    config = ZephonRayDataLoader.Config(feed="first")
    other = config.build(
        dp_world_size=1, dp_rank=0, tokenizer=TrainersTokenizer(str(folder / "assets")), seq_len=LENGTH, local_batch_size=2
    )  # fmt: skip
    with pytest.raises(RecipeError, match="the trainer's tokenizer is"):
        iter(other)


def test_nothing_is_opened_before_the_first_batch_and_a_dropped_loader_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[weakref.ref[Loader]] = []

    def watched(*args: Any, **options: Any) -> Loader:
        loader = Loader(*args, **options)
        opened.append(weakref.ref(loader))
        return loader

    monkeypatch.setattr("zephon_ray.training.sources.Loader", watched)
    gc.collect()
    gc.disable()  # as TorchTitan does
    try:
        loader = build(folder)
        assert loader.state_dict() == {STATE_KEY: b""}
        assert not opened
        batches = iter(loader)
        next(batches)
        assert opened[0]() is not None
        del loader, batches
        assert opened[0]() is None
    finally:
        gc.enable()


# --- state ------------------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """A part of a trainer's state that is not ours."""

    value: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class StockLoader(Part):
    """What a checkpoint of TorchTitan's own loader holds."""

    def state_dict(self) -> dict[str, Any]:
        return {"dp_rank_0": pickle.dumps({"at": 3}), "world_size": 1}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def manager(folder: Path, loader: Any, mode: str = "disabled", **config: Any) -> CheckpointManager:
    made = CheckpointManager.Config(
        enable=True, folder="checkpoint", interval=1, async_mode=mode, last_save_model_only=False, keep_latest_k=0, **config
    )
    return made.build(
        dataloader=loader, model_parts=[torch.nn.Linear(2, 2)], optimizers=Part(), lr_schedulers=Part(),
        states={"train_state": Part()}, sd_adapter=None, base_folder=str(folder),
    )  # fmt: skip


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_the_real_checkpoint_manager_saves_the_state_of_the_step_whatever_is_read_ahead_and_resumes(folder: Path, mode: str) -> None:
    expected = digests_of(corpus(folder, execution={"runner": "threads", "prefetch_steps": 4}), 5)
    loader = build(folder)
    batches = iter(loader)
    saved = manager(folder, loader, mode)
    assert [step(batches), step(batches)] == expected[:2]
    state = loader.state_dict()
    assert saved.save(2)
    assert step(batches) == expected[2], "training goes on while it is written"
    saved.maybe_wait_for_saving()
    saved.close()
    again = build(folder, size=4)
    resumed = manager(folder, again)
    assert resumed.load()
    assert again.state_dict() == state
    batches = iter(again)
    assert [step(batches, 1) for _ in range(3)] == expected[2:]


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_holds_one_key_of_ours_with_the_bytes_of_the_state(folder: Path) -> None:
    loader = build(folder)
    batches = iter(loader)
    step(batches)
    saved = manager(folder, loader)
    saved.save(1)
    metadata = FileSystemReader(folder / "checkpoint" / "step-1").read_metadata()
    assert [key for key in metadata.state_dict_metadata if key.startswith("dataloader")] == [f"dataloader.{STATE_KEY}"]
    state = loader.state_dict()[STATE_KEY]
    assert state.startswith(b'{"checksum"')
    files = b"".join(path.read_bytes() for path in (folder / "checkpoint" / "step-1").glob("*.distcp"))
    assert state in files, "as it is: canonical JSON, and no object of ours"


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_of_another_loader_is_refused_unless_its_loader_is_left_out(folder: Path) -> None:
    manager(folder, StockLoader()).save(3)
    with pytest.raises(CheckpointException, match=rf"Missing key.*dataloader\.{STATE_KEY}"):
        manager(folder, build(folder)).load()
    anew = build(folder)
    assert manager(folder, anew, exclude_from_loading=["dataloader"]).load()
    assert step(iter(anew)) == digests_of(corpus(folder), 1)[0]


def test_strange_and_damaged_states_are_refused_with_what_to_do(folder: Path) -> None:
    loader = build(folder)
    step(iter(loader))
    state = loader.state_dict()[STATE_KEY]
    for strange in ({"dp_rank_0": b"x", "world_size": 1}, {}):
        with pytest.raises(StateError, match=r"another loader.*exclude_from_loading dataloader"):
            build(folder).load_state_dict(strange)
    with pytest.raises(StateError, match="damaged"):
        build(folder).load_state_dict({STATE_KEY: state[:-9]})
    other = build(folder, recipe=str(folder / "recipe.yaml"))
    corpus(folder, seed=8)
    other = build(folder)
    other.load_state_dict({STATE_KEY: state})
    with pytest.raises(StateError, match=r"another run.*seed"):
        next(iter(other))


def test_the_state_before_the_first_step_is_the_beginning(folder: Path) -> None:
    loader = build(folder)
    loader.load_state_dict(build(folder).state_dict())
    assert step(iter(loader)) == digests_of(corpus(folder), 1)[0]


def test_a_state_can_be_loaded_while_iterating(folder: Path) -> None:
    loader = build(folder)
    batches = iter(loader)
    first = step(batches)
    state = loader.state_dict()
    second = step(batches)
    loader.load_state_dict(state)
    assert [first, second, step(iter(loader))] == [*digests_of(corpus(folder), 2), second]


def test_a_trainer_of_another_global_batch_size_cannot_save(folder: Path) -> None:
    smaller = build(folder)
    next(iter(smaller))
    with pytest.raises(RecipeError, match=r"taken 2 rows.*global_batch_size=4"):
        smaller.state_dict()
    larger = build(folder, size=4)
    structured_logger.set_step(11, relative_step=1)  # as the trainer does, before it asks for batches
    batches = iter(larger)
    next(batches)
    next(batches)
    with pytest.raises(RecipeError, match=r"taken 8 rows over all ranks in 1 steps, 8 a step.*global_batch_size=4"):
        larger.state_dict()
    structured_logger.set_step(12, relative_step=2)
    assert larger.state_dict()[STATE_KEY]


# --- validation -------------------------------------------------------------------------------------------------------


def _validated(folder: Path, ranks: int, **config: Any) -> list[list[list[bytes]]]:
    """For each rank the row digests of its micro-batches, as the validator of 0.3.0 builds its loader."""
    given = []
    for rank in range(ranks):
        made = ZephonRayDataLoader.Config(recipe=str(folder / "recipe.yaml"), stream="validation", runner="inline")
        loader = replace(made, **{"infinite": False} | config).build(
            dp_world_size=ranks, dp_rank=rank, tokenizer=TrainersTokenizer(str(folder)), seq_len=LENGTH, local_batch_size=1
        )
        batches = iter(loader)
        count = 60 if config else 10**6
        given.append([row_digests(v["input"], labels, v["positions"]) for (v, labels), _ in zip(batches, range(count), strict=False)])
    return given


def test_validation_is_the_whole_set_once_and_ends_on_all_ranks_at_the_same_step(folder: Path) -> None:
    recipe = held_out(folder)
    alone = _validated(folder, 1)
    for ranks in (2, 4):
        parts = _validated(folder, ranks)
        assert len({len(part) for part in parts}) == 1
        size = 4 // ranks
        steps = [[row for part in parts for batch in part[n : n + size] for row in batch] for n in range(0, len(parts[0]), size)]
        assert [row for rows in steps for row in rows] == [row for batch in alone[0] for row in batch]
    with Loader(recipe, runner="inline") as loader:
        batches = list(loader)
    assert len(alone[0]) == 4 * len(batches)
    assert (batches[-1].labels == -100).any()
    pairs = sum(int((batch.labels != -100).sum()) for batch in batches)
    assert pairs == batches[-1].pairs[0], "nothing is left out, and padding is not scored"


@pytest.mark.parametrize("name", ["infinite", "repeat"])
def test_a_validation_of_a_number_of_steps_begins_again_at_its_end(folder: Path, name: str) -> None:
    held_out(folder, texts=4)
    (once,) = _validated(folder, 1)
    (again,) = _validated(folder, 1, **{name: True})
    assert len(once) < 60
    assert again == [once[n % len(once)] for n in range(60)]


def test_an_endless_validation_is_refused(folder: Path) -> None:
    with pytest.raises(RecipeError, match="validated on to its end"):
        build(folder, stream="validation")
