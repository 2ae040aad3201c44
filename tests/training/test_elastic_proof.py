"""Real training by TorchTitan on CPU ranks: one checkpoint, resumed in many ways, trains on the same rows. The proof itself can fail."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zephon_ray.batches import fold
from zephon_ray.errors import DifferenceError, UserError
from zephon_ray.hashing import canonical_json
from zephon_ray.recipe import load_recipe
from zephon_ray.testing import tiny_corpus
from zephon_ray.training.elastic_proof.__main__ import main
from zephon_ray.training.elastic_proof.jobs import Job, Mesh
from zephon_ray.training.elastic_proof.outcomes import TOLERANCE, Outcome, compare
from zephon_ray.training.elastic_proof.proof import Proof, prove
from zephon_ray.training.elastic_proof.records import TrainedStep, trained
from zephon_ray.training.elastic_proof.reference import Reference, make_reference
from zephon_ray.training.elastic_proof.report import show
from zephon_ray.training.elastic_proof.setting import SAVED, make_setting

PROOF_S = 900
"""A machine that does much else may take ten times as long as an idle one."""

pytestmark = pytest.mark.xdist_group("torch")


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Proof:
    pytest.importorskip("torchtitan")
    return prove(make_setting(tmp_path_factory.mktemp("proof"), short=True), say=print)


@pytest.mark.timeout(PROOF_S)
def test_ranks_of_all_sizes_train_on_the_rows_of_one_loader_and_to_the_same_losses(proof: Proof) -> None:
    assert [outcome for outcome in proof.outcomes if not outcome.good] == []
    resumed = {outcome.ranks for outcome in proof.outcomes if outcome.title == "resumed"}
    assert resumed == {"FSDP 1", "FSDP 2", "FSDP 4", "FSDP 8", "HSDP 2×2", "FSDP 2 · TP 2"}
    ends = {(outcome.digest, outcome.chain) for outcome in proof.outcomes if outcome.last == proof.setting.last}
    assert len(ends) == 1


@pytest.mark.timeout(PROOF_S)
def test_ranks_killed_in_the_midst_of_a_step_go_on_from_the_last_checkpoint_bit_for_bit(proof: Proof) -> None:
    again = next(outcome for outcome in proof.outcomes if outcome.title == "started again")
    assert again.bitwise
    assert (again.first, again.gap, again.differing) == (9, 0.0, ())


@pytest.mark.timeout(PROOF_S)
def test_a_saved_checkpoint_holds_one_key_of_the_loader_and_no_pickle_of_ours(proof: Proof) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    folder = proof.setting.folder / "saved" / "checkpoint" / f"step-{SAVED}"
    metadata = FileSystemReader(folder).read_metadata()
    ours = [key for key in metadata.state_dict_metadata if "dataloader" in key or "zephon" in key]
    assert ours == ["dataloader.zephon_ray"]
    assert isinstance(metadata.state_dict_metadata[ours[0]], BytesStorageMetadata)
    place = metadata.storage_data[MetadataIndex(ours[0])]
    stored = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
    state = torch.load(io.BytesIO(stored), weights_only=True)  # DCP's own envelope; to open it no class has to be unpickled
    assert isinstance(state, bytes)
    assert canonical_json(json.loads(state)) == state
    assert json.loads(state)["state"]["step"] == SAVED


@pytest.mark.timeout(PROOF_S)
def test_the_table_names_every_case_and_what_it_means(proof: Proof, capsys: pytest.CaptureFixture[str]) -> None:
    show(proof)
    text = capsys.readouterr().out
    assert "PROVED" in text
    assert "NO" not in text.split()
    assert all(word in text for word in ("HSDP 2×2", "TP 2", "killed in step 10", "saving asynchronously", "chain 4→1"))
    show(replace(proof, outcomes=(*proof.outcomes, replace(proof.outcomes[0], differing=(3,)))))
    assert "NO: step 3" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.fault
@pytest.mark.timeout(3600)
@pytest.mark.xdist_group("ray")
def test_the_whole_proof_holds_on_another_recipe_and_another_chain_fed_by_ray_too(tmp_path: Path) -> None:
    packing, sources = {"algorithm": "best_fit", "buffer": 32}, ("a", "b", "c")
    recipe = tiny_corpus(
        tmp_path / "corpus", sources=sources, lanes=4, global_batch_size=12, sequence_length=48, packing=packing, texts=300
    )
    command = [sys.executable, "-m", "zephon_ray.training.elastic_proof", "--recipe", str(recipe), "--out", str(tmp_path / "out")]
    done = subprocess.run([*command, "--sizes", "1,3,6", "--chain", "6,3,1,4,2"], capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stderr
    assert all(
        word in done.stdout for word in ("PROVED", "FSDP 6", "chain 6→3→1→4→2", "embedded Ray", "a served feed", "the feed of the host")
    )


def test_numbers_of_ranks_that_do_not_divide_the_batch_are_refused_with_those_that_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_corpus(tmp_path / "corpus", lanes=4, global_batch_size=12)
    for option in ("--sizes", "--chain"):
        assert main(["--recipe", str(recipe), option, "4,5"]) == 2
        assert "dp_world_size=5" in capsys.readouterr().err
    assert main(["--recipe", str(recipe), "--chain", "4"]) == 2
    assert "at least two" in capsys.readouterr().err
    odd = tiny_corpus(tmp_path / "odd", lanes=3, global_batch_size=9)
    with pytest.raises(UserError, match="global_batch_size=9 is odd"):
        make_setting(tmp_path, odd)


def test_a_recipe_that_ends_too_soon_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    path = tiny_corpus(tmp_path / "corpus", sources=["web"])
    recipe = load_recipe(path, overrides=["sources[0].epochs=1"])
    with pytest.raises(UserError, match="ends after step"):
        make_reference(recipe, 1000)


def test_sizes_and_chain_follow_the_recipe_where_none_are_given(tmp_path: Path) -> None:
    setting = make_setting(tmp_path / "out", tiny_corpus(tmp_path / "corpus", lanes=2, global_batch_size=4))
    assert (setting.sizes, setting.chain) == ((1, 2, 4), (4, 2, 1))
    assert not setting.fits(Mesh(shard=8))
    long_chain = make_setting(tmp_path / "long", tmp_path / "corpus" / "recipe.yaml", chain=[4, 2, 1, 2, 4, 1])
    assert long_chain.chain_ends() == [7, 9, 11, 13, 15, 16]
    assert all(end % 2 for end in long_chain.chain_ends()[:-1])


REFERENCE_ROWS = {5: (b"a" * 16, b"b" * 16), 6: (b"c" * 16, b"d" * 16)}


def reference() -> Reference:
    digests, chains = [b""] * 5, [bytes(16)] * 5
    for step, rows in REFERENCE_ROWS.items():
        digest, chain = fold(step, chains[-1], rows)
        digests.append(digest)
        chains.append(chain)
    return Reference(digests=digests, chains=chains, states=[])


def outcome(steps: dict[int, TrainedStep], *, bitwise: bool = False) -> Outcome:
    losses = {step: TrainedStep(step=step, rows=rows, loss=2.0, peers=0) for step, rows in REFERENCE_ROWS.items()}
    return compare(losses | steps, range(5, 7), reference(), losses, bitwise=bitwise, title="", ranks="", rows="", seconds=0.0)


def test_a_row_that_was_changed_moved_or_left_out_is_a_difference() -> None:
    a, b = REFERENCE_ROWS[5]
    assert outcome({}).good
    for rows in ((a, a), (b, a), (a,), (a, b, b)):
        found = outcome({5: TrainedStep(step=5, rows=rows, loss=2.0, peers=0)})
        assert (found.good, found.differing) == (False, (5, 6))  # the chain tells of it ever after


def test_a_step_that_was_not_trained_is_a_difference() -> None:
    steps = {step: TrainedStep(step=step, rows=rows, loss=2.0, peers=0) for step, rows in REFERENCE_ROWS.items()}
    found = compare({5: steps[5]}, range(5, 7), reference(), steps, bitwise=False, title="", ranks="", rows="", seconds=0.0)
    assert (found.good, found.differing) == (False, (6,))


def test_losses_may_differ_by_the_tolerance_and_by_no_bit_where_ranks_are_laid_out_alike() -> None:
    def moved(by: float) -> dict[int, TrainedStep]:
        return {6: TrainedStep(step=6, rows=REFERENCE_ROWS[6], loss=2.0 + by, peers=0)}

    assert outcome(moved(0.9 * TOLERANCE)).good
    assert not outcome(moved(1.1 * TOLERANCE)).good
    assert not outcome(moved(1e-9), bitwise=True).good


def records(folder: Path, mesh: Mesh, lines: dict[int, tuple[int, list[bytes], float]]) -> Job:
    job = Job(
        name="job", folder=folder, recipe=folder, tokenizer=folder, vocabulary=16, sequence_length=8, global_batch_size=4,
        local_batch_size=1, mesh=mesh, steps=1,
    )  # fmt: skip
    for rank, (dp_rank, rows, loss) in lines.items():
        job.record(rank).parent.mkdir(parents=True, exist_ok=True)
        line = {"step": 1, "dp_rank": dp_rank, "rows": [row.hex() for row in rows], "loss": loss}
        job.record(rank).write_text(json.dumps(line) + "\n", encoding="utf-8")
    return job


def test_rows_are_joined_in_the_order_of_data_parallel_ranks_and_peers_count_once(tmp_path: Path) -> None:
    job = records(tmp_path, Mesh(shard=2, tensor=2), {0: (1, [b"c"], 1.0), 1: (1, [b"c"], 1.0), 2: (0, [b"a"], 1.0), 3: (0, [b"a"], 1.0)})
    assert trained(job) == {1: TrainedStep(step=1, rows=(b"a", b"c"), loss=1.0, peers=4)}


def test_peers_with_other_rows_and_ranks_with_other_losses_are_differences(tmp_path: Path) -> None:
    with pytest.raises(DifferenceError, match="rank 1 was given other rows"):
        trained(records(tmp_path / "rows", Mesh(tensor=2), {0: (0, [b"a"], 1.0), 1: (0, [b"b"], 1.0)}))
    with pytest.raises(DifferenceError, match="losses"):
        trained(records(tmp_path / "losses", Mesh(shard=2), {0: (0, [b"a"], 1.0), 1: (1, [b"b"], 1.5)}))
    with pytest.raises(DifferenceError, match="losses"):
        trained(records(tmp_path / "nan", Mesh(), {0: (0, [b"a"], float("nan"))}))
