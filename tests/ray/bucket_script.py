"""Runs over a bucket on a Ray cluster of their own, in a process whose environment has the credentials; `test_ray_bucket.py` starts it.

It reads tasks, a line of JSON each, and answers each with one. What the driver logs or prints goes to standard error.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
import time
from typing import Any

from ray import cloudpickle

from zephon_ray.collector import prepare
from zephon_ray.errors import ZephonError
from zephon_ray.recipe import Recipe, recipe_from_dict
from zephon_ray.runners.ray_cluster import connect
from zephon_ray.runs import produce


def run(recipe: Recipe, task: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        chain = produce(recipe, steps=task["steps"], runner="ray", workers=2, out=task["out"]).chain
    except ZephonError as error:
        return {"error": type(error).__name__, "text": str(error), "took_s": time.monotonic() - began}
    return {"chain": chain}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    logging.basicConfig(level=logging.DEBUG)
    cluster = connect(None)  # one for all tasks
    try:
        answers.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            task = json.loads(line)
            recipe = recipe_from_dict(task["recipe"], task["folder"])
            found = run(recipe, task)
            job, _ = prepare(recipe)
            words = [os.environ[name].encode() for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
            pickled = pickle.dumps(job) + cloudpickle.dumps(job)
            answers.write(json.dumps({**found, "told": [word.decode() for word in words if word in pickled]}) + "\n")
    finally:
        cluster.leave()


if __name__ == "__main__":
    main()
