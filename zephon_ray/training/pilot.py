"""The pilot: one saved state of a recipe resumed at several numbers of ranks, before any GPU is asked for. No training, no torch.

Each size has a stream of its own, made from the bytes of the state alone. Its batches are cut as its ranks would get them, every rank's
rows are hashed again from its arrays, and all is compared with the run that was never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from zephon_ray.batches import GlobalBatch, fold, row_digests
from zephon_ray.collector import prepare
from zephon_ray.errors import RecipeError, UserError
from zephon_ray.recipe import Recipe
from zephon_ray.runners.hold import held
from zephon_ray.stream import Stream, runner_of

OnStep = Callable[[str, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeProof:
    """What a number of ranks got.

    Args:
        dp_size: number of ranks.
        rows: of each rank in a step.
        compared: rows of all ranks and steps that were compared.
        difference: the first that differs, in words; None where nothing does.
        state_equal: the state after the last step has the same bytes.
    """

    dp_size: int
    rows: int
    compared: int
    difference: str | None
    state_equal: bool

    @property
    def equal(self) -> bool:
        """It got what an uninterrupted run gets."""
        return self.difference is None and self.state_equal


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What was found.

    Args:
        fingerprint: of the run, 64 hex digits.
        at_step: the state is that after this step.
        state_bytes: its size.
        digests: (step, batch digest, chain) of the uninterrupted run after `at_step`, hex.
        sizes: each number of ranks, in the order asked for.
    """

    fingerprint: str
    at_step: int
    state_bytes: int
    digests: tuple[tuple[int, str, str], ...]
    sizes: tuple[SizeProof, ...]

    @property
    def equal(self) -> bool:
        """All sizes got the same."""
        return all(size.equal for size in self.sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """A step of the uninterrupted run: its number and digests, those of its rows in order."""

    number: int
    rows: tuple[bytes, ...]
    digest: bytes
    chain: bytes


def prove(
    recipe: Recipe,
    dp_sizes: Sequence[int],
    *,
    at_step: int,
    steps: int,
    runner: str | None = None,
    workers: int | None = None,
    address: str | None = None,
    on_step: OnStep | None = None,
) -> Proof:
    """Resume the state after a step at each of the sizes, and compare what every rank gets.

    Args:
        recipe: what to run.
        dp_sizes: numbers of ranks, at least one.
        at_step: the state is taken after it; at least 0.
        steps: that are compared after it, at least 1.
        runner: as `Stream` has it.
        workers: as `Stream` has it.
        address: as `Stream` has it.
        on_step: called with what is made ("uninterrupted", "8 ranks") and the step.

    Raises:
        RecipeError: lists all sizes that cannot share a batch.
        UserError: no size is given, or the stream ends before the steps do.
        SourceError, StorageError, BadRecordError, RunnerError: as `Stream`.
    """
    _check(recipe, dp_sizes, at_step, steps)
    name = runner_of(recipe, runner, address)
    prepared = prepare(recipe)
    tell = on_step or (lambda what, step: None)

    def stream(state: bytes | None) -> Stream:
        return Stream(recipe, runner=name, workers=workers, address=address, state=state, prepared=prepared)

    with held(name, address=address):
        with closing(stream(None)) as whole:
            for batch in _batches(whole, at_step):
                tell("uninterrupted", batch.step)
            state = whole.state_bytes()
            expected = []
            for batch in _batches(whole, steps):
                expected.append(_Step(number=batch.step, rows=batch.row_digests, digest=batch.digest, chain=batch.chain))
                tell("uninterrupted", batch.step)
            end = whole.state_bytes()
        sizes = []
        for size in dp_sizes:
            with closing(stream(state)) as resumed:
                sizes.append(_compare(resumed, expected, size, end, tell))
    return Proof(
        fingerprint=prepared[1].fingerprint,
        at_step=at_step,
        state_bytes=len(state),
        digests=tuple((step.number, step.digest.hex(), step.chain.hex()) for step in expected),
        sizes=tuple(sizes),
    )


def _check(recipe: Recipe, dp_sizes: Sequence[int], at_step: int, steps: int) -> None:
    if not dp_sizes:
        raise UserError("no number of ranks is given. Give some, such as 8,16,32")
    if at_step < 0 or steps < 1:
        raise UserError(f"at step {at_step}, {steps} steps: the state is after step 0 or a later one, and at least 1 step is compared")
    problems = []
    for size in dp_sizes:
        try:
            recipe.check_dp(0, size)
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)


def _batches(stream: Stream, count: int) -> Iterator[GlobalBatch]:
    for _ in range(count):
        batch = stream.next_batch()
        if batch is None:
            raise UserError(f"the stream ends after step {stream.state.step}. Ask for fewer steps, or give its sources more epochs")
        yield batch


def _compare(resumed: Stream, expected: Sequence[_Step], size: int, end: bytes, tell: OnStep) -> SizeProof:
    compared, difference, chain, rows_of_rank = 0, None, resumed.state.chain, 0
    for step in expected:
        batch = resumed.next_batch()
        if batch is None:
            difference = difference or f"step {step.number}: the stream ends before it"
            break
        tell(f"{size} ranks", step.number)
        ranks = [row_digests(batch.of_rank(rank, size)) for rank in range(size)]
        rows_of_rank = len(ranks[0])
        compared += size * rows_of_rank
        digest, chain = fold(step.number, chain, [row for rank in ranks for row in rank])
        difference = difference or _first_difference(step, ranks, digest, chain)
    return SizeProof(
        dp_size=size, rows=rows_of_rank, compared=compared, difference=difference, state_equal=resumed.state_bytes() == end
    )  # fmt: skip


def _first_difference(step: _Step, ranks: Sequence[Sequence[bytes]], digest: bytes, chain: bytes) -> str | None:
    """In words; None where the ranks' rows, folded, are the step."""
    size = len(ranks[0])
    for rank, rows in enumerate(ranks):
        for row, (found, wanted) in enumerate(zip(rows, step.rows[rank * size : (rank + 1) * size], strict=True)):
            if found != wanted:
                return f"step {step.number}, rank {rank}, row {row}: {found.hex()}, and {wanted.hex()} without interruption"
    if digest != step.digest:
        return f"step {step.number}: the rows give the digest {digest.hex()}, and {step.digest.hex()} without interruption"
    if chain != step.chain:
        return f"step {step.number}: the rows give the chain {chain.hex()}, and {step.chain.hex()} without interruption"
    return None
