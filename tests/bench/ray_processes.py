"""CPU seconds a million tokens of each process of a stream on a Ray cluster of its own.

    python tests/bench/ray_processes.py RECIPE [--seconds 10] [--warm 8] [--set PATH=VALUE ...]

`zephon-ray bench --runner ray` gives their sum, this where it goes. Processes that took less than 0.0002 are left out.
"""

from __future__ import annotations

import argparse
import time

import psutil

from zephon_ray.recipe import load_recipe
from zephon_ray.stream import Stream

LEAST = 0.0002


def cpu_of_processes() -> dict[tuple[int, str], float]:
    """CPU seconds so far by (process id, name)."""
    found = {}
    for process in (here := psutil.Process(), *here.children(recursive=True)):
        try:
            times = process.cpu_times()
            found[process.pid, " ".join(process.cmdline()).partition(" --")[0].rsplit("/", 1)[-1].strip()] = times.user + times.system
        except psutil.Error:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm", type=float, default=8.0)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    args = parser.parse_args()
    stream = Stream(load_recipe(args.recipe, args.overrides), runner="ray")
    try:
        end = time.monotonic() + args.warm
        while time.monotonic() < end:
            stream.next_batch()
        before, tokens, end = cpu_of_processes(), 0, time.monotonic() + args.seconds
        while time.monotonic() < end and (batch := stream.next_batch()) is not None:
            tokens += batch.rows.shape[0] * batch.rows.shape[2]
        after = cpu_of_processes()
    finally:
        stream.close()
    costs: dict[str, float] = {}
    for (pid, name), seconds in after.items():
        # A process is named by what it does at the moment, so only its number tells what it took before.
        taken = seconds - next((s for (p, _), s in before.items() if p == pid), 0.0)
        costs[name] = costs.get(name, 0.0) + taken / max(1, tokens) * 1e6
    for name, cost in sorted(costs.items(), key=lambda item: -item[1]):
        if cost >= LEAST:
            print(f"{cost:.4f}  {name}")
    print(f"{sum(costs.values()):.4f}  all, at {tokens / args.seconds / 1e6:.1f} M tokens a second")


if __name__ == "__main__":
    main()
