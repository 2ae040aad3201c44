"""What a trainer relies on: its rows, its state, errors that say what to do, and nothing left behind."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.small import a_recipe, documents, fields, write_lines
from zephon_ray import supplies
from zephon_ray.errors import BadRecordError, RecipeError, RunnerError, SourceError, UserError
from zephon_ray.loader import Loader
from zephon_ray.recipe import Recipe, recipe_from_dict
from zephon_ray.stages.unit import TokenisedUnit
from zephon_ray.stream import Stream

pytestmark = pytest.mark.xdist_group("processes")  # it looks at all threads and children of this process: no cluster

TWO = {"a": {"weight": 0.7}, "b": {"weight": 0.3}}


def digests(loader: Loader, steps: int) -> list[bytes]:
    return [next(loader).digest for _ in range(steps)]


@pytest.mark.parametrize(
    ("ahead", "runner"),
    [
        *((ahead, runner) for ahead in (0, 1, 16) for runner in ("inline", "threads")),
        (16, "processes"),
        *(pytest.param(ahead, "processes", marks=pytest.mark.long) for ahead in (0, 1)),
    ],
)
def test_the_state_counts_what_was_taken_not_what_was_read_ahead(tmp_path: Path, runner: str, ahead: int) -> None:
    recipe = a_recipe(tmp_path, TWO)
    with Loader(recipe) as loader:
        reference = digests(loader, 5)
        state = loader.state_dict()
        rest = digests(loader, 15)
    hasty = a_recipe(tmp_path, TWO, execution={"runner": runner, "prefetch_steps": ahead})
    with Loader(hasty, workers=2) as loader:
        assert digests(loader, 5) == reference
        assert loader.state_dict() == state
    with Loader(hasty, workers=2, state=state) as loader:
        assert digests(loader, 15) == rest


def test_restores_of_restores_are_as_exact_as_the_first(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, TWO)
    states = {}
    with Loader(recipe) as loader:
        reference = []
        for step in range(1, 24):
            reference.append(next(loader).digest)
            states[step] = loader.state_dict()
    made, state = [], None
    for end in (3, 4, 9, 10, 17, 23):
        with Loader(recipe, state=state) as loader:
            made += digests(loader, end - len(made))
            state = loader.state_dict()
            assert state == states[end]
    assert made == reference


def test_a_batch_of_64_saved_at_16_ranks_goes_on_at_8_32_and_64(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, TWO, lanes=8, global_batch_size=64, sequence_length=16)

    def ranks(size: int, state: dict[str, bytes] | None, steps: int) -> tuple[list[np.ndarray], list[dict[str, bytes]]]:
        rows: list[list[np.ndarray]] = [[] for _ in range(steps)]
        states = []
        for rank in range(size):
            with Loader(recipe, dp_rank=rank, dp_world_size=size, state=state) as loader:
                for step in range(steps):
                    batch = next(loader)
                    rows[step].append(np.stack([batch.inputs.view(np.int32), batch.labels, batch.positions], axis=1))
                states.append(loader.state_dict())
        return [np.concatenate(parts) for parts in rows], states

    whole, _ = ranks(1, None, 6)
    first, states = ranks(16, None, 3)
    assert all(state == states[0] for state in states)
    assert all(np.array_equal(a, b) for a, b in zip(first, whole[:3], strict=True))
    for size in (8, 32, 64):
        after, _ = ranks(size, states[0], 3)
        assert all(np.array_equal(a, b) for a, b in zip(after, whole[3:], strict=True))


def test_sizes_that_do_not_divide_the_batch_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    recipe = recipe_from_dict(fields({"nowhere": {}}, global_batch_size=24), str(tmp_path))
    for size in (5, 7, 16, 48):
        with pytest.raises(RecipeError, match="24") as error:
            Loader(recipe, dp_world_size=size)
        assert str(size) in str(error.value)
        assert "12" in str(error.value)
    with pytest.raises(RecipeError):
        Loader(recipe, dp_rank=4, dp_world_size=4)


def test_a_restore_tokenises_only_from_the_oldest_to_the_newest_window_that_a_lane_stands_in(tmp_path: Path) -> None:
    for n in range(8):
        write_lines(tmp_path / "a" / f"{n}.jsonl", documents(300, seed=n))
    recipe = a_recipe(tmp_path, {"a": {"window_groups": 2}}, unit_bytes=1024)
    with Loader(recipe) as loader:
        for _ in range(1200):
            next(loader)
        state, before = loader.state_dict(), loader.stats().units
        following = next(loader).digest
    assert before > 100
    with Loader(recipe, state=state) as loader:
        assert next(loader).digest == following
        assert loader.stats().units <= 6, "two lanes stand in one or two windows of two units, and a step needs no more than one other"


def test_a_small_source_is_read_once_however_often_it_comes_round(tmp_path: Path) -> None:
    write_lines(tmp_path / "one" / "0.jsonl", documents(1))
    for n in range(4):
        write_lines(tmp_path / "many" / f"{n}.jsonl", documents(500, seed=n))
    recipe = a_recipe(tmp_path, {"one": {}, "many": {}}, global_batch_size=64, sequence_length=64)
    for runner in ("inline", "threads"):
        with Loader(recipe, runner=runner, workers=2) as loader:
            last = [next(loader) for _ in range(60)][-1]
            epochs = last.pairs[0] // (2 + len(documents(1)[0]))
            assert epochs > 500, "the source came round many times"
            assert loader.stats().units < 400


def test_iterating_past_the_end_stops_again_and_again(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, {"a": {"epochs": 1}})
    for runner in ("inline", "threads"):
        with Loader(recipe, runner=runner) as loader:
            steps = len(list(loader))
            assert steps > 5
            assert list(loader) == []
            assert loader.step == steps
            end = loader.state_dict()
        with Loader(recipe, runner=runner, state=end) as loader:
            assert list(loader) == []


def test_load_state_dict_goes_back_and_forward(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, TWO)
    with Loader(recipe, runner="threads", workers=1) as loader:
        made = digests(loader, 3)
        state = loader.state_dict()
        made += digests(loader, 3)
        loader.load_state_dict(state)
        assert loader.step == 3
        assert digests(loader, 3) == made[3:]


LEAVE: dict[str, Callable[[Recipe, str], None]] = {}


def leaving(way: Callable[[Recipe, str], None]) -> Callable[[Recipe, str], None]:
    LEAVE[way.__name__] = way
    return way


@leaving
def by_close(recipe: Recipe, runner: str) -> None:
    loader = Loader(recipe, runner=runner, workers=2)
    next(loader)
    loader.close()
    loader.close()


@leaving
def by_break(recipe: Recipe, runner: str) -> None:
    with Loader(recipe, runner=runner, workers=2) as loader:
        for batch in loader:
            if batch.step == 3:
                break


@leaving
def by_exception(recipe: Recipe, runner: str) -> None:
    with suppress(ZeroDivisionError), Loader(recipe, runner=runner, workers=2) as loader:
        raise ZeroDivisionError(next(loader))


@leaving
def by_del(recipe: Recipe, runner: str) -> None:
    loader = Loader(recipe, runner=runner, workers=2)
    next(loader)
    del loader
    gc.collect()


@leaving
def unused(recipe: Recipe, runner: str) -> None:
    Loader(recipe, runner=runner, workers=2).close()


@pytest.mark.parametrize(
    ("way", "runner"),
    [
        *((way, "threads") for way in LEAVE),
        ("by_exception", "processes"),
        *(pytest.param(way, "processes", marks=pytest.mark.long) for way in LEAVE if way != "by_exception"),
    ],
)
def test_leaving_leaves_no_thread_and_no_process(tmp_path: Path, way: str, runner: str) -> None:
    recipe = a_recipe(tmp_path, TWO)
    threads, children = set(threading.enumerate()), psutil.Process().children()
    for _ in range(3):
        LEAVE[way](recipe, runner)
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
    assert set(threading.enumerate()) <= threads
    _, alive = psutil.wait_procs([p for p in psutil.Process().children() if p not in children], timeout=10)
    assert not alive


@pytest.mark.parametrize("runner", ["inline", "threads", "processes"])
def test_a_bad_record_ends_the_run_where_it_lies_after_all_batches_before_it(tmp_path: Path, runner: str) -> None:
    file = write_lines(tmp_path / "a" / "0.jsonl", documents(200))
    good = a_recipe(tmp_path, {"a": {"window_groups": 1}}, shuffle={"groups": False, "documents": False})
    with Loader(good) as loader:
        reference = digests(loader, 200)
    lines = file.read_text().splitlines()
    lines[150] = "{" + " " * (len(lines[150]) - 1)
    file.write_text("\n".join(lines) + "\n")
    got: list[bytes] = []
    with pytest.raises(BadRecordError) as error, Loader(good, runner=runner) as loader:
        got.extend(batch.digest for batch in loader)
    assert len(got) == 143, "every step that can be made without the record's window is made"
    assert got == reference[: len(got)]
    assert "'a'" in str(error.value)
    assert "0.jsonl" in str(error.value)


def test_bad_records_are_skipped_up_to_the_limit(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a" / "0.jsonl", documents(100))
    lines = file.read_text().splitlines()
    lines[10:10] = ["nonsense", '{"text": 5}', "[1]"]
    file.write_text("\n".join(lines) + "\n")
    tolerant = a_recipe(tmp_path, {"a": {"max_bad_records": 3, "epochs": 3}}, on_bad_record="skip")
    with Loader(tolerant) as loader:
        steps = len(list(loader))
    assert steps > 20
    strict = a_recipe(tmp_path, {"a": {"max_bad_records": 2}}, on_bad_record="skip")
    with pytest.raises(BadRecordError, match="max_bad_records=2"), Loader(strict) as loader:
        digests(loader, 50)


@pytest.mark.parametrize("runner", ["inline", "threads"])
@pytest.mark.parametrize("content", [b"", b"\n \t\r\n", b'{"text": ""}\n{"text": null}\n'])
def test_a_source_without_documents_is_an_error_that_names_it(tmp_path: Path, content: bytes, runner: str) -> None:
    (tmp_path / "void").mkdir()
    (tmp_path / "void" / "0.jsonl").write_bytes(content)
    recipe = a_recipe(tmp_path, {"a": {}, "void": {"weight": 0.01}})
    with pytest.raises(SourceError, match="'void'"), Loader(recipe, runner=runner) as loader:
        digests(loader, 500)


def test_a_stream_too_short_for_one_batch_is_an_error_and_not_an_empty_one(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, {"a": {"epochs": 1}}, global_batch_size=4096)
    for runner in ("inline", "threads"):
        with Loader(recipe, runner=runner) as loader:
            for _ in range(2):
                with pytest.raises(SourceError, match=r"ends before the first global batch.*final_batch: pad"):
                    next(loader)
    padded = a_recipe(tmp_path, {"a": {"epochs": 1}}, global_batch_size=4096, final_batch="pad")
    with Loader(padded) as loader:
        assert len(list(loader)) == 1


def test_a_loader_that_was_closed_before_use_says_so(tmp_path: Path) -> None:
    loader = Loader(a_recipe(tmp_path), runner="threads")
    loader.close()
    threads = set(threading.enumerate())
    for use in (loader.state_dict, loader.stats, lambda: next(loader)):
        with pytest.raises(UserError, match="closed before it was used"):
            use()
    assert set(threading.enumerate()) == threads


MIXTURES: list[tuple[dict[str, dict[str, float]], dict[str, object]]] = [
    ({"a": {"weight": 0.7}, "b": {"weight": 0.3}}, {}),
    ({"a": {"weight": 0.9}, "b": {"weight": 0.05}, "c": {"weight": 0.05}}, {"packing": {"algorithm": "wrap", "max_document_tokens": 20}}),
    ({"a": {"weight": 3}, "b": {"weight": 1}}, {"packing": {"algorithm": "best_fit", "buffer": 8}, "lanes": 4}),
]


@pytest.mark.parametrize(("sources", "over"), MIXTURES)
def test_the_mixture_stays_within_the_proven_bound_in_every_lane_at_every_step(
    tmp_path: Path, sources: dict[str, dict[str, float]], over: dict[str, object]
) -> None:
    """(longest piece + sequence_length) * (1 + share * (sources - 2)) pairs, from the counts in the states."""
    recipe = a_recipe(tmp_path, sources, **over)
    shares = np.array(recipe.shares()) / sum(recipe.shares())
    bound = (recipe.max_piece_pairs + recipe.sequence_length) * (1 + shares * (len(shares) - 2))
    with closing(Stream(recipe)) as stream:
        begun = np.stack([s.counts for s in stream.state.lanes.sources])
        worst = 0.0
        for _ in range(300):
            batch = stream.next_batch()
            assert batch is not None
            taken = np.stack([s.counts for s in batch.lanes.sources]) - begun
            due = taken.sum(axis=0) * shares[:, None]
            worst = max(worst, float((np.abs(taken - due) / bound[:, None]).max()))
    assert 0.05 < worst <= 1


@pytest.mark.parametrize("runner", ["threads", "processes"])
def test_an_opened_loader_refuses_a_forked_child_and_goes_on_in_its_parent(tmp_path: Path, runner: str) -> None:
    recipe = a_recipe(tmp_path, TWO)
    with Loader(recipe) as loader:
        reference = digests(loader, 10)
    with Loader(recipe, runner=runner, workers=2) as loader:
        made = digests(loader, 2)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                digests(loader, 200)
            except RunnerError as error:
                code = 3 if "fork" in str(error) else 2
            loader.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert made + digests(loader, 8) == reference


@pytest.mark.parametrize("runner", ["inline", "threads"])
def test_each_batch_goes_to_one_of_the_threads_that_take(tmp_path: Path, runner: str) -> None:
    recipe = a_recipe(tmp_path, TWO)
    with Loader(recipe) as loader:
        reference = digests(loader, 40)
    taken: list[tuple[int, bytes]] = []
    with Loader(recipe, runner=runner) as loader:

        def take() -> None:
            for _ in range(10):
                batch = next(loader)
                taken.append((batch.step, batch.digest))

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(taken) == list(enumerate(reference, start=1))


def test_a_loader_is_pickled_before_use_and_not_while_in_use(tmp_path: Path) -> None:
    loader = Loader(a_recipe(tmp_path, TWO))
    with pickle.loads(pickle.dumps(loader)) as other, loader:
        assert digests(other, 3) == digests(loader, 3)
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(loader)


def test_a_source_larger_than_the_memory_for_small_ones_is_never_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = a_recipe(tmp_path, {"a": {"epochs": 3}})
    stored = sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    owned, kept, made = TokenisedUnit.owned, list[int](), list[int]()

    def counted(unit: TokenisedUnit) -> TokenisedUnit:
        kept[-1] += 1
        return owned(unit)

    monkeypatch.setattr(TokenisedUnit, "owned", counted)
    for limit in (8 * stored, stored - 1):
        monkeypatch.setattr(supplies, "MEMORY_BYTES", limit)
        kept.append(0)
        with Loader(recipe, runner="inline") as loader:
            assert sum(1 for _ in loader) > 10
            made.append(loader.stats().units)
    assert kept == [made[0], 0], "every unit once; and none of a source that is known to be too large"
    assert made[1] == 3 * made[0]
