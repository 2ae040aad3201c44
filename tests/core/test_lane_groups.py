"""Lane groups side by side: however the lanes are grouped, steps, states, ledger lines and ends are those of one group."""

from __future__ import annotations

import gc
import pickle
import random
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.test_against_reference import RANDOM, plain_windows, written
from tests.corpora import Corpus, corpora
from tests.golden_cases import GoldenCase
from tests.reference.product import state_as_plain
from zephon_ray.batches import GlobalBatch
from zephon_ray.collector import Collector, prepare
from zephon_ray.errors import BadRecordError, RunnerError, SourceError
from zephon_ray.feeding import FedWindows, Window
from zephon_ray.joining import JoinedStep, is_over, join_blocks
from zephon_ray.lane_blocks import LaneBlock, LanesState, beginning, split_lanes
from zephon_ray.lanes import LaneGroup
from zephon_ray.plan.windows import Position, SourceCursor, UnitKey, UnitTask
from zephon_ray.recipe import Recipe, load_recipe
from zephon_ray.runners.base import FailedUnit, Job
from zephon_ray.runners.local import InlineRunner
from zephon_ray.runners.makers import InThread
from zephon_ray.runners.worker import Made
from zephon_ray.stages.tokenise import Options
from zephon_ray.stages.unit import TokenisedUnit
from zephon_ray.state import Identity, StreamState, to_bytes
from zephon_ray.supplies import Supplies
from zephon_ray.testing import documents, tiny_corpus, write_lines

pytestmark = pytest.mark.timeout(300)


class Remembering(InThread):
    """Makes each unit once for all runs of a test."""

    def __init__(self, options: Options, made: dict[UnitKey, Made]) -> None:
        super().__init__(options)
        self._made = made

    def make(self, task: UnitTask) -> Made:
        if task.key not in self._made:
            self._made[task.key] = super().make(task)
        return self._made[task.key]


class QuickRunner(InlineRunner):
    def __init__(self, made: dict[UnitKey, Made]) -> None:
        super().__init__()
        self._units_made = made

    def start(self, job: Job, positions: Sequence[Position]) -> None:
        super().start(job, positions)
        self._maker = Remembering(job.options, self._units_made)


class Runs:
    """Many runs of one recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.job, self.identity = prepare(recipe)
        self._made: dict[UnitKey, Made] = {}

    @contextmanager
    def collector(self, groups: Sequence[range] | None, state: StreamState | None = None) -> Iterator[Collector]:
        with QuickRunner(self._made) as runner:
            yield Collector(self.job, runner, state, groups=groups)

    def batches(self, groups: Sequence[range] | None, most: int, state: StreamState | None = None) -> list[GlobalBatch]:
        """Up to `most` batches; fewer where the stream ends."""
        with self.collector(groups, state) as collector:
            return [b for _ in range(most) if (b := collector.next_batch()) is not None]

    def runner(self) -> QuickRunner:
        return QuickRunner(self._made)


def splits(lanes: int) -> list[list[range]]:
    """Two groups, four, as many as lanes (of few), and uneven ones; each once."""
    ways = [split_lanes(lanes, 2), split_lanes(lanes, 4)]
    if lanes <= 8:
        ways.append(split_lanes(lanes, lanes))
    if lanes > 2:
        ways += [cut(lanes, [3 * lanes // 8]), cut(lanes, [1, lanes - 1])]
    return [way for i, way in enumerate(ways) if way not in ways[:i]]


def cut(lanes: int, edges: Sequence[int]) -> list[range]:
    inner = sorted({e for e in edges if 0 < e < lanes})
    return [range(a, b) for a, b in zip([0, *inner], [*inner, lanes], strict=True)]


def check_same(got: GlobalBatch, expected: GlobalBatch, identity: Identity) -> None:
    assert got.ledger_line == expected.ledger_line
    assert got.row_digests == expected.row_digests
    assert to_bytes(got.state, identity) == to_bytes(expected.state, identity)


def test_any_grouping_gives_the_steps_states_and_ledger_lines_of_one_group(golden_case: GoldenCase) -> None:
    check_groupings(golden_case, 2)


@pytest.mark.long
def test_every_grouping_gives_the_steps_states_and_ledger_lines_of_one_group(golden_case: GoldenCase) -> None:
    check_groupings(golden_case, 5)


def check_groupings(golden_case: GoldenCase, most: int) -> None:
    """Some of the ways to split its lanes, others for each case."""
    runs = Runs(load_recipe(golden_case.recipe))
    steps = len(golden_case.steps)
    ways = splits(runs.recipe.lanes)
    expected = runs.batches(None, steps)
    assert [(b.digest.hex(), b.chain.hex(), b.pairs) for b in expected] == [(s.digest, s.chain, s.pairs) for s in golden_case.steps]
    for groups in random.Random(golden_case.name).sample(ways, min(most, len(ways))):
        with runs.collector(groups) as collector:
            for batch in expected:
                got = collector.next_batch()
                assert got is not None, f"{groups}: the stream ended before step {batch.step}"
                check_same(got, batch, runs.identity)
                if batch.step in (1, steps):
                    np.testing.assert_array_equal(got.rows, batch.rows)
            if golden_case.ends:
                assert collector.next_batch() is None
                assert collector.next_batch() is None


def test_a_run_goes_on_with_another_grouping(golden_case: GoldenCase) -> None:
    runs = Runs(load_recipe(golden_case.recipe))
    steps, draw = len(golden_case.steps), random.Random(golden_case.name)
    expected = runs.batches(None, steps)
    for stop in {1, draw.randrange(1, steps), draw.randrange(1, steps), steps - 1, steps if golden_case.ends else 1}:
        groups = draw.choice(splits(runs.recipe.lanes))
        got = runs.batches(groups, 5, expected[stop - 1].state)
        for batch, unbroken in zip(got, expected[stop:], strict=False):
            check_same(batch, unbroken, runs.identity)
        assert len(got) == min(5, steps - stop) if golden_case.ends else len(got) == 5


@settings(RANDOM, max_examples=25)
@given(corpora(), st.data())
def test_random_recipes_and_groupings_give_what_the_contract_says(corpus: Corpus, data: st.DataObject) -> None:
    check_random(corpus, data)


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(RANDOM, max_examples=1000)
@given(corpora(), st.data())
def test_many_random_recipes_and_groupings_give_what_the_contract_says(corpus: Corpus, data: st.DataObject) -> None:
    check_random(corpus, data)


def check_random(corpus: Corpus, data: st.DataObject) -> None:
    """A run is stopped after any step, and each part has a grouping of its own."""
    best_fit = corpus.recipe["packing"]["algorithm"] == "best_fit"
    with written(corpus) as (recipe, expected, ends):
        runs = Runs(recipe)
        stop = data.draw(st.integers(0, len(expected)), label="stop")
        state = None
        for part, last in ((expected[:stop], False), (expected[stop:], True)):
            edges = data.draw(st.lists(st.integers(1, recipe.lanes), max_size=4), label="edges")
            with runs.collector(cut(recipe.lanes, edges), state) as collector:
                for batch in part:
                    got = collector.next_batch()
                    assert got is not None
                    assert (got.chain.hex(), got.pairs) == (batch.chain.hex(), batch.pairs)
                    assert state_as_plain(to_bytes(got.state, runs.identity), best_fit=best_fit) == batch.state
                    first_used = [(s, e, w, [(g, u, digest) for g, u, digest, _ in units]) for s, e, w, units in batch.first_used]
                    assert plain_windows(got) == first_used
                state = collector.state
                if ends and last and expected:
                    assert collector.next_batch() is None
                elif ends and last:
                    with pytest.raises(SourceError, match="ends before the first global batch"):
                        collector.next_batch()


# ---- as on a cluster: who puts units in order sees facts and references only


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A unit whose arrays lie elsewhere."""

    source: int
    epoch: int
    group: int
    unit: int
    last: bool
    digest: int
    bad: int
    empty: int
    short: int
    bad_examples: tuple[str, ...]
    error: str | None
    pairs: int
    nbytes: int

    def owned(self) -> Reference:
        return self


Shelf = dict[UnitKey, TokenisedUnit]
FACTS = tuple(Reference.__dataclass_fields__)


class ReferringRunner:
    """Puts units on a shelf and gives references to them."""

    reads_ahead = False

    def __init__(self, runner: InlineRunner, shelf: Shelf) -> None:
        self._runner, self._shelf = runner, shelf
        self.start, self.allow = runner.start, runner.allow

    def take(self, timeout_s: float) -> Reference | FailedUnit:
        unit = self._runner.take(timeout_s)
        if isinstance(unit, FailedUnit):
            return unit
        self._shelf[unit.key] = unit
        return Reference(**{name: getattr(unit, name) for name in FACTS})


class LaneWorker:
    """A lane group behind a wall: what goes through is pickled, and units come from the shelf."""

    def __init__(
        self, runs: Runs, lanes: range, shelf: dict[UnitKey, TokenisedUnit], start: LanesState, step: int, ordinals: list[int]
    ) -> None:
        pad = runs.job.options.pad or 0
        self.group = LaneGroup(runs.recipe, start, step=step, ordinals=ordinals, pad_id=pad, lanes=lanes)
        self._shelf = shelf
        self._shape = (len(lanes) * runs.recipe.rows_per_lane, 3, runs.recipe.sequence_length)

    def feed(self, source: int, fed: bytes) -> None:
        windows: FedWindows[Reference] = pickle.loads(fed)
        taken = [Window(position=w.position, units=[self._unit(u) for u in w.units]) for w in windows.windows]
        self.group.feed(source, FedWindows(windows=taken, after=windows.after))

    def _unit(self, unit: Reference) -> TokenisedUnit:
        return self._shelf[unit.source, unit.epoch, unit.group, unit.unit]

    def step(self) -> bytes:
        return pickle.dumps(self.group.next_step(np.empty(self._shape, np.int32)))


class Orderer:
    """Orders what lane workers ask for and say, and replaces them. It holds no token."""

    def __init__(self, runs: Runs, groups: Sequence[range]) -> None:
        self._runs, self._groups = runs, groups
        self._shelf: Shelf = {}
        recipe = runs.recipe
        start = beginning(recipe, [SourceCursor(recipe, m).position for m in runs.job.manifests])
        self._supplies = Supplies[Reference](runs.job, ReferringRunner(runs.runner(), self._shelf), start)
        self._fed: list[list[Window[Reference]]] = [[] for _ in start.sources]
        self._after = [s.position for s in start.sources]
        self.chain, self.joined, self._start = bytes(16), None, start
        self.blocks: list[LaneBlock] = []
        self.workers = [LaneWorker(runs, lanes, self._shelf, start, 0, [0] * len(start.sources)) for lanes in groups]

    def replace(self, number: int) -> None:
        """A worker is lost with all that it held; another begins at the state after the last step."""
        joined: JoinedStep | None = self.joined
        step, state = (joined.step, joined.lanes) if joined else (0, self._start)
        oldest = [ordinal for ordinal, _, _ in joined.lanes.oldest] if joined else [0] * len(self._fed)
        worker = LaneWorker(self._runs, self._groups[number], self._shelf, state, step, oldest)
        for source, first in enumerate(oldest):
            if windows := self._fed[source][first:]:
                worker.feed(source, pickle.dumps(FedWindows(windows=windows, after=self._after[source])))
            if source in self._supplies.done:
                worker.group.end(source)
        self.workers[number] = worker

    def next_step(self) -> JoinedStep | None:
        for worker in self.workers:
            while (want := worker.group.want()) is not None:
                fed = self._supplies.next_windows(want)
                assert fed is not None
                self._fed[want.source] += fed.windows
                self._after[want.source] = fed.after
                for each in self.workers:
                    each.feed(want.source, pickle.dumps(fed))
                    if want.source in self._supplies.done:
                        each.group.end(want.source)
        if is_over([w.group.over for w in self.workers], pads=self._runs.recipe.final_batch == "pad"):
            return None
        self.blocks = [pickle.loads(w.step()) for w in self.workers]
        self.joined = join_blocks(self.chain, self.blocks)
        self.chain = self.joined.chain
        return self.joined


REPLACED = ["best_fit", "best_fit_pad", "epochs_continue", "rare_source", "uneven_ties", "validation_pad", "wrap_two_sources"]


@pytest.mark.parametrize("name", REPLACED)
def test_a_lane_worker_replaced_before_any_step_says_what_the_lost_one_would_have(name: str, golden_cases: dict[str, GoldenCase]) -> None:
    case = golden_cases[name]
    runs, draw = Runs(load_recipe(case.recipe)), random.Random(name)
    expected = runs.batches(None, len(case.steps))
    orderer = Orderer(runs, split_lanes(runs.recipe.lanes, 3))
    for batch in expected:
        for number in range(len(orderer.workers)):
            if draw.random() < 0.3:
                orderer.replace(number)
        joined = orderer.next_step()
        assert joined is not None
        assert joined.chain == batch.chain
        assert tuple(joined.pairs.tolist()) == batch.pairs
        state = StreamState(step=joined.step, chain=joined.chain, lanes=joined.lanes)
        assert to_bytes(state, runs.identity) == to_bytes(batch.state, runs.identity)
        windows, left_out = orderer._supplies.first_used(joined)
        assert (windows, left_out) == (batch.windows, batch.left_out)
    if case.ends:
        assert orderer.next_step() is None


def test_lane_blocks_are_small_whatever_the_rows_are(golden_cases: dict[str, GoldenCase]) -> None:
    for name in ("many_lanes", "best_fit_default_buffer", "rare_source"):
        runs = Runs(load_recipe(golden_cases[name].recipe))
        recipe = runs.recipe
        orderer = Orderer(runs, split_lanes(recipe.lanes, 4))
        orderer.next_step()
        for block in orderer.blocks:
            numbers = len(recipe.sources) * (3 * len(block.open_used) + recipe.lanes) + 2 * len(block.open_used)
            assert len(pickle.dumps(block)) < 2048 + 8 * numbers + 24 * len(block.row_digests) + 512 * len(recipe.sources)


def test_groups_of_a_padded_stream_end_each_in_their_own_step(golden_cases: dict[str, GoldenCase]) -> None:
    """Else the tests above would not see rows of padding from a group that is over beside one that is not."""
    seen = set()
    for name in ("best_fit_pad", "pad_stop_no_pad_token", "validation_pad"):
        runs = Runs(load_recipe(golden_cases[name].recipe))
        orderer = Orderer(runs, split_lanes(runs.recipe.lanes, runs.recipe.lanes))
        while orderer.next_step() is not None:
            seen.add(len({b.over for b in orderer.blocks}))
            assert all(len(b.row_digests) * runs.recipe.sequence_length == b.padding for b in orderer.blocks if b.over)
    assert seen == {1, 2}


# ---- what joining refuses


def two_blocks(golden_cases: dict[str, GoldenCase]) -> list[LaneBlock]:
    orderer = Orderer(Runs(load_recipe(golden_cases["wrap_two_sources"].recipe)), split_lanes(8, 2))
    orderer.next_step()
    return orderer.blocks


def test_blocks_with_lanes_missing_doubled_or_of_another_step_are_refused(golden_cases: dict[str, GoldenCase]) -> None:
    first, second = two_blocks(golden_cases)
    for blocks, says in (
        ([first], "lanes 4 to 7 of step 1 are missing"),
        ([second], "lane 4 of step 1 came where lane 0"),
        ([first, first], "lane 0 of step 1 came where lane 4"),
        ([first, replace(second, step=2)], "lane 4 of step 2 came where lane 4 of step 1"),
    ):
        with pytest.raises(RunnerError, match=says):
            join_blocks(bytes(16), blocks)
    assert join_blocks(bytes(16), [first, second]).step == 1


@pytest.mark.parametrize(("lanes", "groups", "sizes"), [(8, 3, [2, 3, 3]), (2, 4, [1, 1]), (1, 1, [1]), (48, 4, [12] * 4)])
def test_lanes_are_split_in_contiguous_groups_of_about_one_size(lanes: int, groups: int, sizes: list[int]) -> None:
    parts = split_lanes(lanes, groups)
    assert [len(p) for p in parts] == sizes
    assert [lane for p in parts for lane in p] == list(range(lanes))


# ---- what a group holds


def fed(lengths: Sequence[int], units: int, epoch: int = 0) -> FedWindows[TokenisedUnit]:
    made = []
    for group in range(units):
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        nothing = TokenisedUnit.nothing(source=0, epoch=epoch, group=group, unit=0)
        made.append(replace(nothing, ids=np.arange(offsets[-1], dtype=np.uint32) + 1000 * group, offsets=offsets))
    place = Position(epoch=epoch, window=0, places=())
    return FedWindows(windows=[Window(position=place, units=made)], after=place)


@pytest.mark.parametrize("length", [3, 900], ids=["gathered", "sliced"])
def test_a_group_copies_its_own_ids_and_holds_nothing_that_it_was_fed(tmp_path: Path, length: int) -> None:
    recipe = load_recipe(tiny_corpus(tmp_path, lanes=8, global_batch_size=8))
    place = Position(epoch=0, window=0, places=())
    group = LaneGroup(recipe, beginning(recipe, [place] * len(recipe.sources)), lanes=range(2, 4))
    windows = fed([length] * 200, units=4)
    arrays = [weakref.ref(u.ids) for w in windows.windows for u in w.units]
    size = sum(u.nbytes for w in windows.windows for u in w.units)
    group.feed(0, windows)
    del windows
    gc.collect()
    assert [a() for a in arrays] == [None] * 4
    held = 4 * group._pools.ids
    assert 0 < held <= size * 2 // 8 * 1.2


def test_a_chunk_of_few_standings_gives_the_same_steps(golden_cases: dict[str, GoldenCase], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("best_fit_pad", "epochs_continue", "rare_source"):
        runs, steps = Runs(load_recipe(golden_cases[name].recipe)), len(golden_cases[name].steps)
        expected = [(b.chain, to_bytes(b.state, runs.identity)) for b in runs.batches(None, steps)]
        with monkeypatch.context() as patched:
            patched.setattr("zephon_ray.lanes._MOST_STANDINGS", 1)
            assert [(b.chain, to_bytes(b.state, runs.identity)) for b in runs.batches(None, steps)] == expected


# ---- windows that cannot be used


def a_bad_corpus(folder: Path, good: int) -> Recipe:
    """`web` has a bad record after some more good documents in its last file; `code` is read once and ends the stream."""
    sources = [{"name": "web", "uri": "web"}, {"name": "code", "uri": "code", "epochs": 1}]
    shuffle = {"groups": False, "window_groups": 2}
    path = tiny_corpus(folder, lanes=4, sources=("web", "code"))
    fields = yaml.safe_load(path.read_text()) | {"sources": sources, "shuffle": shuffle}
    path.write_text(yaml.safe_dump(fields))
    write_lines(folder / "web" / "zz.jsonl", [*documents(good, seed=9), 7])
    return load_recipe(path)


def outcome(runs: Runs, groups: Sequence[range] | None) -> tuple[list[bytes], str]:
    """Digests of all steps, and how the stream ends."""
    digests = []
    with runs.collector(groups) as collector:
        try:
            while (batch := collector.next_batch()) is not None:
                digests.append(batch.digest)
        except BadRecordError as e:
            with pytest.raises(BadRecordError):
                collector.next_batch()
            return digests, str(e)
    return digests, "over"


def test_a_window_that_cannot_be_used_stops_every_grouping_at_the_same_step(tmp_path: Path) -> None:
    """Also where a lane of one group lacks it at the very step that a lane of another cannot make."""
    ends = set()
    for good in range(0, 44, 4):
        runs = Runs(a_bad_corpus(tmp_path / str(good), good))
        digests, end = outcome(runs, None)
        assert digests
        ends.add(end == "over")
        for groups in splits(4):
            assert outcome(runs, groups) == (digests, end)
    assert ends == {True, False}
