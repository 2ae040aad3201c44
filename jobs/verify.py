"""`zephon-ray verify` as a Ray job: the cluster's workers make the steps of a run again, and they are compared with its ledger."""

from __future__ import annotations

import sys

from zephon_ray.cli.jobs import run_job

sys.exit(run_job("verify", sys.argv[1:]))
