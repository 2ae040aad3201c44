"""Generations: who may read a stream. No Ray, and the time is what the test says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from zephon_ray.errors import FencedError, RefusedError
from zephon_ray.feed.generations import Generations, UnknownSessionError, parse_incarnation
from zephon_ray.feed.protocol import ALIVE_S, Caller, OpenRequest

CHAIN = bytes(range(16))


def asks(rank: int = 0, of: int = 2, incarnation: str = "run:0", start: int = 0, **more: object) -> OpenRequest:
    request = OpenRequest(
        caller=Caller(client=f"node{rank}:1"), session="", stream="train", dp_rank=rank, dp_world_size=of, incarnation=incarnation,
        start_step=start, start_chain=CHAIN if start else bytes(16),
    )  # fmt: skip
    return replace(request, **more)  # type: ignore[arg-type]


class Ranks(Generations):
    """Sessions are named in the call."""

    def enter(self, request: OpenRequest, session: str, at: int, now: float) -> bool:
        return self.open(replace(request, session=session), at, now)


def test_ranks_of_one_incarnation_join_one_generation() -> None:
    ranks = Ranks()
    assert ranks.enter(asks(0), "a", 0, 0.0)
    assert ranks.awaited() == ([1], 0)
    assert not ranks.enter(asks(1), "b", 0, 1.0)
    assert ranks.awaited() == ([], 0)
    ranks.call("a", 2.0).taken = 7
    assert ranks.slowest(2.0) == 0
    ranks.call("b", 2.0).taken = 5
    assert (ranks.number, ranks.incarnation, ranks.slowest(2.0)) == (1, "run:0", 5)


def test_a_higher_count_fences_the_ranks_before_it() -> None:
    ranks = Ranks()
    ranks.enter(asks(0), "old", 0, 0.0)
    assert ranks.enter(asks(0, of=4, incarnation="run:2", start=3), "new", 3, 1.0)
    assert (ranks.number, ranks.dp_world_size) == (2, 4)
    with pytest.raises(FencedError, match="belongs to run:0, and run:2 reads the feed now"):
        ranks.call("old", 1.0)
    with pytest.raises(FencedError, match="belongs to run:1, and run:2"):
        ranks.enter(asks(0, incarnation="run:1"), "late", 0, 2.0)
    ranks.call("new", 2.0)


def test_another_run_is_refused_while_a_rank_has_called_within_a_minute() -> None:
    ranks = Ranks()
    ranks.enter(asks(0), "a", 0, 0.0)
    other = asks(0, incarnation="other:9")
    ranks.call("a", 30.0)
    with pytest.raises(RefusedError, match=r"another run, run:0: rank 0 at node0:1, the last call 59 s ago"):
        ranks.enter(other, "b", 0, 30.0 + ALIVE_S - 1)
    assert ranks.enter(other, "b", 0, 30.0 + ALIVE_S)
    with pytest.raises(FencedError, match="other:9 reads the feed now"):
        ranks.call("a", 100.0)


def test_another_run_pushes_in_if_it_says_so() -> None:
    ranks = Ranks()
    ranks.enter(asks(0), "a", 0, 0.0)
    assert ranks.enter(asks(0, incarnation="other:0", takeover=True), "b", 0, 0.0)
    assert not ranks.enter(asks(1, incarnation="other:0", takeover=True), "c", 0, 0.0)  # it takes over once, not from itself
    with pytest.raises(FencedError):
        ranks.call("a", 0.0)


def test_ranks_that_have_left_hold_nobody_off() -> None:
    ranks = Ranks()
    ranks.enter(asks(0, of=1), "a", 0, 0.0)
    ranks.leave("a")
    assert ranks.enter(asks(0, incarnation="other:0"), "b", 0, 1.0)
    ranks.leave("b")
    assert ranks.enter(asks(0, of=4, incarnation="other:0", start=9), "c", 9, 2.0)  # the same token, begun anew
    with pytest.raises(UnknownSessionError):
        ranks.call("a", 2.0)


def test_a_count_that_starts_anew_is_accepted_once_nobody_lives() -> None:
    """torchrun counts from 0 in each launch, and calls all of them "none" by default."""
    ranks = Ranks()
    ranks.enter(asks(0, incarnation="none:3"), "a", 0, 0.0)
    assert ranks.enter(asks(0, incarnation="none:0"), "b", 0, ALIVE_S)


def test_ranks_of_one_incarnation_agree_on_size_and_state() -> None:
    ranks = Ranks()
    ranks.enter(asks(0, start=5), "a", 5, 0.0)
    with pytest.raises(RefusedError, match=r"dp_world_size=4, and the other ranks of run:0 have 2"):
        ranks.enter(asks(1, of=4, start=5), "b", 5, 0.0)
    with pytest.raises(RefusedError, match=r"rank 1 starts after step 0 .*after step 5"):
        ranks.enter(asks(1), "b", 0, 0.0)
    with pytest.raises(RefusedError, match=r"after step 5 \(chain 0{32}\)"):
        ranks.enter(asks(1, start=5, start_chain=bytes(16)), "b", 5, 0.0)
    ranks.enter(asks(1, start=5), "b", 5, 0.0)


def test_a_rank_that_comes_back_is_where_it_says_and_started_where_all_did() -> None:
    ranks = Ranks()
    ranks.enter(asks(0), "a", 0, 0.0)
    ranks.enter(asks(1), "b", 8, 0.0)
    assert ranks.slowest(0.0) == 0


def test_after_each_restore_the_ranks_agree_anew() -> None:
    ranks = Ranks()
    ranks.enter(asks(0), "a", 0, 0.0)
    ranks.enter(asks(1), "b", 0, 0.0)
    ranks.leave("a")
    ranks.enter(asks(0, start=5, restores=1), "c", 5, 1.0)
    with pytest.raises(RefusedError, match="after step 5"):
        ranks.enter(asks(1, start=4, restores=1), "d", 4, 1.0)
    ranks.enter(asks(1, start=5, restores=1), "d", 5, 1.0)


def test_a_rank_that_comes_back_is_counted_once() -> None:
    ranks = Ranks()
    ranks.enter(asks(0, of=1), "a", 0, 0.0)
    ranks.enter(asks(0, of=1), "a", 7, 1.0)
    assert [member.taken for member in ranks.alive(1.0)] == [7]


def test_ranks_that_were_silent_together_come_back_together() -> None:
    """As all do whose machines were suspended: none of them is an older one."""
    ranks = Ranks()
    ranks.enter(asks(0), "a", 0, 0.0)
    ranks.enter(asks(1), "b", 0, 0.0)
    ranks.enter(asks(0), "a", 5, 100.0)
    with pytest.raises(UnknownSessionError):
        ranks.call("b", 100.0)
    ranks.enter(asks(1), "b", 4, 100.0)
    assert ranks.slowest(100.0) == 4


@pytest.mark.parametrize("token", ["", "run", "run:", ":3", "run:-1", "run:x", "run:1.0", "run:²"])
def test_a_token_that_is_none_is_refused(token: str) -> None:
    with pytest.raises(RefusedError, match="expected RUN_ID:COUNT"):
        parse_incarnation(token)


def test_a_runs_id_may_hold_colons() -> None:
    assert parse_incarnation("a:b:12") == ("a:b", 12)


class Reading(RuleBasedStateMachine):
    """Whatever happens: no two runs read at a time, and no generation comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = Ranks()
        self.now = 0.0
        self.owners: dict[str, tuple[str, int]] = {}
        self.called: dict[str, float] = {}
        self.newest = 0

    @rule(seconds=st.floats(0, 70))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(run=st.sampled_from("xy"), count=st.integers(0, 3), takeover=st.booleans())
    def open(self, run: str, count: int, takeover: bool) -> None:
        session, token = f"s{len(self.owners)}", f"{run}:{count}"
        living = [s for s in self.owners if self.lives(s)]
        before = self.ranks.incarnation
        try:
            begins = self.ranks.enter(asks(0, of=1, incarnation=token, takeover=takeover), session, 0, self.now)
        except RefusedError:
            assert living
            assert not before.startswith(run)
            assert not takeover
            return
        except FencedError:
            assert living
            assert before.startswith(run)
            assert int(before[2:]) > count
            return
        self.newest += begins
        assert begins == (not living or before != token)
        self.owners[session], self.called[session] = (token, self.newest), self.now

    def lives(self, session: str) -> bool:
        return session in self.called and self.owners[session][1] == self.newest and self.now - self.called[session] < ALIVE_S

    @rule(data=st.data())
    def call(self, data: st.DataObject) -> None:
        if not self.owners:
            return
        session = data.draw(st.sampled_from(sorted(self.owners)))
        try:
            self.ranks.call(session, self.now)
        except FencedError:
            assert self.owners[session][1] < self.newest
        except UnknownSessionError:
            assert session not in self.called or self.owners[session][1] < self.newest
        else:
            assert self.owners[session][1] == self.newest
            self.called[session] = self.now

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.owners:
            session = data.draw(st.sampled_from(sorted(self.owners)))
            self.ranks.leave(session)
            if self.owners[session][1] == self.newest:
                self.called.pop(session, None)

    @invariant()
    def one_reads(self) -> None:
        assert {member.session for member in self.ranks.alive(self.now)} == {s for s in self.owners if self.lives(s)}
        assert self.ranks.number == self.newest


test_one_incarnation_reads_at_a_time = Reading.TestCase
