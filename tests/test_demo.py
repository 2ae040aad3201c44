"""The demo in short: the same code, a smaller corpus and fewer steps."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from zephon_ray.batches import Batch, GlobalBatch
from zephon_ray.cli import demo as demo_verb
from zephon_ray.cli.main import run_command
from zephon_ray.demo import story as story_module
from zephon_ray.demo import texts as texts_module
from zephon_ray.demo.corpus import Corpus, CorpusSize, build_corpus
from zephon_ray.demo.story import Story, tell
from zephon_ray.demo.texts import code_texts, prose_texts
from zephon_ray.errors import UserError
from zephon_ray.loader import Loader
from zephon_ray.recipe import load_recipe
from zephon_ray.runners.hold import held

SMALL = CorpusSize(
    code_bytes=400_000, prose_bytes=100_000, whole=False, vocabulary=600, sample_bytes=100_000, sequence_length=256, global_batch_size=32
)
STEPS = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return build_corpus(tmp_path_factory.mktemp("demo"), SMALL)


@pytest.fixture(scope="module")
def story(corpus: Corpus) -> Story:
    return tell(load_recipe(corpus.recipe), steps=STEPS, runner="threads")


# ------------------------------------------------------------------ corpus


def test_the_corpus_is_real_text_in_two_formats(corpus: Corpus) -> None:
    code = [text for path in sorted((corpus.folder / "data" / "code").iterdir()) for text in pq.read_table(path)["text"].to_pylist()]
    assert corpus.made
    assert len(code) == corpus.documents["code"]
    assert sum(len(text.encode()) for text in code) == corpus.sizes["code"] >= SMALL.code_bytes
    assert any("def " in text for text in code)
    assert len(list((corpus.folder / "data" / "prose").glob("*.jsonl.zst"))) > 1
    assert load_recipe(corpus.recipe).unit_bytes == 65536


def test_a_complete_corpus_is_found_again_and_a_damaged_one_made_again(corpus: Corpus, tmp_path: Path) -> None:
    first = build_corpus(tmp_path, SMALL)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert not build_corpus(tmp_path, SMALL).made
    assert replace(first, made=False) == build_corpus(tmp_path, SMALL)
    shard = tmp_path / "data" / "prose" / "part-0.jsonl.zst"
    stray = tmp_path / "data" / "code" / "stray.parquet"
    for damage in (
        lambda: shard.write_bytes(b"x"),
        lambda: stray.write_bytes(b"x"),
        lambda: shard.unlink(),
        (tmp_path / "corpus.json").unlink,
    ):
        damage()
        assert build_corpus(tmp_path, SMALL).made
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files, "equal texts give equal files"
    assert build_corpus(tmp_path, replace(SMALL, vocabulary=500)).made
    assert (corpus.folder / "tokenizer.json").read_bytes() != (tmp_path / "tokenizer.json").read_bytes()


def test_every_machine_has_text_enough() -> None:
    assert code_texts(least=10_000_000, most=10_000_000).size >= 10_000_000
    assert prose_texts(least=2_000_000, most=2_000_000).size >= 2_000_000


def test_a_small_library_is_made_up_for_and_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib" / "site-packages").mkdir(parents=True)
    (tmp_path / "lib" / "one.py").write_text("x = 1\n")
    (tmp_path / "lib" / "bad.py").write_bytes(b"\xff\n")
    (tmp_path / "lib" / "site-packages" / "skipped.py").write_text("skipped\n")
    (tmp_path / "more").mkdir()
    for i in range(5):
        (tmp_path / "more" / f"{i}.py").write_text("y" * 100)
    monkeypatch.setattr(texts_module, "_library", lambda: tmp_path / "lib")
    monkeypatch.setattr(texts_module, "_installed", lambda: tmp_path / "more")
    texts = code_texts(least=250)
    assert [t.origin for t in texts.documents] == ["one.py", *(f"site-packages/{i}.py" for i in range(3))]
    assert (texts.size, texts.filled) == (306, 300)
    assert code_texts(least=5).filled == 0


# ------------------------------------------------------------------ story


def test_all_variants_agree_and_a_worker_was_really_killed(story: Story) -> None:
    assert story.differing == []
    assert [(v.dp_size, v.first, v.last) for v in story.variants] == [(4, 1, 12), (4, 1, 8), (2, 9, 12), (8, 9, 12)]
    assert story.compared == 8 + 4 + 4
    killed = story.variants[1].killed
    assert killed is not None
    assert killed.step == 4
    assert not psutil.pid_exists(killed.pid)


def test_the_story_is_what_the_loader_gives(story: Story, corpus: Corpus) -> None:
    with Loader(corpus.recipe, runner="inline", dp_rank=1, dp_world_size=2) as loader:
        batches = [next(loader) for _ in range(STEPS)]
    assert [b.digest for b in batches] == list(story.variants[0].digests)
    assert batches[-1].chain == story.variants[0].chains[-1]


def test_a_difference_is_found_wherever_it_is(story: Story) -> None:
    for number in range(1, 4):
        variant = story.variants[number]
        wrong = replace(variant, digests=(*variant.digests[:-1], bytes(16)))
        changed = replace(story, variants=(*story.variants[:number], wrong, *story.variants[number + 1 :]))
        assert changed.differing == [(variant.last, variant.name)]


def test_the_digests_are_those_of_the_rows_of_the_ranks(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong id in what one rank of one variant gets must show, although the batch's own digest is right."""
    of_rank = GlobalBatch.of_rank

    def spoiled(self: GlobalBatch, dp_rank: int, dp_world_size: int) -> Batch:
        part = of_rank(self, dp_rank, dp_world_size)
        if (self.step, dp_rank, dp_world_size) != (6, 1, 2):
            return part
        inputs = part.inputs.copy()
        inputs[-1, -1] ^= np.uint32(1)
        return dataclasses.replace(part, inputs=inputs)

    monkeypatch.setattr(GlobalBatch, "of_rank", spoiled)
    told = tell(load_recipe(corpus.recipe), steps=6, runner="threads")
    assert told.differing == [(6, "resumed at dp 2")]


def test_the_kill_is_a_kill(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []

    def watched(pid: int, number: int) -> None:
        assert psutil.Process(pid).ppid() == os.getpid()
        sent.append((pid, number))
        os.kill(pid, number)

    # The story's own kills alone: a runner that closes also kills workers that do not end by themselves.
    monkeypatch.setattr(story_module, "os", SimpleNamespace(kill=watched))
    told = tell(load_recipe(corpus.recipe), steps=6, runner="threads")
    assert [number for _, number in sent] == [signal.SIGKILL]
    assert told.variants[1].killed is not None
    assert told.variants[1].killed.pid == sent[0][0]


@pytest.mark.fault
@pytest.mark.xdist_group("ray")
def test_the_story_on_ray_is_the_same_with_a_worker_killed_at_work(
    corpus: Corpus, story: Story, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    killed: list[str] = []

    def watched(pid: int, number: int) -> None:
        assert number == signal.SIGKILL
        assert psutil.Process() in psutil.Process(pid).parents()
        killed.append(" ".join(psutil.Process(pid).cmdline()))
        os.kill(pid, number)

    monkeypatch.setattr(story_module, "os", SimpleNamespace(kill=watched))
    told = tell(load_recipe(corpus.recipe), steps=STEPS, runner="ray")
    assert told.differing == []
    assert told.variants[0].digests == story.variants[0].digests
    assert [v.runner for v in told.variants] == ["ray"] * 4
    assert told.variants[1].killed is not None
    assert told.variants[1].killed.step == 4
    assert "ReadZephonUnits" in killed[0]
    assert not psutil.pid_exists(told.variants[1].killed.pid)
    assert all(v.cpu_seconds > 0 for v in told.variants)
    assert capfd.readouterr() == ("", ""), "Ray says nothing"


def test_a_cluster_is_held_open_for_ray_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zephon_ray.runners.ray_cluster", None)
    for runner in ("inline", "threads", "processes"):
        with held(runner):
            pass
    with pytest.raises(ImportError), held("ray"):
        pass


def test_too_few_steps_are_refused(corpus: Corpus) -> None:
    with pytest.raises(UserError, match="at least 6"):
        tell(load_recipe(corpus.recipe), steps=5, runner="threads")


# ------------------------------------------------------------------ command


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, corpus: Corpus) -> Path:
    """The command on the small corpus."""
    monkeypatch.setattr(demo_verb, "build_corpus", lambda folder, say: build_corpus(folder, SMALL, say))
    return corpus.folder


def test_the_command_shows_one_table_and_what_to_try_next(short: Path, capfd: pytest.CaptureFixture[str], story: Story) -> None:
    assert run_command(["demo", "--dir", str(short), "--steps", str(STEPS), "--runner", "threads"]) == 0
    out, err = capfd.readouterr()
    assert "\x1b" not in out, "not a terminal"
    for variant in story.variants:
        assert variant.name in out
        assert variant.digests[-1].hex()[:12] in out
    assert out.count("all equal") == 3
    for words in ("worker killed", "stopped, state saved", "resumed", "target 70.00 %", "tokens/s", "What to try next:"):
        assert words in out
    assert "killed with SIGKILL" in err


def test_what_to_try_next_works(short: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(short.parent)
    assert run_command(["demo", "--dir", short.name, "--steps", "6", "--runner", "threads"]) == 0
    commands = capfd.readouterr().out.split("What to try next:")[1].strip().splitlines()
    verbs = ("plan", "run", "verify")
    for verb, command in zip(verbs, commands, strict=True):
        words = command.split()
        assert run_command(words[words.index(verb) :]) == 0, command
        capfd.readouterr()


def test_the_command_ends_with_1_if_a_digest_differs(
    short: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, story: Story
) -> None:
    last = story.variants[-1]
    wrong = replace(story, variants=(*story.variants[:-1], replace(last, chains=(bytes(16), *last.chains[1:]))))
    monkeypatch.setattr(demo_verb, "tell", lambda *_, **__: wrong)
    assert run_command(["demo", "--dir", str(short)]) == 1
    out, err = capfd.readouterr()
    assert "DIFFERS" in out
    assert "step 9 of 'resumed at dp 8' is not that of 'dp 4, in one go'" in err


def test_the_command_as_json(short: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, story: Story) -> None:
    monkeypatch.setattr(demo_verb, "tell", lambda *_, **__: story)
    assert run_command(["demo", "--dir", str(short), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["agree"] is True
    assert [len(v["digests"]) for v in report["variants"]] == [12, 8, 4, 4]
    assert report["variants"][1]["killed"]["step"] == 4
