"""Speed of the ordered part alone: deal, mix, pack and digest tokenised units that are in memory.

    python tests/bench/collector.py [--lanes 8 1024] [--tokens 600 60] [--packing wrap best_fit] [--groups 1] [--rows 1024]

Prints millions of next-token pairs per CPU second, the median of some rounds; lanes and lengths are interleaved, so that
a noisy machine hits all alike. Two sources (0.7 and 0.3), sequences of 2,048, windows of sixteen units of 256k ids.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from zephon_ray.feeding import FedWindows, Window
from zephon_ray.joining import join_blocks
from zephon_ray.lane_blocks import beginning, split_lanes
from zephon_ray.lanes import LaneGroup
from zephon_ray.plan.windows import Position
from zephon_ray.recipe import Recipe, recipe_from_dict
from zephon_ray.stages.unit import TokenisedUnit

UNITS, UNIT_IDS, SEQUENCE, ROWS = 16, 262_144, 2048, 64
WARM_PAIRS, WARM_PAIRS_A_LANE = 40_000_000, 200_000  # until as many windows are held as ever are, so that room for them is made already


def a_recipe(lanes: int, packing: str, rows: int) -> Recipe:
    fields = {
        "schema": 1, "name": "bench", "seed": 1, "lanes": lanes, "sequence_length": SEQUENCE, "global_batch_size": max(rows, lanes),
        "tokenizer": {"path": "tokenizer.json", "pad": "<|pad|>"}, "packing": {"algorithm": packing},
        "sources": [{"name": "web", "uri": "web", "weight": 0.7}, {"name": "code", "uri": "code", "weight": 0.3}],
    }  # fmt: skip
    return recipe_from_dict(fields, "/nowhere")


def windows(mean_tokens: int, seed: int) -> Iterator[FedWindows[TokenisedUnit]]:
    """Endless windows of documents of 2 to 2*mean_tokens-2 ids; four different ones in turn."""
    draw = np.random.default_rng(seed)
    made = []
    for number in range(4):
        units = []
        for group in range(UNITS):
            lengths = draw.integers(2, 2 * mean_tokens - 1, UNIT_IDS // mean_tokens)
            offsets = np.concatenate(([0], np.cumsum(lengths)))
            ids = draw.integers(0, 100_000, int(offsets[-1]), dtype=np.uint32)
            nothing = TokenisedUnit.nothing(source=0, epoch=0, group=group, unit=number)
            units.append(replace(nothing, ids=ids, offsets=offsets))
        made.append(units)
    epoch = 0
    while True:
        for units in made:
            place = Position(epoch=epoch, window=0, places=())
            yield FedWindows(windows=[Window(position=place, units=units)], after=place)
        epoch += 1


def pairs_per_cpu_second(
    lanes: int, mean_tokens: int, packing: str, seconds: float, groups: int = 1, warm_pairs: int | None = None, rows: int = ROWS
) -> float:
    """Of all groups together, one after the other in this process, for batches of `rows` rows or one a lane."""
    warm = WARM_PAIRS + lanes * WARM_PAIRS_A_LANE if warm_pairs is None else warm_pairs
    recipe = a_recipe(lanes, packing, rows)
    place = Position(epoch=0, window=0, places=())
    parts = [LaneGroup(recipe, beginning(recipe, [place, place]), lanes=of) for of in split_lanes(lanes, groups)]
    sources = [windows(mean_tokens, seed) for seed in (1, 2)]
    chain, began, pairs_began = bytes(16), 0.0, 0
    while True:
        for group in parts:
            while (want := group.want()) is not None:
                fed = next(sources[want.source])
                for each in parts:
                    each.feed(want.source, fed)
        height = recipe.rows_per_lane
        made = np.empty((recipe.global_batch_size, 3, SEQUENCE), np.int32)
        step = join_blocks(chain, [g.next_step(made[g.lanes.start * height : g.lanes.stop * height]) for g in parts])
        chain, pairs = step.chain, int(step.pairs.sum())
        if not began and pairs > warm:
            began, pairs_began = time.process_time(), pairs
        elif began and time.process_time() - began > seconds:
            return (pairs - pairs_began) / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lanes", type=int, nargs="+", default=[8, 1024])
    parser.add_argument("--tokens", type=int, nargs="+", default=[600, 60])
    parser.add_argument("--packing", nargs="+", default=["wrap", "best_fit"])
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--rows", type=int, default=ROWS, help="of a batch, or one a lane where there are more lanes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    cases = [(p, t, n) for p in args.packing for t in args.tokens for n in args.lanes]
    rates: dict[tuple[str, int, int], list[float]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for packing, tokens, lanes in cases:
            rate = pairs_per_cpu_second(lanes, tokens, packing, args.seconds, args.groups, rows=args.rows)
            rates[packing, tokens, lanes].append(rate / 1e6)
    print("| packing | tokens a document | lanes | M pairs / CPU-s | lowest | highest |\n|---|---|---|---|---|---|")
    for (packing, tokens, lanes), got in rates.items():
        print(f"| {packing} | {tokens} | {lanes} | {statistics.median(got):.0f} | {min(got):.0f} | {max(got):.0f} |")


if __name__ == "__main__":
    main()
