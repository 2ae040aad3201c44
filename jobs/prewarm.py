"""Fills a recipe's token cache. There is no token cache yet, so this says so and ends with 2."""

from __future__ import annotations

import sys

from zephon_ray.cli.faults import tell_error
from zephon_ray.errors import UserError

NO_CACHE = UserError(
    "prewarm: this version of zephon_ray has no token cache, so there is nothing to fill. Leave this job out: units are tokenised when"
    " they are needed"
)

sys.exit(tell_error(NO_CACHE, as_json="--json" in sys.argv[1:]))
