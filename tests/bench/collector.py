"""Speed of the ordered part alone: deal, mix, pack and digest tokenised units that are in memory.

    python tests/bench/collector.py [--lanes 8 1024] [--tokens 600 60] [--packing wrap best_fit]

Prints millions of next-token pairs per CPU second, the median of some rounds; lanes and lengths are interleaved, so that
a noisy machine hits all alike. Two sources (0.7 and 0.3), sequences of 2,048, windows of sixteen units of 256k ids.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import numpy as np

from zephon_ray.batches import fold
from zephon_ray.lanes import FedWindows, LaneGroup, beginning
from zephon_ray.plan.pieces import UnitShape
from zephon_ray.plan.windows import Position
from zephon_ray.recipe import Recipe, recipe_from_dict

UNITS, UNIT_IDS, SEQUENCE = 16, 262_144, 2048


def a_recipe(lanes: int, packing: str) -> Recipe:
    fields = {
        "schema": 1, "name": "bench", "seed": 1, "lanes": lanes, "sequence_length": SEQUENCE, "global_batch_size": max(64, lanes),
        "tokenizer": {"path": "tokenizer.json", "pad": "<|pad|>"}, "packing": {"algorithm": packing},
        "sources": [{"name": "web", "uri": "web", "weight": 0.7}, {"name": "code", "uri": "code", "weight": 0.3}],
    }  # fmt: skip
    return recipe_from_dict(fields, "/nowhere")


def windows(mean_tokens: int, seed: int) -> Iterator[FedWindows]:
    """Endless windows of documents of 2 to 2*mean_tokens-2 ids; four different ones in turn."""
    draw = np.random.default_rng(seed)
    made = []
    for number in range(4):
        shapes, ids, at = [], [], 0
        for unit in range(UNITS):
            lengths = draw.integers(2, 2 * mean_tokens - 1, UNIT_IDS // mean_tokens)
            offsets = at + np.concatenate(([0], np.cumsum(lengths)))
            shapes.append((unit, number, offsets))
            ids.append(draw.integers(0, 100_000, int(lengths.sum()), dtype=np.uint32))
            at = int(offsets[-1])
        made.append((shapes, np.concatenate(ids)))
    place = Position(epoch=0, window=0, places=())
    epoch = 0
    while True:
        for shapes, pool in made:
            units = [UnitShape(window=0, epoch=epoch, group=g, unit=u, offsets=o) for g, u, o in shapes]
            yield FedWindows(units=units, pool=pool.copy(), positions=[place], after=place)
        epoch += 1


def pairs_per_cpu_second(lanes: int, mean_tokens: int, packing: str, seconds: float) -> float:
    recipe = a_recipe(lanes, packing)
    place = Position(epoch=0, window=0, places=())
    group = LaneGroup(recipe, beginning(recipe, [place, place]))
    sources = [windows(mean_tokens, seed) for seed in (1, 2)]
    chain, step, began, pairs_began = bytes(16), 0, time.process_time(), 0
    warm = True
    while True:
        while (want := group.want()) is not None:
            group.feed(want.source, next(sources[want.source]))
        chunk = group.chunk()
        while chunk.left:
            made = chunk.next_step()
            step += 1
            _, chain = fold(step, chain, made.digests)
            group.state_after(made)
            pairs = int(made.pairs.sum())
        if warm:
            warm, began, pairs_began = False, time.process_time(), pairs
        elif time.process_time() - began > seconds:
            return (pairs - pairs_began) / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lanes", type=int, nargs="+", default=[8, 1024])
    parser.add_argument("--tokens", type=int, nargs="+", default=[600, 60])
    parser.add_argument("--packing", nargs="+", default=["wrap", "best_fit"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    cases = [(p, t, n) for p in args.packing for t in args.tokens for n in args.lanes]
    rates: dict[tuple[str, int, int], list[float]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for packing, tokens, lanes in cases:
            rates[packing, tokens, lanes].append(pairs_per_cpu_second(lanes, tokens, packing, args.seconds) / 1e6)
    print("| packing | tokens a document | lanes | M pairs / CPU-s | lowest | highest |\n|---|---|---|---|---|---|")
    for (packing, tokens, lanes), got in rates.items():
        print(f"| {packing} | {tokens} | {lanes} | {statistics.median(got):.0f} | {min(got):.0f} | {max(got):.0f} |")


if __name__ == "__main__":
    main()
