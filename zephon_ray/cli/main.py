"""The commands of zephon-ray: what they are called, what they take, and what help says of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

import zephon_ray
from zephon_ray.cli import faults

_PROGRAM = "zephon-ray"
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""The usage errors of the parser that typer brings along; it has no public name for them."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})


class RunnerName(StrEnum):
    """Who reads and tokenises."""

    INLINE = "inline"
    THREADS = "threads"
    PROCESSES = "processes"
    RAY = "ray"


RecipePath = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file.", show_default=False)]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Override a field, as lanes=4 or sources.web.weight=0.5. Repeatable.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON to stdout, errors too.")]
Runner = Annotated[RunnerName | None, typer.Option(help="Who reads and tokenises; by default the recipe's.", show_default=False)]
Workers = Annotated[
    int | None, typer.Option(min=1, help="How many read and tokenise, at most; by default the recipe's.", show_default=False)
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="The Ray cluster to work on. Without it ray starts one on this machine and ends it, whatever RAY_ADDRESS says: no other"
        " cluster is ever joined.",
        show_default=False,
    ),
]

ItsAddress = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="The Ray cluster that it lives on; by default that of RAY_ADDRESS.", show_default=False),
]
TokenFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Holds a token: the feed takes only clients that present it too.", show_default=False),
]
FeedName = Annotated[str, typer.Argument(metavar="NAME", help="The name of a feed.", show_default=False)]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """LLM training data made while the model trains: the same bytes on any number of ranks, workers and restarts, with a proof.

    Exit codes: 0 all is well, 1 a difference was found, 2 a mistake of yours, 3 a fault of the system, 130 interrupted.
    """
    if version:
        sys.stdout.write(f"{_PROGRAM} {zephon_ray.__version__}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


@app.command(epilog="Example: zephon-ray demo --steps 60")
def demo(
    directory: Annotated[str, typer.Option("--dir", help="Where corpus, tokenizer and recipe are kept.")] = ".demo",
    steps: Annotated[int, typer.Option(min=6, help="Steps of the uninterrupted run.")] = 60,
    runner: Annotated[
        RunnerName, typer.Option(help="Who reads and tokenises. Where workers are no processes, the run with the kill has processes.")
    ] = RunnerName.RAY,
    address: Address = None,
    json: Json = False,
) -> int:
    """Make a small real corpus, run it, kill a worker, stop, resume at other dp sizes, and compare all digests."""
    from zephon_ray.cli.demo import demonstrate

    return demonstrate(directory, steps, runner.value, address, as_json=json)


@app.command(epilog="Example: zephon-ray validate recipe.yaml --dp-size 16 --deep")
def validate(
    recipe: RecipePath,
    deep: Annotated[bool, typer.Option("--deep", help="Read and tokenise one epoch of every source too.")] = False,
    dp_size: Annotated[
        list[int], typer.Option(metavar="N", help="A number of ranks that must be possible. Repeatable.", show_default=False)
    ] = [],  # noqa: B006
    overrides: Overrides = [],  # noqa: B006
    json: Json = False,
) -> int:
    """Check recipe, tokenizer, special tokens, shards, footers and dp sizes; with --deep every record too."""
    from zephon_ray.cli.validate import check

    return check(recipe, overrides, dp_size, deep=deep, as_json=json)


@app.command(epilog="Example: zephon-ray index recipe.yaml --out manifests")
def index(
    recipe: RecipePath,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Write the manifests there, a file a source.", show_default=False)] = None,
    overrides: Overrides = [],  # noqa: B006
    json: Json = False,
) -> int:
    """List the shards of every source, and what their names, sizes and footers say. No text is read."""
    from zephon_ray.cli.index import list_sources

    return list_sources(recipe, overrides, out, as_json=json)


@app.command(epilog="Example: zephon-ray plan recipe.yaml --gpus 8,16,64 --tokens-per-second 2e6")
def plan(
    recipe: RecipePath,
    gpus: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of data-parallel ranks to look at.", show_default=False)] = "",
    tokens_per_second: Annotated[
        float | None, typer.Option(help="What training takes; tells cores and bandwidth.", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Length of the run that is planned.")] = 1000,
    cpu_per_mtok: Annotated[float, typer.Option(help="CPU seconds that a million tokens take: an assumption; `run` measures it.")] = 1.6,
    overrides: Overrides = [],  # noqa: B006
    json: Json = False,
) -> int:
    """Estimate what a run will need, from manifests and a sample of each source."""
    from zephon_ray.cli.plan import look_ahead

    return look_ahead(recipe, overrides, gpus, tokens_per_second, steps, cpu_per_mtok, as_json=json)


@app.command(epilog="Example: zephon-ray run recipe.yaml --steps 1000 --out runs/first")
def run(
    recipe: RecipePath,
    steps: Annotated[int, typer.Option(min=1, help="Go on up to and including this step.", show_default=False)],
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The run's directory (a path or URL); one that exists is continued.", show_default=False),
    ] = None,
    runner: Runner = None,
    workers: Workers = None,
    address: Address = None,
    dp_size: Annotated[int, typer.Option(min=1, help="Cut the batches for so many ranks, and check what each gets.")] = 1,
    print_digests: Annotated[bool, typer.Option("--print-digests", help="Print a line a step: step, digest, chain.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
    overrides: Overrides = [],  # noqa: B006
    json: Json = False,
) -> int:
    """Make global batches and their ledger. TERM and Ctrl-C finish the step in hand and save the state."""
    from zephon_ray.cli.run import Wanted, make

    wanted = Wanted(
        recipe=recipe, overrides=tuple(overrides), steps=steps, out=out, runner=runner.value if runner else None, workers=workers,
        address=address, dp_size=dp_size, print_digests=print_digests, quiet=quiet, as_json=json,
    )  # fmt: skip
    return make(wanted)


@app.command(epilog="Example: zephon-ray prewarm recipe.yaml --set execution.token_cache=cache")
def prewarm(
    recipe: RecipePath,
    runner: Runner = None,
    workers: Workers = None,
    address: Address = None,
    overrides: Overrides = [],  # noqa: B006
    json: Json = False,
) -> int:
    """Fill the token cache of a recipe: tokenise every source once. What is there is not made again."""
    from zephon_ray.cli.prewarm import fill

    return fill(recipe, overrides, runner.value if runner else None, workers, address, as_json=json)


class EngineName(StrEnum):
    """What makes ids of texts."""

    AUTO = "auto"
    HF = "hf"
    FAST = "fast"


@app.command(epilog="Example: zephon-ray bench recipe.yaml --runner threads --runner ray --seconds 20 --compare")
def bench(
    recipe: RecipePath,
    runner: Annotated[
        list[RunnerName], typer.Option(help="Who reads and tokenises; by default the recipe's. Repeatable.", show_default=False)
    ] = [],  # noqa: B006
    engine: Annotated[EngineName | None, typer.Option(help="What makes ids; by default the recipe's.", show_default=False)] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Each measurement takes so long, after its first batches.")] = 10.0,
    compare: Annotated[bool, typer.Option("--compare", help="Beside other loaders that are installed, on the same documents.")] = False,
    workers: Workers = None,
    address: Address = None,
    overrides: Overrides = [],  # noqa: B006
    json: Json = False,
) -> int:
    """Measure what batches cost: CPU a token against the engine's own limit, speed, start-up, memory. Each in a fresh process."""
    from zephon_ray.cli.bench import Wanted, measure

    wanted = Wanted(
        recipe=recipe, overrides=(*overrides, *(f"execution.engine={engine.value}" for engine in [engine] if engine)),
        runners=tuple(runner.value for runner in runner) or (None,), seconds=seconds, compare=compare, workers=workers, address=address,
        as_json=json,
    )  # fmt: skip
    return measure(wanted)


@app.command(epilog="Example: zephon-ray verify runs/first --steps 100:200")
def verify(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The directory of a run.", show_default=False)],
    steps: Annotated[str, typer.Option(metavar="A:B", help="Steps A to B; by default all.", show_default=False)] = "",
    recipe: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="Where the data or tokenizer lie now, if they moved.", show_default=False)
    ] = None,
    runner: Runner = None,
    workers: Workers = None,
    address: Address = None,
    overrides: Overrides = [],  # noqa: B006
    json: Json = False,
) -> int:
    """Make the steps of a run again from the nearest state, and compare them with its ledger."""
    from zephon_ray.cli.verify import compare

    return compare(directory, steps, recipe, overrides, runner.value if runner else None, workers, address, as_json=json)


@app.command(epilog="Example: zephon-ray prove recipe.yaml --gpus 8,16,32,64 --at-step 100")
def prove(
    recipe: RecipePath,
    gpus: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of data-parallel ranks to resume at.", show_default=False)],
    at_step: Annotated[int, typer.Option(min=0, metavar="N", help="The state that is resumed is the one after it.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, metavar="K", help="Steps after it that are compared.")] = 4,
    runner: Runner = None,
    workers: Workers = None,
    address: Address = None,
    overrides: Overrides = [],  # noqa: B006
    json: Json = False,
) -> int:
    """Resume one state at several numbers of ranks, and compare every rank's rows with an uninterrupted run. Nothing is trained."""
    from zephon_ray.cli import prove as command

    wanted = command.Wanted(
        recipe=recipe, overrides=overrides, gpus=gpus, at_step=at_step, steps=steps, runner=runner.value if runner else None,
        workers=workers, address=address, as_json=json,
    )  # fmt: skip
    return command.pilot(wanted)


@app.command(epilog="Example: zephon-ray serve recipe.yaml --name first --out s3://bucket/runs/first --address 10.0.0.1:6379 --detach")
def serve(
    recipe: RecipePath,
    name: Annotated[str, typer.Option(metavar="NAME", help="What ranks find it by.", show_default=False)],
    out: Annotated[
        str, typer.Option(metavar="DIR", help="The run's directory (a path or URL); one that exists is continued.", show_default=False)
    ],
    validation: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help="What is validated on: a second stream, from its beginning each time.", show_default=False),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Leave it running on the cluster; `stop` ends it.")] = False,
    local_out_ok: Annotated[
        bool, typer.Option("--local-out-ok", help="DIR is a local path, but the same on all nodes of the cluster.")
    ] = False,
    token_file: TokenFile = None,
    address: Address = None,
    overrides: Overrides = [],  # noqa: B006
    json: Json = False,
) -> int:
    """Start a feed: one stream for any number of ranks, which connect to it by its name. TERM and Ctrl-C stop it, and nothing is lost."""
    from zephon_ray.cli import feed

    wanted = feed.Wanted(
        recipe=recipe, overrides=tuple(overrides), name=name, out=out, validation=validation, address=address, token_file=token_file,
        local_out_ok=local_out_ok, detach=detach, as_json=json,
    )  # fmt: skip
    return feed.serve(wanted)


@app.command(epilog="Example: zephon-ray stop first --address 10.0.0.1:6379")
def stop(
    name: FeedName,
    force: Annotated[bool, typer.Option("--force", help="Also where ranks read it, and where it does not answer.")] = False,
    token_file: TokenFile = None,
    address: ItsAddress = None,
    json: Json = False,
) -> int:
    """Stop a feed: it writes down what it has and ends. Its directory can be continued."""
    from zephon_ray.cli import feed

    return feed.stop(name, address, token_file, force=force, as_json=json)


@app.command(epilog="Example: zephon-ray status first --address 10.0.0.1:6379")
def status(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A feed; without it all are listed.", show_default=False)] = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once, also on a terminal.")] = False,
    token_file: TokenFile = None,
    address: ItsAddress = None,
    json: Json = False,
) -> int:
    """List the feeds of a cluster, or show one; on a terminal again and again until Ctrl-C."""
    from zephon_ray.cli import feed

    return feed.look(name, address, token_file, once=once, as_json=json)


def run_command(arguments: Sequence[str]) -> int:
    """Run a command line (without the program's name). Returns the exit code; nothing is raised."""
    as_json = "--json" in arguments
    command = typer.main.get_command(app)
    try:
        # Not `app()`, which ends the process with 1 (here: a difference) where a pipe was closed.
        with command.make_context(_PROGRAM, list(arguments)) as context:
            code = command.invoke(context)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.Exit as end:
        return end.exit_code
    except _USAGE_ERROR as error:
        failed = getattr(error, "ctx", None)
        usage = "" if failed is None else f"{failed.get_usage()}\nTry '{failed.command_path} --help'."
        return faults.tell_usage(error.format_message(), usage, as_json=as_json)  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("zephon-ray: interrupted\n")
        return faults.INTERRUPTED
    except BrokenPipeError:
        faults.mute_stdout()
        return faults.BROKEN_PIPE
    except Exception as error:  # noqa: BLE001  told in full, and an exit code of its own
        return faults.tell_error(error, as_json=as_json)


def main() -> None:
    """The entry point of `zephon-ray`."""
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
