"""Of several processes exactly one is elected, whoever dies when."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from zephon_ray.errors import FeedError, UserError
from zephon_ray.feed.election import Election, private_folder

PROCESS = """
import sys
from pathlib import Path
from zephon_ray.feed.election import Election
election = Election("it", Path(sys.argv[1]))
found = election.run(30.0)
if found is None:
    election.publish({"by": sys.argv[2]})
    print("made", flush=True)
else:
    print("found " + found["by"], flush=True)
input()
election.resign()
"""


@contextmanager
def standing(folder: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", PROCESS, str(folder), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def test_of_eight_processes_exactly_one_makes_it_and_seven_find_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        processes = [stack.enter_context(standing(tmp_path, str(number))) for number in range(8)]
        answers = [said(process) for process in processes]
        (maker,) = [number for number, answer in enumerate(answers) if answer == "made"]
        assert sorted(answers) == [f"found {maker}"] * 7 + ["made"]


def test_after_a_kill_another_is_elected_and_what_the_dead_one_published_is_not_found(tmp_path: Path) -> None:
    with standing(tmp_path, "first") as first:
        assert said(first) == "made"
        first.kill()
        first.wait()
        assert (tmp_path / "it.json").exists()
        with standing(tmp_path, "second") as second:
            assert said(second) == "made"
            with standing(tmp_path, "third") as third:
                assert said(third) == "found second"


def test_who_was_elected_waits_for_those_who_use_it_and_a_dead_one_does_not_count(tmp_path: Path) -> None:
    election = Election("it", tmp_path)
    assert election.run(1.0) is None
    election.publish({"by": "us"})
    with standing(tmp_path, "user") as user:
        assert said(user) == "found us"
        assert not election.wait_for_users(0.2)
        user.kill()
        user.wait()
        assert election.wait_for_users(10.0)
    election.resign()
    election.resign()
    assert not (tmp_path / "it.json").exists()


def test_one_that_is_never_ready_is_not_waited_for_longer_than_asked(tmp_path: Path) -> None:
    first, second = Election("it", tmp_path), Election("it", tmp_path)
    assert first.run(1.0) is None
    with pytest.raises(FeedError, match=r"'it' for 0\.2 s"):
        second.run(0.2)
    first.resign()
    assert second.run(1.0) is None
    second.resign()


def test_locks_lie_in_a_folder_that_only_its_owner_may_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = private_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    election = Election("it", folder)
    election.run(1.0)
    election.publish({})
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    election.resign()
    os.chmod(folder, 0o755)  # noqa: PTH101
    with pytest.raises(UserError, match="0700"):
        private_folder()
