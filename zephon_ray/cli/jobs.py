"""Commands as Ray jobs: what `jobs/*.py` are made of."""

from __future__ import annotations

import os
from collections.abc import Sequence

from zephon_ray.cli import faults
from zephon_ray.cli.main import run_command
from zephon_ray.errors import UserError


def run_job(verb: str, arguments: Sequence[str]) -> int:
    """Run a command on the cluster of the job that this process is. Returns the exit code; nothing is raised.

    Ray tells a job its cluster in RAY_ADDRESS. The commands themselves never look there.

    Args:
        verb: "serve", or one that reads: "verify", "prewarm".
        arguments: what follows it on the command line.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        error = UserError(f"RAY_ADDRESS is not set, so this is no Ray job. Submit it with `ray job submit`, or use `zephon-ray {verb}`")
        return faults.tell_error(error, as_json="--json" in arguments)
    if verb != "serve":
        if any(argument.split("=")[0] == "--runner" for argument in arguments):
            error = UserError(f"--runner: a job runs on Ray. Leave it out, or use `zephon-ray {verb}` on one machine")
            return faults.tell_error(error, as_json="--json" in arguments)
        arguments = [*arguments, "--runner", "ray"]
    return run_command([verb, *arguments, "--address", address])
