"""The commands as people and scripts use them: what they print, where, and what they end with."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer

import zephon_ray
from tests.golden_cases import GOLDEN, GoldenCase
from tests.small import a_recipe
from zephon_ray import runs
from zephon_ray.cli.main import app, run_command
from zephon_ray.cli.render import number, size
from zephon_ray.errors import RunnerError
from zephon_ray.recipe import Recipe

ROOT = Path(__file__).parents[1]
CASE = GOLDEN / "wrap_two_sources"
RECIPE = str(CASE / "recipe.yaml")
VERBS = ("demo", "validate", "index", "plan", "run", "prewarm", "bench", "verify", "prove", "serve", "stop", "status")


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What a command printed and ended with."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        (line,) = self.out.splitlines()
        return json.loads(line)


Cli = Callable[..., Said]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    def run(*arguments: object) -> Said:
        capfd.readouterr()
        code = run_command(_with_runner(arguments))
        out, err = capfd.readouterr()
        return Said(code=code, out=out, err=err)

    return run


def _with_runner(arguments: Sequence[object]) -> list[str]:
    """Commands that read run on threads, unless they say otherwise: Ray, the default, is slow to start, and has tests of its own."""
    words = [str(a) for a in arguments]
    return [*words, "--runner", "threads"] if words[:1] in (["run"], ["verify"]) and not {"--runner", "--help"} & {*words} else words


@pytest.fixture
def own_case(tmp_path: Path) -> Path:
    """A copy of the case that a test may change; returns its recipe."""
    shutil.copytree(CASE, tmp_path / "case")
    shutil.copy(GOLDEN / "tokenizer.json", tmp_path / "tokenizer.json")
    return tmp_path / "case" / "recipe.yaml"


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "zephon_ray", *_with_runner(arguments)]


def _expected(steps: int) -> list[str]:
    return (CASE / "expected.jsonl").read_text().splitlines()[:steps]


# ------------------------------------------------------------------ the program


def test_help_names_every_command_and_exit_code(cli: Cli) -> None:
    said = cli("--help")
    assert said.code == 0
    assert all(verb in said.out for verb in VERBS)
    assert "Exit codes" in said.out
    assert cli().out == said.out, "without arguments help is shown too"


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_command_gives_an_example_that_parses(cli: Cli, verb: str) -> None:
    said = cli(verb, "--help")
    text = " ".join(said.out.split())
    example = re.search(rf"Example: zephon-ray ({verb} .*?)$", text)
    assert said.code == 0
    assert example, text
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    command.make_context(verb, example[1].split()[1:]).close()  # raises what is wrong with it
    assert "--json" in text


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from zephon_ray.cli.main import app, run_command; code = run_command(['--help']);"
        "heavy = {'numpy', 'pyarrow', 'pydantic', 'tokenizers', 'ray', 'torch'} & set(sys.modules);"
        "sys.stderr.write(f'{code} {sorted(heavy)}')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=_environment(), capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "0 []"


def test_the_module_and_the_version(cli: Cli) -> None:
    done = subprocess.run(_command("--version"), env=_environment(), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"zephon-ray {zephon_ray.__version__}\n" == cli("--version").out


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["run", RECIPE],
        ["run", RECIPE, "--steps", "0"],
        ["run", RECIPE, "--steps", "many"],
        ["run", RECIPE, "--steps", "1", "--runner", "abacus"],
        ["run", RECIPE, "--steps", "1", "--workers", "0"],
        ["run", RECIPE, "--steps", "1", "--dp-size", "3"],
        ["run", RECIPE, "--steps", "1", "--out", "/proc/no/such"],
        ["run", "nowhere.yaml", "--steps", "1"],
        ["validate"],
        ["validate", RECIPE, "--dp-size", "5"],
        ["validate", RECIPE, "--set", "lanes"],
        ["validate", RECIPE, "--set", "nonsense=1"],
        ["plan", RECIPE, "--gpus", "8,eight"],
        ["plan", RECIPE, "--gpus", "0"],
        ["plan", RECIPE, "--tokens-per-second", "nan"],
        ["plan", RECIPE, "--cpu-per-mtok", "-1"],
        ["verify", "nowhere"],
        ["verify", str(CASE)],
        ["verify", "nowhere", "--steps", "7:3"],
        ["verify", "nowhere", "--steps", "0:3"],
        ["verify", "nowhere", "--steps", "a:b"],
        ["verify", "nowhere", "--set", "lanes=4"],
        ["run", RECIPE, "--steps", "1", "--address", "127.0.0.1:1"],
        ["demo", "--runner", "threads", "--address", "127.0.0.1:1"],
        ["index", RECIPE, "--out", "/proc/no/such"],
        ["demo", "--steps", "1"],
    ],
    ids=lambda a: " ".join(a).replace(RECIPE, "R").replace(str(CASE), "CASE"),
)
def test_a_mistake_is_told_in_a_sentence_and_ends_with_2(cli: Cli, arguments: list[str]) -> None:
    said = cli(*arguments)
    assert said.code == 2
    assert said.out == ""
    assert "zephon-ray: " in said.err
    assert "Traceback" not in said.err
    scripted = cli(*arguments, "--json")
    assert scripted.code == 2
    error = scripted.json["error"]
    assert error["kind"]
    assert "--address" not in arguments or "address=127.0.0.1:1" in error["message"]
    assert error["problems"]
    assert all(problem in error["message"] for problem in error["problems"])


def test_a_fault_of_the_system_ends_with_3_and_a_traceback_only_on_demand(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object, **__: object) -> None:
        raise RunnerError("workers go on dying")

    monkeypatch.setattr("zephon_ray.runs.produce", die)
    said = cli("run", RECIPE, "--steps", 1)
    assert (said.code, said.err) == (3, "zephon-ray: workers go on dying\n")
    monkeypatch.setenv("ZEPHON_RAY_DEBUG", "1")
    assert "Traceback" in cli("run", RECIPE, "--steps", 1).err


def test_a_fault_of_ours_is_called_that_and_ends_with_3(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zephon_ray.runs.produce", lambda *_, **__: 1 // 0)
    said = cli("run", RECIPE, "--steps", 1)
    assert said.code == 3
    assert "a fault of zephon-ray itself: ZeroDivisionError" in said.err


def test_ray_is_the_default_and_joins_the_cluster_that_is_named_alone(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def stream(recipe: Recipe, *, runner: str | None, address: str | None, **_: object) -> None:
        asked.append((runner or recipe.execution.runner, address))
        raise RunnerError("enough")

    monkeypatch.setattr("zephon_ray.runs.Stream", stream)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    for arguments in (["--runner", "threads"], [], ["--address", "127.0.0.1:2"]):
        assert run_command(["run", RECIPE, "--steps", "1", "--quiet", *arguments]) == 3
    assert asked == [("threads", None), ("ray", None), ("ray", "127.0.0.1:2")]
    run_help, demo_help = (" ".join(cli(verb, "--help").out.replace("│", " ").split()) for verb in ("run", "demo"))
    assert "whatever RAY_ADDRESS says" in run_help
    assert "[default: ray]" in demo_help


# ------------------------------------------------------------------ validate, index, plan


@pytest.mark.parametrize("verb", ["validate", "index", "plan"])
def test_what_makes_no_units_does_without_ray(cli: Cli, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    for module in ("ray", "zephon_ray.runners.ray_data", "zephon_ray.runners.ray_cluster"):
        monkeypatch.setitem(sys.modules, module, None)
    assert cli(verb, RECIPE, "--set", "execution.runner=ray").code == 0


def test_validate_finds_nothing_wrong_with_a_golden_case(cli: Cli, golden_case: GoldenCase) -> None:
    assert cli("validate", golden_case.recipe).code == 0


def test_validate_tells_of_all_mistakes_at_once(cli: Cli) -> None:
    said = cli("validate", RECIPE, "--dp-size", 5, "--set", "tokenizer.bos=nope", "--set", "sources[0].uri=/nowhere", "--json")
    problems = said.json["error"]["problems"]
    assert said.code == 2
    assert [p.split()[0].split("=")[0] for p in problems] == ["dp_world_size", "tokenizer.bos", "source"]
    fields = cli("validate", RECIPE, "--set", "lanes=7", "--set", "sources.prose.weight=-1", "--json").json["error"]["problems"]
    assert len(fields) == 2


def test_validate_does_not_read_and_deep_reads_every_record(cli: Cli, own_case: Path) -> None:
    shard = sorted((own_case.parent / "prose").iterdir())[1]
    lines = shard.read_bytes().splitlines(keepends=True)
    lines[3] = b"[1]".ljust(len(lines[3]) - 1) + b"\n"
    lines[20] = b"oops".ljust(len(lines[20]) - 1) + b"\n"
    shard.write_bytes(b"".join(lines))
    assert cli("validate", own_case).code == 0
    said = cli("validate", own_case, "--deep", "--json")
    assert said.code == 2
    assert [d["bad"] for d in said.json["deep"]] == [2, 0]
    problems = " ".join(said.json["error"]["problems"])
    assert problems.count(shard.name) == 2
    assert "not a JSON object" in problems
    assert "on_bad_record is fail" in problems
    allowed = cli("validate", own_case, "--deep", "--set", "on_bad_record=skip", "--json")
    assert (allowed.code, [d["bad"] for d in allowed.json["deep"]]) == (0, [2, 0])
    limited = cli("validate", own_case, "--deep", "--set", "on_bad_record=skip", "--set", "sources[0].max_bad_records=1")
    assert (limited.code, "max_bad_records=1" in limited.err) == (2, True)


def test_deep_counts_what_is_there(cli: Cli) -> None:
    prose, code = cli("validate", RECIPE, "--deep", "--json").json["deep"]
    texts = [json.loads(line)["text"] for shard in (CASE / "prose").iterdir() for line in shard.read_text().splitlines()]
    assert prose["documents"] + prose["short"] + prose["empty"] == len(texts)
    assert prose["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert prose["pairs"] == prose["ids"] - prose["documents"]
    assert code["documents"] == 160


def test_deep_names_a_damaged_shard_and_a_source_without_documents(cli: Cli, own_case: Path) -> None:
    shard = sorted((own_case.parent / "code").iterdir())[0]
    data = bytearray(shard.read_bytes())
    data[100:400] = bytes(300)
    shard.write_bytes(data)
    for plain in (own_case.parent / "prose").iterdir():
        plain.write_text('{"text": ""}\n')
    problems = cli("validate", own_case, "--deep", "--json").json["error"]["problems"]
    assert any(shard.name in problem for problem in problems)
    assert any("'prose'" in problem and "no document" in problem for problem in problems)


def test_index_lists_what_manifests_know_and_writes_them(cli: Cli, tmp_path: Path) -> None:
    said = cli("index", RECIPE, "--json", "--out", tmp_path / "manifests")
    prose, code = said.json["sources"]
    assert (prose["shards"], prose["groups"], prose["units"], prose["rows"]) == (3, 10, 10, None)
    assert (code["formats"], code["rows"]) == ({"parquet": 2}, 160)
    assert prose["size"] == sum(path.stat().st_size for path in (CASE / "prose").iterdir())
    assert [json.loads(Path(place).read_text()) for place in said.json["written"]] == [s["manifest"] for s in said.json["sources"]]
    assert "when read" in cli("index", GOLDEN / "all_defaults" / "recipe.yaml").out, "units of compressed files"


def test_plan_estimates_any_golden_case(cli: Cli, golden_case: GoldenCase) -> None:
    said = cli("plan", golden_case.recipe, "--gpus", "8", "--json")
    assert said.code == 0
    assert sum(s["target"] for s in said.json["forecast"]["sources"]) == pytest.approx(1)


def test_plan_says_which_numbers_of_ranks_are_possible(cli: Cli) -> None:
    said = cli("plan", RECIPE, "--gpus", "8,6,32", "--json").json["forecast"]
    assert [(r["dp_size"], r["legal"], r["nearest"]) for r in said["asked"]] == [(8, True, [8]), (6, False, [4, 8]), (32, False, [16])]
    assert "6 ranks: cannot share the rows evenly; use 4 or 8" in cli("plan", RECIPE, "--gpus", "6").out


def test_the_estimates_of_plan_are_near_what_deep_counts(cli: Cli) -> None:
    planned = cli("plan", RECIPE, "--steps", 500, "--json").json["forecast"]["sources"]
    counted = cli("validate", RECIPE, "--deep", "--json").json["deep"]
    for estimate, count in zip(planned, counted, strict=True):
        assert estimate["about_epoch_pairs"] == pytest.approx(count["pairs"], rel=0.25)
        assert estimate["about_epoch_documents"] == pytest.approx(count["documents"], rel=0.25)


def test_plan_turns_speed_into_cores_and_bandwidth(cli: Cli) -> None:
    said = cli("plan", RECIPE, "--tokens-per-second", "2e6", "--cpu-per-mtok", "1.5", "--json").json["forecast"]
    assert said["cores"] == pytest.approx(3.0)
    assert said["about_text_bytes_per_second"] > 2e6
    assert cli("plan", RECIPE, "--json").json["forecast"]["cores"] is None


def test_plan_foresees_the_end_of_epochs(cli: Cli) -> None:
    ends = cli("plan", RECIPE, "--set", "sources[0].epochs=1", "--json").json["forecast"]["about_last_step"]
    steps = cli("run", RECIPE, "--set", "sources[0].epochs=1", "--steps", 10_000, "--json").json
    assert steps["ended"]
    assert ends == pytest.approx(steps["last_step"], rel=0.3)


# ------------------------------------------------------------------ run, verify


@pytest.mark.parametrize("runner", ["inline", "threads", "processes"])
def test_run_prints_the_golden_digests_as_json_lines(cli: Cli, runner: str) -> None:
    said = cli("run", RECIPE, "--steps", 6, "--runner", runner, "--workers", 2, "--print-digests", "--json", "--dp-size", 4)
    assert said.code == 0
    assert said.out.splitlines() == _expected(6)


def test_run_prints_digests_alone_on_stdout(cli: Cli) -> None:
    said = cli("run", RECIPE, "--steps", 3, "--print-digests")
    want = [json.loads(line) for line in _expected(3)]
    assert said.out.splitlines() == [f"{w['step']} {w['digest']} {w['chain']}" for w in want]
    assert want[-1]["chain"] in said.err


def test_quiet_says_nothing_and_the_summary_says_what_was_made(cli: Cli) -> None:
    assert cli("run", RECIPE, "--steps", 2, "--quiet") == Said(code=0, out="", err="")
    summary = cli("run", RECIPE, "--steps", 4, "--json").json
    assert (summary["first_step"], summary["last_step"], summary["ended"], summary["stopped"]) == (1, 4, False, None)
    assert summary["chain"] == json.loads(_expected(4)[-1])["chain"]
    assert sum(m["realised"] for m in summary["mixture"].values()) == pytest.approx(1)
    text = cli("run", RECIPE, "--steps", 4).out
    assert all(word in text for word in ("target 70.00 %", "tokens/s", "CPU s a million tokens", "padding", "units read"))


def test_the_cpu_of_a_cluster_that_was_joined_is_said_to_be_left_out(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    produce = runs.produce
    monkeypatch.setattr(runs, "produce", lambda *a, **more: replace(produce(*a, **more), cpu_elsewhere=True))
    summary = cli("run", RECIPE, "--steps", 2, "--json").json
    assert summary["cpu_elsewhere"]
    assert summary["cpu_seconds_per_mtok"] is None
    assert "CPU s here; the cluster's are not counted" in cli("run", RECIPE, "--steps", 2).out


def test_a_directory_is_continued_and_verified(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "run"
    cli("run", RECIPE, "--steps", 3, "--out", out, "--quiet")
    more = cli("run", RECIPE, "--steps", 6, "--out", out, "--print-digests", "--json")
    assert more.out.splitlines() == _expected(6)[3:]
    again = cli("run", RECIPE, "--steps", 6, "--out", out)
    assert "none to make" in again.out
    for steps, first, last in [("", 1, 6), ("2:4", 2, 4), ("5:", 5, 6), (":3", 1, 3), ("4", 4, 4)]:
        said = cli("verify", out, "--steps", steps, "--json") if steps else cli("verify", out, "--json")
        assert said.code == 0
        assert {k: said.json[k] for k in ("equal", "first_step", "last_step", "steps")} == {
            "equal": True, "first_step": first, "last_step": last, "steps": last - first + 1,
        }  # fmt: skip
    assert cli("verify", out, "--steps", "5:9").code == 2


def test_a_directory_of_another_run_is_refused_by_the_fields_that_differ(cli: Cli, tmp_path: Path) -> None:
    cli("run", RECIPE, "--steps", 2, "--out", tmp_path / "run", "--quiet")
    said = cli("run", RECIPE, "--steps", 3, "--out", tmp_path / "run", "--set", "seed=1")
    assert said.code == 2
    assert "seed: the directory has 20016, this run 1" in said.err


def test_verify_ends_with_1_where_the_data_was_changed(cli: Cli, own_case: Path, tmp_path: Path) -> None:
    cli("run", own_case, "--steps", 6, "--out", tmp_path / "run", "--quiet")
    for shard in (own_case.parent / "prose").iterdir():
        shard.write_text(shard.read_text().replace("y", "z"))
    said = cli("verify", tmp_path / "run", "--json")
    assert said.code == 1
    assert said.json["error"]["kind"] == "DataChangedError"
    assert "source 'prose', shard part-" in said.json["error"]["message"]


def test_verify_finds_data_that_moved(cli: Cli, own_case: Path, tmp_path: Path) -> None:
    cli("run", own_case, "--steps", 4, "--out", tmp_path / "run", "--quiet")
    moved = own_case.parent.rename(tmp_path / "elsewhere") / "recipe.yaml"
    assert cli("verify", tmp_path / "run").code == 2
    assert cli("verify", tmp_path / "run", "--recipe", moved).code == 0
    assert cli("verify", tmp_path / "run", "--recipe", moved, "--set", "seed=5").code == 2


def test_a_stream_that_ends_early_is_no_error(cli: Cli) -> None:
    said = cli("run", GOLDEN / "validation_pad" / "recipe.yaml", "--steps", 10_000)
    assert said.code == 0
    assert "the stream ended after step" in said.err


# ------------------------------------------------------------------ signals and pipes


def _wait_for_lines(path: Path, process: subprocess.Popen[bytes], lines: int) -> None:
    deadline, pause = time.monotonic() + 90, threading.Event()
    while path.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < deadline
        pause.wait(0.01)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("sent", "code", "runner"),
    [
        (signal.SIGTERM, 0, "threads"),
        (signal.SIGINT, 130, "processes"),
        pytest.param(signal.SIGINT, 130, "threads", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 0, "processes", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 0, "ray", marks=pytest.mark.xdist_group("ray")),
    ],
)
def test_a_signal_finishes_the_step_and_saves_where_it_stopped(
    cli: Cli, tmp_path: Path, sent: signal.Signals, code: int, runner: str
) -> None:
    out, printed = tmp_path / "run", tmp_path / "printed"
    arguments = _command("run", RECIPE, "--steps", 1_000_000, "--out", out, "--print-digests", "--runner", runner, "--workers", 2)
    with printed.open("wb") as file:
        process = subprocess.Popen(arguments, env=_environment(), stdout=file, stderr=subprocess.PIPE, start_new_session=True)
    try:
        _wait_for_lines(printed, process, 3)
        os.killpg(process.pid, sent)  # as a scheduler does: to all of them
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    last = int(printed.read_text().splitlines()[-1].split()[0])
    assert process.returncode == code
    assert f"stopped at step {last}; continue with the same command" in err.decode()
    assert (out / "states" / f"{last:012d}.json").exists()
    said = cli("run", RECIPE, "--steps", last + 1, "--out", out, "--json", "--workers", 1)
    assert (said.json["first_step"], said.json["last_step"]) == (last + 1, last + 1)
    assert cli("verify", out, "--steps", f"{last}:{last + 1}").code == 0


@pytest.mark.fault
def test_a_closed_pipe_ends_a_run_without_a_word() -> None:
    with subprocess.Popen(
        _command("run", RECIPE, "--steps", 1_000_000, "--print-digests", "--quiet"),
        env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline().startswith(b"1 ")
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == b""


def test_nothing_is_drawn_where_there_is_no_terminal() -> None:
    done = subprocess.run(_command("run", RECIPE, "--steps", 3), env=_environment(), capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout


# ------------------------------------------------------------------ numbers, house


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (7, "7"), (7.25, "7.2"), (999, "999"), (1000, "1.00 k"), (31512085, "31.5 M"), (999_999, "1000 k"), (2.5e15, "2500 T")],
)
def test_numbers_are_short(count: float, text: str) -> None:
    assert number(count) == text


def test_sizes_have_a_unit() -> None:
    assert [size(0), size(945), size(65536)] == ["0 B", "945 B", "65.5 kB"]


def test_only_commands_import_the_command_line() -> None:
    for path in (ROOT / "zephon_ray").rglob("*.py"):
        if {"cli", "elastic_proof"} & set(path.parts) or path.name == "__main__.py":  # the proof is a command of its own
            continue
        nodes = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import | ast.ImportFrom))
        names = {name for n in nodes for name in ([n.module or ""] if isinstance(n, ast.ImportFrom) else [a.name for a in n.names])}
        assert not [name for name in names if name.startswith(("typer", "rich", "zephon_ray.cli"))], path


def test_deep_validation_finds_a_stream_that_is_too_short_for_a_batch(cli: Cli, tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path, {"a": {"epochs": 1}}, global_batch_size=4096)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    said = cli("validate", "--deep", tmp_path / "recipe.yaml")
    assert said.code == 2
    assert "final_batch: pad" in said.err + said.out
    assert cli("validate", "--deep", tmp_path / "recipe.yaml", "--set", "final_batch=pad").code == 0
    assert cli("run", tmp_path / "recipe.yaml", "--steps", 3).code == 2
