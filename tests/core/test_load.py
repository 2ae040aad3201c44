"""What is said of a pool's load."""

from __future__ import annotations

from zephon_ray.runners.load import SETTLED_S, Load


def run(load: Load, start: float, seconds: float, *, waits: float, works: float, every_s: float = 0.25) -> float:
    """Ticks for some seconds; in each second the taker waits for a share of it, and the workers work in a share of the ticks."""
    now, due = start, 0.0
    while now < start + seconds:
        load.taker_waits(now)
        load.taker_goes_on(now + waits * every_s)
        now += every_s
        due += works
        load.tick(now, working=due >= 1)
        due -= due >= 1
    return now


def test_nothing_is_said_before_it_is_known() -> None:
    load = Load(0.0)
    now = run(load, 0.0, SETTLED_S - 0.5, waits=1, works=1)
    assert not load.hungry
    assert load.working_share is None
    run(load, now, 1.0, waits=1, works=1)
    assert load.hungry


def test_many_short_waits_are_hunger() -> None:
    load = Load(0.0)
    run(load, 0.0, 20.0, waits=0.8, works=1)
    assert load.hungry
    assert load.working_share is not None
    assert load.working_share > 0.9


def test_a_slow_taker_leaves_workers_idle() -> None:
    load = Load(0.0)
    run(load, 0.0, 40.0, waits=0.05, works=0.125)
    assert not load.hungry
    assert load.working_share is not None
    assert load.working_share < 0.3


def test_a_wait_that_goes_on_counts_in_every_tick() -> None:
    load = Load(0.0)
    load.taker_waits(0.0)
    for tick in range(1, 41):
        load.tick(tick * 0.25, working=True)
    assert load.hungry
    load.taker_goes_on(10.0)
    for tick in range(41, 81):
        load.tick(tick * 0.25, working=False)
    assert not load.hungry


def test_a_change_of_the_pool_begins_anew() -> None:
    load = Load(0.0)
    now = run(load, 0.0, 20.0, waits=1, works=1)
    load.forget()
    assert not load.hungry
    run(load, now, SETTLED_S + 0.5, waits=0.0, works=0.0)
    assert not load.hungry
    assert load.working_share is not None
