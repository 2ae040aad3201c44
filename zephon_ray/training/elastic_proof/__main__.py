"""`python -m zephon_ray.training.elastic_proof`: exit code 0 if all is equal, 1 if something differs, 2 for a mistake, 3 for a fault."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from zephon_ray.errors import ZephonError
from zephon_ray.training.elastic_proof.proof import prove
from zephon_ray.training.elastic_proof.report import show
from zephon_ray.training.elastic_proof.setting import make_setting


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the proof, and print what came of it.

    Args:
        arguments: of the command line; None for those of this process.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    if options.out:
        return _prove(options, options.out)
    with tempfile.TemporaryDirectory(prefix="elastic-proof-") as folder:
        return _prove(options, Path(folder))


def _prove(options: argparse.Namespace, folder: Path) -> int:
    try:
        setting = make_setting(folder, options.recipe, sizes=options.sizes, chain=options.chain, short=options.short)
        proof = prove(setting, _say)
    except ZephonError as error:
        _say(f"{type(error).__name__}: {error}")
        return error.exit_code
    show(proof)
    return 0 if proof.good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zephon_ray.training.elastic_proof",
        description="Train with TorchTitan on CPU ranks, resume one checkpoint in many ways, and compare every row and loss.",
    )
    parser.add_argument("--short", action="store_true", help="what a test runs: without Ray, on a shorter chain")
    parser.add_argument("--recipe", type=Path, help="the recipe to prove it on; by default a small corpus is made")
    parser.add_argument("--sizes", type=_sizes, metavar="1,2,4,8", help="numbers of data-parallel ranks to resume on")
    parser.add_argument("--chain", type=_sizes, metavar="4,2,8,1", help="numbers of ranks, one after the other, saved at odd steps")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep records, logs and checkpoints there; a folder that is empty or new")
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are no whole numbers with commas between them, as 4,2,8,1") from None


def _say(sentence: str) -> None:
    sys.stderr.write(f"proof: {sentence}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
