"""CPU time is counted of every process that was started, however it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from zephon_ray.telemetry import CpuMeter, descendants

BURN = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
CHILD = f"{BURN}print('done', flush=True); input()"
PARENT = f"""
import os, signal, subprocess, sys
signal.signal(signal.SIGCHLD, {{handler}})
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
input()
os.kill(child.pid, signal.SIGKILL)
if {{waits}}:
    child.wait()
else:
    while os.path.exists(f"/proc/{{{{child.pid}}}}"): pass
print("gone", flush=True)
input()
"""


@contextmanager
def started(code: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()


def test_what_this_process_uses_is_counted() -> None:
    meter, end = CpuMeter(), time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert 0.2 <= meter.seconds() < 0.5


def test_a_child_counts_once_while_it_lives_and_after_it_ended() -> None:
    meter = CpuMeter()
    with started(CHILD) as child:
        assert line(child) == "done"
        assert child.pid in [process.pid for process in descendants()]
        alive = meter.seconds()
    assert 0.3 <= alive < 0.8
    assert alive <= meter.seconds() < alive + 0.3
    assert child.pid not in [process.pid for process in descendants()]


def test_what_a_child_used_before_is_not_counted() -> None:
    with started(CHILD) as child:
        assert line(child) == "done"
        meter = CpuMeter()
        assert meter.seconds() < 0.2
    assert meter.seconds() < 0.2


@pytest.mark.parametrize(("handler", "waits"), [("signal.SIG_IGN", False), ("signal.SIG_DFL", True)], ids=["ignored", "waited for"])
def test_a_killed_grandchild_counts_once_whether_or_not_its_parent_waits_for_it(handler: str, waits: bool) -> None:
    meter = CpuMeter()
    with started(PARENT.format(handler=handler, waits=waits)) as parent:
        pid = int(line(parent))
        assert {parent.pid, pid} <= {process.pid for process in descendants()}
        meter.look(now=True)
        go_on(parent)
        assert line(parent) == "gone"
        assert pid not in [process.pid for process in descendants()]
        used = meter.seconds()
        assert used >= 0.3
    assert used - 0.1 <= meter.seconds() < used + 0.3, "and again when the parent is gone"


def test_a_process_that_ends_while_it_is_looked_at_does_no_harm() -> None:
    meter = CpuMeter()
    with started(CHILD) as child:
        line(child)
        os.kill(child.pid, signal.SIGKILL)
        meter.look(now=True)  # it is dead, and not waited for
    assert meter.seconds() >= 0.3
