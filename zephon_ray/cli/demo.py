"""`demo`: corpus, story, and one table of digests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from zephon_ray.cli.render import emit, mixture, number, pairs_of, program, say, show, size, table
from zephon_ray.demo.corpus import Corpus, build_corpus
from zephon_ray.demo.story import Story, Variant, tell
from zephon_ray.errors import DifferenceError
from zephon_ray.forecast import mixture_bound
from zephon_ray.recipe import load_recipe
from zephon_ray.stream import check_address

_PREFIX = 12


def demonstrate(directory: str, steps: int, runner: str, address: str | None, *, as_json: bool) -> int:
    """Build the corpus, tell the story, show both. Returns the exit code; a difference is raised."""
    check_address(runner, address)
    corpus = build_corpus(Path(directory), say=lambda sentence: say(f"demo: {sentence}"))
    recipe = load_recipe(corpus.recipe)
    story = tell(recipe, steps=steps, runner=runner, address=address, say=lambda sentence: say(f"demo: {sentence}"))
    if as_json:
        emit(_report(corpus, story))
    else:
        show(pairs_of(_corpus_facts(corpus)), _digest_table(story), pairs_of(_run_facts(story)))
    if story.differing:
        step, name = story.differing[0]
        raise DifferenceError(
            f"step {step} of '{name}' is not that of '{story.variants[0].name}' ({len(story.differing)} steps differ). This must not"
            f" happen: please report it with {corpus.recipe} and the output of --json"
        )
    if not as_json:
        show(*_what_next(corpus))
    return 0


def _corpus_facts(corpus: Corpus) -> list[tuple[str, str]]:
    facts = [("corpus", f"{corpus.folder} ({'made now' if corpus.made else 'found, and complete'})")]
    for name, size_ in corpus.sizes.items():
        filled = corpus.filled[name]
        more = f", of which {size(filled)} of installed packages, for this Python's library has too little" if filled else ""
        facts.append((name, f"{corpus.documents[name]:,} documents, {size(size_)}{more}"))
    return facts


def _digest_table(story: Story) -> Table:
    """Digests at the steps where something happens, and whether all steps agree."""
    kill = next(v.killed.step for v in story.variants if v.killed)
    notes = {kill: "worker killed", story.stopped: "stopped, state saved", story.stopped + 1: "resumed", story.steps: "end"}
    steps = sorted({1, kill, kill + 1, story.stopped - 1, *notes} & set(range(1, story.steps + 1)))
    differing = {step for step, _ in story.differing}

    def cell(variant: Variant, step: int) -> str:
        digest = variant.digest(step)
        return digest.hex()[:_PREFIX] if digest else "–"

    rows = [(str(s), *(cell(v, s) for v in story.variants), "NO" if s in differing else "yes", notes.get(s, "")) for s in steps]
    verdict = "NO" if differing else "yes"
    agreed = ["all equal" if not any(name == v.name for _, name in story.differing) else "DIFFERS" for v in story.variants[1:]]
    rows.append((f"1–{story.steps}", f"{story.steps} steps", *agreed, verdict, f"{story.compared} steps made again"))
    title = f"digests of the global batches, from the rows of all ranks (first {_PREFIX} of 32 digits)"
    return table(("step", *(v.name for v in story.variants), "agree", ""), rows, title=title, words=range(len(story.variants) + 3))


def _run_facts(story: Story) -> list[tuple[str, str]]:
    recipe, reference = story.recipe, story.variants[0]
    batch = recipe.global_batch_size * recipe.sequence_length
    bound = max(mixture_bound(recipe, target) for target in _targets(story))
    killed = next(v for v in story.variants if v.killed)
    assert killed.killed is not None
    again = f"; units made again: {killed.retries}" if killed.retries else ""
    cpu = f"{reference.cpu_seconds / _tokens(reference, batch) * 1e6:.2f} s a million tokens"
    return [
        ("killed", f"process {killed.killed.pid} with SIGKILL after step {killed.killed.step}{again}"),
        ("state", f"{size(story.state_bytes)} after step {story.stopped}"),
        ("chain", f"{reference.chains[-1].hex()} (certifies all {story.steps} steps)"),
        ("mixture", mixture([s.name for s in recipe.sources], reference.pairs, _targets(story))),
        ("", f"proven: never more than {bound:,} pairs a lane off, here {bound * recipe.lanes / (story.steps * batch):.1%} and ever less"),
        ("speed", "; ".join(f"{v.name} {number(_tokens(v, batch) / v.seconds)} tokens/s" for v in story.variants)),
        ("CPU", f"{reference.cpu_seconds:.1f} s here; the cluster's are not counted" if story.cpu_elsewhere else cpu),
    ]


def _targets(story: Story) -> list[float]:
    shares = story.recipe.shares()
    return [share / sum(shares) for share in shares]


def _tokens(variant: Variant, batch: int) -> int:
    return len(variant.digests) * batch - variant.padding


def _what_next(corpus: Corpus) -> Sequence[str]:
    folder, me = os.path.relpath(corpus.folder), program()
    return (
        "",
        "What to try next:",
        f"  {me} plan {folder}/recipe.yaml --gpus 8,12,32",
        f"  {me} run {folder}/recipe.yaml --steps 100 --out {folder}/run --runner threads",
        f"  {me} verify {folder}/run --steps 50:100 --runner processes",
    )


def _report(corpus: Corpus, story: Story) -> dict[str, Any]:
    total = max(1, sum(story.variants[0].pairs))
    names = [source.name for source in story.recipe.sources]
    return {
        "agree": not story.differing,
        "differing": story.differing,
        "steps": story.steps,
        "stopped": story.stopped,
        "state_bytes": story.state_bytes,
        "cpu_elsewhere": story.cpu_elsewhere,
        "mixture": {
            name: {"realised": pairs / total, "target": target}
            for name, pairs, target in zip(names, story.variants[0].pairs, _targets(story), strict=True)
        },
        "variants": [
            {
                "name": v.name,
                "dp_size": v.dp_size,
                "runner": v.runner,
                "first": v.first,
                "last": v.last,
                "digests": [digest.hex() for digest in v.digests],
                "chain": v.chains[-1].hex(),
                "seconds": v.seconds,
                "cpu_seconds": v.cpu_seconds,
                "units": v.units,
                "retries": v.retries,
                "killed": None if v.killed is None else {"pid": v.killed.pid, "step": v.killed.step},
            }
            for v in story.variants
        ],
        "corpus": {"made": corpus.made, "documents": corpus.documents, "bytes": corpus.sizes, "filled": corpus.filled},
    }
