"""Faults of stores: which of them pass, how long to wait for that, and what to say of those that last."""

from __future__ import annotations

import errno
import random
import re
from typing import TYPE_CHECKING

import pyarrow as pa

from zephon_ray.recipe_fields import StorageSpec

if TYPE_CHECKING:
    import tenacity

FIRST_WAIT, LONGEST_WAIT = 0.2, 20.0
"""The wait after try n is drawn evenly from the upper half of [0, FIRST_WAIT * 2^(n-1)], at most LONGEST_WAIT seconds: it grows, and
workers that were refused together do not come back together."""
# What stores and their clients say of faults that pass. pyarrow gives AWS's answers as text in an OSError, so text is all there is.
_PASSING = (
    "slow down", "slow_down", "slowdown", "throttl", "too many requests", "service_unavailable", "service unavailable",
    "serviceunavailable", "internal_failure", "internalerror", "internal error", "bad gateway", "gateway timeout", "request_timeout",
    "requesttimeout", "timed out", "timeout", "network_connection", "connection", "couldn't connect", "could not connect", "curlcode",
    "incomplete", "http status 429", "http status 500", "http status 502", "http status 503", "http status 504",
    "http response code: 500", "http response code: 503", "payload is not completed", "server disconnected",
)  # fmt: skip
_EXPIRED = (
    "expiredtoken",
    "expired_token",
    "expired token",
    "token has expired",
    "tokenrefreshrequired",
    "request_expired",
    "unknown (http status 400)",  # what AWS's client makes of an answer that names no cause, as one to HEAD never does
)
_DENIED = (
    "access_denied", "access denied", "accessdenied", "http status 403", "invalid_access_key_id", "invalidaccesskeyid",
    "signature_does_not_match", "signaturedoesnotmatch",
)  # fmt: skip
_PASSING_ERRNO = {
    errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT, errno.EAGAIN, errno.EHOSTUNREACH,
    errno.ENETUNREACH,
}  # fmt: skip
LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_SPREAD = random.SystemRandom()
"""Not the shared generator: workers are often seeded alike, and a trainer's own draws must not depend on a store's moods."""


def wait(state: tenacity.RetryCallState) -> float:
    """Seconds until the next try."""
    longest = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(state.attempt_number - 1, 64))
    return _SPREAD.uniform(longest / 2, longest)


def again(state: tenacity.RetryCallState, spec: StorageSpec) -> bool:
    """Whether the next try may do better. Refused credentials may have been replaced since they were read: they are read once more."""
    error = last(state)
    if error is None:
        return False
    return passing(error) or (denied(error) and state.attempt_number == 1 and not spec.anonymous)


def _said(error: BaseException) -> str:
    """What an error says, without the names in it: an object may be called `timeout`."""
    text = re.sub(r"key '.*' in bucket '[^']*'", "", f"{type(error).__name__}: {error}", flags=re.DOTALL)
    # s3fs makes an OSError of botocore's error, which knows the answer's status, and its code if the answer had a body.
    answer = getattr(error.__cause__ or error, "response", None)
    if isinstance(answer, dict):
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = answer.get("Error", {}).get("Code")
        text += f" {'unknown' if code == str(status) else code} (http status {status})"
    return text.lower()


def passing(error: BaseException) -> bool:
    """Whether a fault may be gone at the next try."""
    if isinstance(error, ConnectionError | TimeoutError) or expired(error):
        return True
    if isinstance(error, LASTING) or not of_a_store(error):
        return False
    return getattr(error, "errno", None) in _PASSING_ERRNO or any(word in _said(error) for word in _PASSING)


def of_a_store(error: BaseException) -> bool:
    """Whether it comes from a store or its client, each of which has errors of its own, rather than from a fault in this program."""
    return isinstance(error, OSError | pa.ArrowException) or type(error).__module__.split(".")[0] not in ("builtins", "zephon_ray")


def expired(error: BaseException) -> bool:
    """Whether the credentials were good once; others may have taken their place by now."""
    return of_a_store(error) and any(word in _said(error) for word in _EXPIRED)


def denied(error: BaseException) -> bool:
    """Whether the store does not know the credentials, or does not let them do this."""
    if not of_a_store(error) or expired(error):
        return False
    return isinstance(error, PermissionError) or any(word in _said(error) for word in _DENIED)


def mend(error: BaseException) -> str:
    """What to do about a fault that lasted."""
    if expired(error):
        return (
            "The credentials have run out or are missing, and none that are good were found: renew them where this process looks for "
            "them (environment, credentials file, role of the machine)."
        )
    return "Check the name, the store's endpoint and the credentials in the environment; if it is overloaded, run fewer workers."


def last(state: tenacity.RetryCallState) -> BaseException | None:
    """How the latest try ended; None if well."""
    return state.outcome.exception() if state.outcome is not None else None
