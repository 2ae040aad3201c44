"""What can be imported, what that costs, and which names are public."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import zephon_ray
from tests.reading import as_arrow, as_parquet, gz, json_lines, put
from tests.small import fields

PUBLIC = [
    "BadRecordError",
    "Batch",
    "DataChangedError",
    "DifferenceError",
    "FeedError",
    "FencedError",
    "GlobalBatch",
    "Loader",
    "Recipe",
    "RecipeError",
    "RefusedError",
    "ReplayError",
    "RunDirectoryError",
    "RunnerError",
    "SourceError",
    "StateError",
    "StorageError",
    "SystemFault",
    "UserError",
    "ZephonError",
    "__version__",
    "connect",
    "load_recipe",
]

NEED_RAY_OR_TORCH = ("zephon_ray.runners.ray", "zephon_ray.cli.feed", "zephon_ray.feed", "zephon_ray.training")

# The preamble of a process in which importing ray, torch or torchtitan raises.
REFUSING = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "torch", "torchtitan"):
            raise ImportError("forbidden: " + name)
sys.meta_path.insert(0, Refuse())
"""


def _modules(folder: Path, prefix: str) -> list[str]:
    """All modules below a package, found without importing any."""
    found = []
    for module in pkgutil.iter_modules([str(folder)], prefix):
        found.append(module.name)
        if module.ispkg:
            found += _modules(folder / module.name.rpartition(".")[2], module.name + ".")
    return found


MODULES = [m for m in _modules(Path(zephon_ray.__file__).parent, "zephon_ray.") if not m.startswith(NEED_RAY_OR_TORCH)]


def _python(code: str) -> subprocess.CompletedProcess[str]:
    root = Path(zephon_ray.__file__).parents[1]
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=root, check=False)


def test_the_refusing_preamble_refuses() -> None:
    assert "forbidden: ray" in _python(REFUSING + "import ray.data").stderr


def test_this_folder_s_tests_run_where_they_cannot_be_imported() -> None:
    with pytest.raises(ImportError, match="must not import torchtitan"):
        importlib.import_module("torchtitan.anything")  # also where other tests of this process have imported it


def test_every_core_module_imports_where_ray_and_torch_cannot_be() -> None:
    assert {"zephon_ray.errors", "zephon_ray.hashing"} <= set(MODULES)
    # A `__main__` runs when it is imported.
    names = [m for m in MODULES if not m.endswith("__main__")]
    done = _python(REFUSING + f"import importlib\nfor name in {names!r}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_none_of_its_dependencies() -> None:
    code = "import sys; before = set(sys.modules); import zephon_ray, json; print(json.dumps(sorted(set(sys.modules) - before)))"
    loaded = {name.partition(".")[0] for name in json.loads(_python(code).stdout)}
    heavy = {"fsspec", "numpy", "orjson", "pyarrow", "pydantic", "ray", "rich", "tokenizers", "torch", "torchtitan", "typer", "yaml"}
    assert loaded & heavy == set()
    assert "zephon_ray" in loaded


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("zephon_ray.runners.worker", {"asyncio", "fsspec", "tenacity", "yaml"}),
        ("zephon_ray.runners.ray_mailbox", {"numpy", "pyarrow", "pydantic"}),
    ],
)
def test_the_process_of_a_worker_does_not_load_what_others_need(module: str, without: set[str]) -> None:
    """There are many of them, and a stream waits for the first."""
    loaded = json.loads(_python(f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))").stdout)
    assert module in loaded
    assert without & set(loaded) == set()


@pytest.mark.parametrize("cached", [False, True])
def test_a_stream_does_not_load_pandas(tmp_path: Path, cached: bool) -> None:
    """It is 50 MB and a third of a second in each process that reads; pyarrow imports it for many things, where it is installed."""
    pytest.importorskip("pandas")
    texts = [*("a text" * i for i in range(1, 50)), "", None, *("noch einer, größer " * i for i in range(1, 50))]
    put(tmp_path / "rows" / "a.parquet", as_parquet(texts, row_group_size=40))
    put(tmp_path / "batches" / "a.arrow", as_arrow(pa.record_batch({"text": pa.array(texts).dictionary_encode()})))
    put(tmp_path / "lines" / "a.jsonl", json_lines(texts[:49]))
    put(tmp_path / "packed" / "a.jsonl.gz", gz(json_lines(texts[:49])))
    execution = {"runner": "threads", "token_cache": str(tmp_path / "cache")} if cached else {"runner": "threads"}
    sources = {name: {"epochs": 1} for name in ("rows", "batches", "lines", "packed")}
    (tmp_path / "recipe.json").write_text(json.dumps(fields(sources, execution=execution, on_bad_record="skip")))
    code = (
        "import sys, zephon_ray\n"
        f"for _ in range({1 + cached}):\n"
        f"    with zephon_ray.Loader({str(tmp_path / 'recipe.json')!r}, runner='threads') as loader:\n"
        "        steps = sum(1 for _ in loader)\n"
        "print(steps, 'pandas' in sys.modules)"
    )
    done = _python(code)
    steps, loaded = done.stdout.split() or ("0", done.stderr)
    assert (int(steps) > 10, loaded) == (True, "False"), done.stderr


@pytest.mark.parametrize(("given", "kept"), [(None, "1000"), ("5", "5")])
def test_arrows_allocator_keeps_freed_pages_unless_the_user_says_how_long(given: str | None, kept: str) -> None:
    given_or_none = f"os.environ['MIMALLOC_PURGE_DELAY'] = {given!r}" if given else "os.environ.pop('MIMALLOC_PURGE_DELAY', None)"
    done = _python(f"import os; {given_or_none}; import zephon_ray; print(os.environ['MIMALLOC_PURGE_DELAY'])")
    assert done.stdout.strip() == kept, done.stderr


def test_the_public_names_are_these() -> None:
    assert sorted(zephon_ray.__all__) == sorted(PUBLIC)
    assert dir(zephon_ray) == sorted(PUBLIC)


NEED_RAY = {"connect"}


@pytest.mark.parametrize("name", sorted({*PUBLIC} - NEED_RAY))
def test_every_public_name_is_there(name: str) -> None:
    value = getattr(zephon_ray, name)
    assert getattr(value, "__name__", name) == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        _ = zephon_ray.conect
