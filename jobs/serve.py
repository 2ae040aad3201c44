"""`zephon-ray serve` as a Ray job, on the cluster that the job was submitted to."""

from __future__ import annotations

import sys

from zephon_ray.cli.jobs import run_job

sys.exit(run_job("serve", sys.argv[1:]))
