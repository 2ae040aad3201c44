"""A feed for the ranks of one host that are in no cluster, as `torchrun` starts them: the first one makes it, and the others share it."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from types import TracebackType
from typing import Self

from zephon_ray.errors import FeedError, UserError
from zephon_ray.feed.election import Election, private_folder
from zephon_ray.feed.service import READY_S, Order, Service

SHARE_S = READY_S + 60.0
"""How long a rank waits for another to have started the cluster and the feed."""

LEAVE_S = 60.0
"""How long the one that started it waits for the others to be done."""

_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")


class HostFeed:
    """The one feed of this host for a run. Close it: who started it, stops it, once the others have closed theirs or ended.

    Args:
        order: what is wanted, the same on every rank; its name may be "" for one that the ranks of a run have in common.
        wait_s: seconds to wait for another rank that starts it.

    Raises:
        UserError: the ranks are on several hosts.
        FeedError: another rank did not start it in time.
        RecipeError, SourceError, StorageError, RunDirectoryError, RunnerError: as `Service.start`.
    """

    def __init__(self, order: Order, *, wait_s: float = SHARE_S) -> None:
        _check_one_host()
        self.name = order.name or _common_name(order)
        self._election = Election(re.sub(r"[^\w.-]", "_", self.name), private_folder())
        self._service: Service | None = None
        try:
            published = self._election.run(wait_s)
            if published is None:
                self._start(replace(order, name=self.name))
            else:
                self._join(published, order.token)
        except BaseException:
            self._leave()
            raise

    @property
    def started(self) -> bool:
        """It was this process that started it."""
        return self._election.elected

    @property
    def address(self) -> str:
        """Of the cluster that it lives on."""
        if self._service is None:
            raise FeedError(f"the feed {self.name!r} of this host was closed. Make a new one")
        return self._service.address

    def _start(self, order: Order) -> None:
        self._service = Service(None, order.token)
        self._service.start(order)
        auth = {name: os.environ[name] for name in _AUTH if name in os.environ}
        self._election.publish({"address": self._service.address, "auth": auth})

    def _join(self, published: dict[str, object], token: str | None) -> None:
        auth = published["auth"]
        assert isinstance(auth, dict)
        os.environ.update(auth)  # the cluster is the same user's
        self._service = Service(str(published["address"]), token)

    def close(self) -> None:
        """Be done with it; again does nothing."""
        service = self._service
        if service is None:
            return
        try:
            if self.started:
                self._election.wait_for_users(LEAVE_S)
                service.stop(self.name, force=True)
        finally:
            self._leave()

    def _leave(self) -> None:
        """First the cluster, then the locks: the next one elected finds a host without it."""
        service, self._service = self._service, None
        if service is not None:
            service.close()
        self._election.resign()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _check_one_host() -> None:
    here, everywhere = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    if here is not None and everywhere is not None and here != everywhere:
        raise UserError(
            f"{here} of {everywhere} ranks are on this host, and a feed without a cluster serves one host. Start a Ray cluster with all"
            " of them, `zephon-ray serve` on it, and give its address"
        )


def _common_name(order: Order) -> str:
    """The same for all ranks that one torchrun started, and for no others: its run id need not be unique, its process is."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{order.recipe.name}-{run}-{os.getppid()}" if run else f"{order.recipe.name}-{os.getpid()}"
