"""The table that a proof ends with."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zephon_ray.training.elastic_proof.outcomes import TOLERANCE, Outcome
from zephon_ray.training.elastic_proof.proof import Proof

_PREFIX = 12
_HEADINGS = ("case", "ranks", "rows from", "steps", "digest of the last", "chain", "loss differs by", "equal", "seconds")
_WIDTH = 200


def show(proof: Proof) -> None:
    """Print what was found on stdout."""
    recipe = proof.setting.recipe
    out = Console(width=_WIDTH, highlight=False)
    title = (
        f"{recipe.name}: {recipe.global_batch_size} rows of {recipe.sequence_length}, {recipe.lanes} lanes, {len(recipe.sources)} sources"
    )
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right" if heading in ("steps", "loss differs by", "seconds") else "left", no_wrap=True)
    for outcome in proof.outcomes:
        table.add_row(*map(Text, _row(outcome)))
    out.print(table)
    for line in _facts(proof):
        out.print(Text(line), soft_wrap=True)


def _row(outcome: Outcome) -> tuple[str, ...]:
    digest, chain = outcome.digest.hex()[:_PREFIX] or "–", outcome.chain.hex()[:_PREFIX] or "–"
    gap = "no bit" if outcome.gap == 0 else f"{outcome.gap:.1e}"
    verdict = "yes" if outcome.good else f"NO: step {outcome.differing[0]}" if outcome.differing else "NO: losses"
    steps = f"{outcome.first}–{outcome.last}"
    return outcome.title, outcome.ranks, outcome.rows, steps, digest, chain, gap, verdict, f"{outcome.seconds:.1f}"


def _facts(proof: Proof) -> list[str]:
    steps = sum(outcome.last - outcome.first + 1 for outcome in proof.outcomes)
    peers = max(outcome.peers for outcome in proof.outcomes)
    bad = sum(not outcome.good for outcome in proof.outcomes)
    facts = [
        f"{steps} steps were trained. Digests are of the rows that reached the model, and have to be those of a plain loader on one rank.",
        f"Losses may differ by {TOLERANCE:g} from those of the first case that resumed, and by no bit where ranks are laid out alike.",
        f"{proof.checkpoints} checkpoints were read: one key each, the state after the step ({proof.state_bytes} bytes in the last).",
    ]
    if peers:
        facts.append(f"Tensor parallel peers, {peers} ranks in all, were given the same rows as each other.")
    facts += [f"Left out: {sentence}." for sentence in proof.left_out]
    return [
        *facts,
        f"{'PROVED' if proof.good else f'NOT PROVED: {bad} cases differ'} in {proof.seconds:.0f} s. Files: {proof.setting.folder}",
    ]
