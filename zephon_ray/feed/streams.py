"""A stream of the feed: a thread that makes its steps, the steps that are kept, and the ranks that read them.

Ranks ask through methods that never wait; the thread does all that can take time. What the thread does next follows from where the
ranks are: nothing is made further than `ahead` of the slowest that lives, and a step that is asked for and not kept is made again.
What is kept outlives the production that made it: the next one goes on behind the newest kept step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from zephon_ray.collector import first_state, prepare
from zephon_ray.errors import FeedError, RefusedError, ZephonError
from zephon_ray.feed.blocks import RowBlock
from zephon_ray.feed.generations import Generations
from zephon_ray.feed.making import KeptStep, Maker, OpenProduction, ProductionLostError, States, another_history, open_maker
from zephon_ray.feed.protocol import Opened, OpenRequest, StepReply, StreamName, StreamStatus, TakeReply, TakeRequest
from zephon_ray.feed.retention import Bounds, Retention
from zephon_ray.hashing import chain_digest
from zephon_ray.recipe import Recipe
from zephon_ray.runners.base import Job
from zephon_ray.state import Identity, StreamState, from_bytes

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""How often the thread looks whether ranks have gone."""
_OFFERED = 16
_RATE_S = 60.0
_CLOSE_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOptions:
    """How a stream is fed.

    Args:
        name: of the stream.
        recipe: of the stream.
        out: its directory.
        open_production: opens a production.
        states: keeps states.
        hot_bytes: budget of what is kept for rewinds.
        keep_steps: kept behind the slowest rank in any case.
        patience_s: how long the directory may refuse.
        feed: the same for a feed that died and was started again, another for one that was served anew.
    """

    name: StreamName
    recipe: Recipe
    out: str
    open_production: OpenProduction
    states: States
    hot_bytes: int
    keep_steps: int
    patience_s: float
    feed: str = ""


class FeedStream:
    """One stream. Its methods may be called from any thread and do not wait, but for `close`.

    Args:
        options: how it is fed.
        changed: called, from any thread, when those who wait have to look again.
    """

    def __init__(self, options: StreamOptions, changed: Callable[[], None]) -> None:
        self._options, self._changed = options, changed
        self._lock = threading.Condition()
        self._generations = Generations()
        self._kept: Retention[KeptStep] = Retention(budget=options.hot_bytes, keep_steps=options.keep_steps)
        self._ahead = max(1, options.recipe.execution.prefetch_steps)
        self._prepared: tuple[Job, Identity] | None = None
        self._first: StreamState
        self._maker: Maker | None = None
        self._asks: dict[str, int] = {}
        self._offered: dict[int, StreamState] = {}
        self._tasks: deque[Callable[[Maker], None]] = deque()
        self._error: BaseException | None = None
        self._ended: int | None = None
        self._newest: KeptStep | None = None
        self._saved = -1
        self._stopping = False
        self._hot = self._cold = 0
        self._replay: Literal["none", "hot", "cold"] = "none"
        self._hot_to = 0
        self._made: deque[tuple[float, int]] = deque()
        self._total_made = 0
        self._waited = self._waited_before = 0.0
        self._taken = 0
        self._thread = threading.Thread(target=self._run, name=f"zephon-{options.name}", daemon=True)
        self._thread.start()

    # --- what ranks ask for ----------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether ranks can open the stream, or are told why not."""
        with self._lock:
            return self._maker is not None or self._error is not None or self._stopping

    def check(self) -> None:
        """Whether ranks could read it.

        Raises:
            ZephonError: why not.
        """
        with self._lock:
            if self._error:
                raise self._error

    def open(self, request: OpenRequest) -> Opened:
        """A rank joins.

        Raises:
            RefusedError, FencedError: as `Generations.open`, or its recipe is another.
            RecipeError, StateError: its size or state does not fit.
            ZephonError: why the stream cannot be fed at all.
        """
        recipe = self._options.recipe
        with self._lock:
            self._refuse_stopped()
            if self._prepared is None or self._maker is None:
                error, self._error = self._error, None  # the next one finds it tried again
                self._lock.notify_all()
                raise error or FeedError("the feed is starting. Try again in a moment")
            identity = self._prepared[1]
            if request.fingerprint not in (None, identity.fingerprint):
                raise RefusedError(
                    f"the feed's {request.stream} stream has the fingerprint {identity.fingerprint}, and {request.fingerprint} is asked"
                    " for: recipe, tokenizer or data differ. Connect to the feed of your run"
                )
            recipe.check_dp(request.dp_rank, request.dp_world_size)
            state = self._first if request.state is None else from_bytes(request.state, identity)
            at = state.step
            self._check_history(state)
            anew = self._generations.open(request, at, time.monotonic())
            self._offered[at] = state
            self._maker.expect(at, state.chain)
            for old in list(self._offered)[:-_OFFERED]:
                del self._offered[old]
            if anew:
                self._begin(request, at)
            self._lock.notify_all()
            return Opened(generation=self._generations.number, identity=identity, recipe_yaml=recipe.to_yaml(), state=state)

    def ask(self, request: TakeRequest) -> TakeReply | None:
        """The next steps of a rank; None where it has to wait. Then it asks again, or says `unask`.

        Raises:
            FencedError, UnknownSessionError: as `Generations.call`.
            ZephonError: why no further step is made.
        """
        with self._lock:
            self._refuse_stopped()
            member = self._generations.call(request.session, time.monotonic())
            moved = member.taken != request.taken
            member.taken, member.waited_s = request.taken, request.waited_s
            self._waited = max(self._waited, request.waited_s)
            if request.lost:
                self._lose(*request.lost)
            reply = self._reply(request, member.dp_rank)
            if reply is None and self._error:
                raise self._error
            if reply is None:
                self._asks[request.session] = request.taken + 1
            if reply is None or moved or request.lost:
                self._lock.notify_all()
            return reply

    def unask(self, session: str) -> None:
        """A rank does not wait any more."""
        with self._lock:
            self._asks.pop(session, None)

    def saved(self, session: str, step: int) -> None:
        """A rank has saved its state after a step: ranks may go back to it."""
        with self._lock:
            member = self._generations.call(session, time.monotonic())
            if step == self._saved:
                return
            self._saved = step
            self._kept.mark(step)
            kept = self._kept.get(step)
            if kept is not None:
                self._tasks.append(lambda maker: maker.save(self._options.states.get(kept.state)))
            incarnation, client = self._generations.incarnation, member.client
            self._tasks.append(lambda maker: maker.audit("saved", step=step, incarnation=incarnation, client=client))
            self._lock.notify_all()

    def leave(self, session: str) -> None:
        """A rank is done."""
        with self._lock:
            now = time.monotonic()
            before = self._generations.slowest(now)
            self._taken = self._taken if before is None else before
            self._generations.leave(session)
            self._asks.pop(session, None)
            if before is not None and self._generations.slowest(now) is None:
                self._remember(reading=False)
            self._lock.notify_all()
        self._changed()

    def ranks(self) -> list[str]:
        """The clients that live."""
        with self._lock:
            return [f"rank {member.dp_rank} at {member.client}" for member in self._generations.alive(time.monotonic())]

    def stop(self, by: str) -> None:
        """Make no further step. Ranks are told; `close` waits for the end."""
        with self._lock:
            if not self._stopping:
                self._remember(reading=False)
                self._tasks.append(lambda maker: maker.audit("stopped", step=self._newest.step if self._newest else 0, client=by))
            self._stopping = True
            self._lock.notify_all()
        self._changed()

    def close(self) -> None:
        """End the thread, once what was made is saved."""
        self._thread.join(1.0)
        if self._thread.is_alive() and self._maker:
            self._maker.interrupt()
        self._thread.join(_CLOSE_S)

    def status(self) -> StreamStatus:
        """How it stands."""
        with self._lock:
            now = time.monotonic()
            alive = self._generations.alive(now)
            newest, taken = self._newest, self._generations.slowest(now)
            taken = self._taken if taken is None else taken
            stats = self._maker.stats() if self._maker else None
            recipe = self._options.recipe
            return StreamStatus(
                stream=self._options.name,
                fingerprint=self._prepared[1].fingerprint if self._prepared else "",
                directory=self._options.out,
                generation=self._generations.number,
                incarnation=self._generations.incarnation,
                dp_world_size=self._generations.dp_world_size,
                ranks=len(alive),
                step=newest.step if newest else 0,
                taken_step=taken,
                steps_ahead=max(0, (self._kept.last or 0) - taken),
                pairs=newest.pairs if newest else (0,) * len(recipe.sources),
                names=tuple(source.name for source in recipe.sources),
                due=tuple(share / sum(recipe.shares()) for share in recipe.shares()),
                pairs_per_second=self._rate(now),
                waited_seconds=self._waited_before + self._waited,
                workers=stats.workers if stats else 0,
                retries=stats.retries if stats else 0,
                text_bytes=stats.text_bytes if stats else 0,
                units=stats.units if stats else 0,
                reopened=self._maker.reopened if self._maker else 0,
                kept_steps=len(self._kept),
                kept_bytes=self._kept.nbytes,
                replays_hot=self._hot,
                replays_cold=self._cold,
                replay=self._replay,
                ended=self._ended,
                error=f"{type(self._error).__name__}: {self._error}" if self._error else None,
                waiting=self._waiting(),
            )

    # --- under the lock --------------------------------------------------------------------------------------------------

    def _refuse_stopped(self) -> None:
        if self._stopping:
            raise FeedError("the feed was stopped. Serve it again, and start the ranks from their last checkpoint")

    def _begin(self, request: OpenRequest, at: int) -> None:
        """Ranks start somewhere, together."""
        self._error = None
        self._kept.mark(at)
        self._waited_before, self._waited = self._waited_before + self._waited, 0.0
        self._hot_to = 0
        if self._newest and at < self._newest.step:
            hot = self._kept.get(at + 1) is not None
            self._hot, self._cold = self._hot + hot, self._cold + (not hot)
            self._replay = "hot" if hot else "cold"
            self._hot_to = self._newest.step if hot else 0
        fields = {
            "incarnation": request.incarnation, "dp_world_size": request.dp_world_size, "step": at, "client": request.caller.client,
            "generation": self._generations.number,
        }  # fmt: skip
        event = "restored" if at else "attached"
        self._tasks.append(lambda maker: maker.audit(event, **fields))
        self._remember(reading=True)
        self._changed()  # who waits may be fenced now

    def _check_history(self, state: StreamState) -> None:
        """Rows that are kept are given to those only whose history they continue."""
        following = self._kept.get(state.step + 1)
        if following is not None and chain_digest(state.chain, following.step, following.digest) != following.chain:
            raise another_history(state.step, state.chain)

    def _remember(self, *, reading: bool) -> None:
        """Which ranks read, for a feed that is started again."""
        if self._generations.incarnation:
            readers = self._generations.remembered(self._options.feed, reading=reading)
            self._tasks.append(lambda maker: maker.remember(readers))

    def _lose(self, step: int, ref: str) -> None:
        """A step's rows are gone: it is made again with all after it, unless it was since the rank got them.

        Rows are lost with a node. What slower ranks lack still lay there too: it is made again at once and not each step by itself.
        """
        kept = self._kept.get(step)
        if kept is None or all(block.ref.hex() != ref for block in kept.blocks):
            return
        self._kept.forget_from(min(step, (self._generations.slowest(time.monotonic()) or 0) + 1))
        if step <= self._hot_to:
            self._hot, self._cold, self._replay, self._hot_to = self._hot - 1, self._cold + 1, "cold", 0

    def _reply(self, request: TakeRequest, dp_rank: int) -> TakeReply | None:
        steps = []
        first = request.taken + 1
        for step in range(first, first + request.count):
            kept = self._kept.get(step)
            if kept is None:
                break
            steps.append(self._cut(kept, dp_rank))
        last = request.taken + len(steps)
        ended = self._ended is not None and last >= self._ended
        if steps or ended or not request.count:
            return TakeReply(steps=tuple(steps), ended=ended)
        return None

    def _cut(self, kept: KeptStep, dp_rank: int) -> StepReply:
        size = self._options.recipe.global_batch_size // self._generations.dp_world_size
        first, last = dp_rank * size, (dp_rank + 1) * size
        return StepReply(
            step=kept.step,
            digest=kept.digest,
            chain=kept.chain,
            pairs=kept.pairs,
            state=kept.state,
            blocks=tuple(block for block in kept.blocks if _meets(block, first, last)),
        )

    def _rate(self, now: float) -> float:
        while self._made and now - self._made[0][0] > _RATE_S:
            self._made.popleft()
        if not self._made:
            return 0.0
        since, before = self._made[0]
        recipe = self._options.recipe
        return (self._total_made - before) * recipe.global_batch_size * recipe.sequence_length / max(now - since, 1.0)

    def _waiting(self) -> str | None:
        if self._maker is None:
            return "its data are looked at"
        absent, _ = self._generations.awaited()
        missing = f"ranks {', '.join(map(str, absent[:8]))} have not come yet" if absent else None
        return self._maker.waiting or self._maker.failing or missing

    # --- the thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 (every rank is told)
                self._fail(error)
        if self._maker:
            try:
                while self._tasks:
                    self._tasks.popleft()(self._maker)
                self._maker.close()
            except BaseException as error:  # noqa: BLE001 (`status` tells it)
                self._fail(error)

    def _next_job(self) -> Callable[[], None] | None:
        """What to do next; None to end. Waits until there is something."""
        with self._lock:
            while not self._stopping:
                if self._maker is None:
                    if self._error is None:
                        return self._prepare
                else:
                    self._trim()
                    if job := self._job_for(self._maker):
                        return job
                self._lock.wait(_LOOK_S)
            return None

    def _job_for(self, maker: Maker) -> Callable[[], None] | None:
        if self._tasks:
            task = self._tasks.popleft()
            return lambda: task(maker)
        if self._error:
            return None
        slowest, end = self._generations.slowest(time.monotonic()), self._ended
        position, first, last = maker.position, self._kept.first, self._kept.last
        lacking = [step for step in self._asks.values() if self._kept.get(step) is None and (end is None or step <= end)]
        need = min(lacking, default=None)
        if need is not None and (need < first if first is not None else position is None or need <= position):
            need = min(need, (slowest or 0) + 1)  # what is kept cannot be added to in front: all then find what they lack
            return lambda: self._rewind(maker, need)
        head = position if last is None else last
        if head is None or slowest is None or head >= slowest + self._ahead or head == end:
            return None
        if position is None or position > head:
            return lambda: self._rewind(maker, head + 1)
        return lambda: self._make(maker)

    def _trim(self) -> None:
        absent, start = self._generations.awaited()
        slowest = self._generations.slowest(time.monotonic())
        self._taken = self._taken if slowest is None else slowest
        self._kept.trim(Bounds(slowest=slowest, awaited=start if absent else None))

    def _prepare(self) -> None:
        options = self._options
        prepared = prepare(options.recipe)
        maker = open_maker(
            options.recipe, prepared, options.out, options.open_production,
            states=options.states, patience_s=options.patience_s, pause=self._pause,
        )  # fmt: skip
        readers = maker.readers()
        with self._lock:
            if readers:
                self._generations.restore(readers, options.feed, time.monotonic())
            self._prepared, self._maker, self._first = prepared, maker, first_state(prepared[0])
        self._changed()

    def _rewind(self, maker: Maker, need: int) -> None:
        """Go on with step `need`, behind what is kept where that leads to it; else nothing of it is kept."""
        with self._lock:
            before, states = self._kept.get(need - 1), list(self._offered.values())
            if before is None:
                self._kept.forget_from(0)
        if before is not None:
            states.append(self._options.states.get(before.state))
            maker.expect(before.step, before.chain)  # where the ledger lost its tail, that is made again
        maker.rewind(need, states)

    def _make(self, maker: Maker) -> None:
        try:
            kept = maker.make()
        except ProductionLostError:
            return
        with self._lock:
            if kept is None:
                self._ended = None if self._stopping else maker.position  # a production that is interrupted ends too
            else:
                if self._kept.last in (None, kept.step - 1):  # not one that is kept already, or behind one that was lost meanwhile
                    self._kept.put(kept)
                self._made.append((time.monotonic(), self._total_made))
                self._total_made += 1
                if self._newest is None or kept.step > self._newest.step:
                    self._newest = kept
        self._changed()

    def _fail(self, error: BaseException) -> None:
        told = error if isinstance(error, ZephonError) else FeedError(f"the feed has a fault: {type(error).__name__}: {error}")
        with self._lock:
            self._error = told
        _log.error("the %s stream makes no further step: %s", self._options.name, told, exc_info=error)
        if self._maker:
            with suppress(Exception):  # what failed may fail at its end too
                self._maker.drop()
        self._changed()

    def _pause(self, seconds: float) -> bool:
        """Wait; False where the stream is to stop."""
        with self._lock:
            self._lock.wait_for(lambda: self._stopping, timeout=seconds)
            return not self._stopping


def _meets(block: RowBlock, first: int, last: int) -> bool:
    return block.first_row < last and first < block.first_row + block.rows
