"""Outcomes: what was trained on, held against what it has to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zephon_ray.training.elastic_proof.records import TrainedStep
from zephon_ray.training.elastic_proof.reference import Reference

TOLERANCE = 1e-4
"""Losses of different numbers of ranks add up in different orders."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a case.

    Args:
        title: of the case.
        ranks: how they were laid out.
        rows: where ranks had them from.
        first, last: steps that were compared.
        digest, chain: of the last step, from the rows of all ranks; empty where that was not trained.
        differing: steps that were not trained on, or on other rows than the reference has.
        gap: largest difference of a loss from that of the case that it is compared with.
        bitwise: there may be none, as the ranks are laid out alike.
        peers: ranks whose rows were compared with those of their peers.
        seconds: that the case took.
    """

    title: str
    ranks: str
    rows: str
    first: int
    last: int
    digest: bytes
    chain: bytes
    differing: tuple[int, ...]
    gap: float
    bitwise: bool
    peers: int
    seconds: float

    @property
    def good(self) -> bool:
        return not self.differing and self.gap <= (0.0 if self.bitwise else TOLERANCE)


def compare(
    steps: Mapping[int, TrainedStep],
    span: range,
    reference: Reference,
    losses: Mapping[int, TrainedStep],
    *,
    bitwise: bool,
    title: str,
    ranks: str,
    rows: str,
    seconds: float,
) -> Outcome:
    """Hold steps against the reference, and their losses against those of another case.

    Args:
        steps: as they were trained on.
        span: which have to be there.
        reference: of digests and chains.
        losses: the other case; has all of the span.
        bitwise: as in `Outcome`.
        title: likewise.
        ranks: likewise.
        rows: likewise.
        seconds: likewise.
    """
    chain, digest, differing, gap = reference.chains[span.start - 1], b"", [], 0.0
    for number in span:
        step = steps.get(number)
        if step is None:
            differing.append(number)
            digest, chain = b"", b""
            continue
        digest, chain = step.folded(chain)
        gap = max(gap, abs(step.loss - losses[number].loss))
        if (digest, chain) != (reference.digests[number], reference.chains[number]):
            differing.append(number)
    return Outcome(
        title=title, ranks=ranks, rows=rows, first=span.start, last=span.stop - 1, digest=digest, chain=chain, differing=tuple(differing),
        gap=gap, bitwise=bitwise, peers=max((step.peers for step in steps.values()), default=0), seconds=seconds,
    )  # fmt: skip
