"""This loader beside the leanest loops and other loaders, in interleaved rounds of one harness.

    python tests/bench/against.py --harness DIR --data DIR --tok tokenizer.json --scratch DIR --out results.jsonl [--rounds 3]

DIR holds `harness.py`, `plans.py` and `adapters/` (the loader benchmarks that the project shares); the corpus is made by
its `make_corpus.py`. Prints the harness's table at the end: CPU seconds a million tokens, and the ratio to `limit hf 1thr`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--harness", type=Path, required=True)
    for name in ("data", "tok", "scratch", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--beside", default="limit hf 1thr,limit fastokens 1thr", help="comma-separated lines of the harness's plans")
    parser.add_argument("--only", help="comma-separated lines, for a look at few")
    parser.add_argument("--lanes", type=int, nargs="*", default=[], help="compare these numbers of lanes only (each divides --batch)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--warm", type=float, default=2.0)
    parser.add_argument("--secs", type=float, default=6.0)
    args = parser.parse_args()

    sys.path.insert(0, str(args.harness.resolve()))
    import harness
    import plans

    known = {name: options for plan in plans.PLANS.values() for name, options in plan}
    paths = [str(HERE), str(HERE.parents[1])]

    def ours(runner: str, **more: object) -> dict[str, object]:
        return dict(adapter="ours", runner=runner, pythonpath=paths, env=plans.thr(1), hard_exit=1, **more)

    def with_fast_engine(peer: str, **more: object) -> dict[str, object]:
        return dict(adapter="fast_peers", peer=peer, pythonpath=paths, env=plans.thr(1), hard_exit=1, **more)

    lines = [(name, known[name]) for name in args.beside.split(",")]
    lines += [
        ("ours threads hf", ours("threads", engine="hf")),
        ("ours threads", ours("threads")),
        ("ours threads 1MiB", ours("threads", unit_bytes=1 << 20)),
        ("ours threads jsonl", ours("threads", fmt="jsonl")),
        ("ours threads jsonl.zst", ours("threads", fmt="jsonl.zst")),
        ("ours processes", ours("processes")),
        ("ours inline", ours("inline")),
        ("ours ray", ours("ray", unit_bytes=1 << 20)),
        ("grain 2thr fast", with_fast_engine("grain", procs=0, threads=2, buffer=64)),
        ("titan 0w fast", with_fast_engine("torchtitan", workers=0, streaming=True)),
    ]
    if args.only:
        lines = [line for line in lines if line[0] in args.only.split(",")]
    if args.lanes:
        lines = [(f"{lanes} lanes", ours("threads", lanes=lanes)) for lanes in args.lanes]
    plans.PLANS["ours"] = lines
    harness.run(SimpleNamespace(**{**vars(args), "plan": "ours"}))
    harness.table(SimpleNamespace(files=[args.out], ref=lines[0][0]))


if __name__ == "__main__":
    main()
