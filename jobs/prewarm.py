"""`zephon-ray prewarm` as a Ray job: the cluster's workers fill a recipe's token cache."""

from __future__ import annotations

import sys

from zephon_ray.cli.jobs import run_job

sys.exit(run_job("prewarm", sys.argv[1:]))
