"""What every test shares: Hypothesis profiles, the golden cases, and what several folders ask for."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

from tests.buckets import bucket, proxy, s3_endpoint
from tests.golden_cases import GoldenCase, load_golden_cases
from tests.ray_session import group, ray_session

__all__ = ["bucket", "proxy", "ray_session", "s3_endpoint"]

# Ray's workers would run at nice 15, behind whatever other tests run at the same time: the longest chain of tests would wait for all.
os.environ.setdefault("RAY_worker_niceness", "0")

# The same examples on every machine: a failure can be seen again, and a pass does not hang on luck.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
# For a search by hand: HYPOTHESIS_PROFILE=search pytest -k ...
settings.register_profile("search", parent=settings.get_profile("ci"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `golden_case` runs once for each."""
    if "golden_case" in metafunc.fixturenames:
        cases = load_golden_cases()
        metafunc.parametrize("golden_case", cases.values(), ids=cases.keys())


@pytest.hookimpl(tryfirst=True)  # before xdist looks at groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    group(items)


def pytest_collection_finish() -> None:
    """What was imported stays, so the collector need not look at it: tests of what a process holds collect hundreds of times."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def golden_cases() -> dict[str, GoldenCase]:
    """All golden cases by name."""
    return load_golden_cases()
