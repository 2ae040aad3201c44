"""A link: a rank's calls to a feed that may be restarting. It knows when to call again, and nothing of rows.

An error that the feed raises is raised here as it is. Where the feed does not answer, `AwayError` says so; whoever calls opens again.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from zephon_ray.errors import FeedError, ZephonError
from zephon_ray.feed.protocol import NAMESPACE, POLL_S, Opened, OpenRequest, TakeReply, TakeRequest, actor_name

_GRACE_S = 15.0
"""A call that takes so much longer than it may is lost: the feed's process is stopped, or its node is gone."""
_OPEN_S = 330.0
_LEAVE_S = 5.0
_TRY_S = 0.5


class AwayError(FeedError):
    """The feed does not answer."""


class Link:
    """Calls of one rank.

    Args:
        name: of the feed.
        request: how it is opened.
        reconnect_s: how long a feed that is away is waited for.
    """

    def __init__(self, name: str, request: OpenRequest, reconnect_s: float) -> None:
        self._name, self._request, self._reconnect = name, request, reconnect_s
        self._actor: Any = None
        self._closed = False

    def open(self, state: bytes | None) -> Opened:
        """Open the stream after a state, or come back to it; waits for a feed that is away.

        Raises:
            FeedError: it is not there for `reconnect_s`.
            ZephonError: what the feed raises.
        """
        request = replace(self._request, state=state)
        deadline = time.monotonic() + self._reconnect
        while True:
            try:
                self._actor = ray.get_actor(actor_name(self._name), namespace=NAMESPACE)
                opened: Opened = self._call("open", request, timeout_s=_OPEN_S)
            except (ValueError, AwayError) as error:  # ValueError: no actor of that name
                if self._closed or time.monotonic() > deadline:
                    raise FeedError(
                        f"feed {self._name!r} is not there, or did not come back within {self._reconnect:.0f} s ({_short(error)})."
                        " Look for it with `zephon-ray status`, or serve it, and start this rank again"
                    ) from error
                time.sleep(_TRY_S)
            else:
                self._request = replace(self._request, takeover=False)  # coming back pushes nobody out
                return opened

    def take(self, request: TakeRequest) -> TakeReply:
        """The next steps. The session is filled in.

        Raises:
            AwayError: the feed does not answer.
            ZephonError: what the feed raises.
        """
        reply: TakeReply = self._call("take", replace(request, session=self._request.session), timeout_s=POLL_S + _GRACE_S)
        return reply

    def saved(self, step: int) -> None:
        """Tell the feed, if it is there, that a state was saved. Nothing is waited for."""
        with suppress(RayError):
            # no answer: Ray prints errors that nobody asks for
            self._actor.saved.options(num_returns=0).remote(self._request.session, step)

    def leave(self) -> None:
        """Tell the feed, if it is there, that this rank is done; a call that is under way ends."""
        self._closed = True
        if self._actor is not None and ray.is_initialized():
            with suppress(RayError):
                ray.get(self._actor.leave.remote(self._request.session), timeout=_LEAVE_S)

    def _call(self, method: str, *args: Any, timeout_s: float) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*args), timeout=timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, ZephonError):
                raise error.cause from None
            raise FeedError(f"feed {self._name!r} failed: {_short(error)}") from error
        except RayError as error:
            raise AwayError(_short(error)) from error


def _short(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:300]}..."
