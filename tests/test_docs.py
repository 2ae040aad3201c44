"""Documents tell the truth: their blocks run, and their links lead somewhere.

A fenced block is run if a comment stands on the line before it, all blocks of a document in one folder and one process each language run:

    <!-- run -->            before ```python or ```bash: it is executed and must succeed
    <!-- file: NAME -->     before any block: it is written to NAME
    <!-- not run: WHY -->   before ```python: it is left alone
"""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.golden_cases import GOLDEN

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "infra", "jobs", "notebooks", "recipes")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.md"))])
BLOCK = re.compile(r"(?:^<!-- *(?P<mark>[^\n]*?) *-->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block: its language, the comment before it ("" for none), its text, and the line it begins at."""

    language: str
    mark: str
    body: str
    line: int


def blocks_of(text: str) -> list[Block]:
    return [
        Block(language=m["language"], mark=m["mark"] or "", body=m["body"], line=text[: m.start("body")].count("\n") + 1)
        for m in BLOCK.finditer(text)
    ]


def anchors_of(text: str) -> set[str]:
    """Names of a document's headings as links spell them."""
    headings = re.findall(r"^#+ +(.*?) *$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path, text: str) -> list[str]:
    broken = []
    for target in LINK.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path) if path else document
        if not file.exists() or (anchor and anchor not in anchors_of(file.read_text(encoding="utf-8"))):
            broken.append(target)
    return broken


def _ids(paths: list[Path]) -> list[str]:
    return [p.relative_to(ROOT).as_posix() for p in paths]


@pytest.mark.parametrize("document", DOCUMENTS, ids=_ids(DOCUMENTS))
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    assert broken_links(document, document.read_text(encoding="utf-8")) == []


def test_a_broken_link_or_anchor_is_found(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("# One, two\n")
    text = "[x](a.md#one-two) [x](b.md) [x](a.md#three) [x](#one-two) [x](https://example.org/none)"
    assert broken_links(document, text) == ["b.md", "a.md#three"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=_ids(DOCUMENTS))
def test_every_python_block_runs_or_says_why_not(document: Path) -> None:
    blocks = [b for b in blocks_of(document.read_text(encoding="utf-8")) if b.language == "python"]
    assert [b.line for b in blocks if not re.match(r"run$|not run: .|file: .", b.mark)] == []


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder such as a reader has who follows the documents: raw documents in `data`, a tokenizer, the commands."""
    sentences = [f"Sentence {i} of a page about lanes, windows and the number {i * i}." for i in range(400)]
    for part in range(2):
        shard = tmp_path / "data" / "web" / f"{part}" / "pages.jsonl"
        shard.parent.mkdir(parents=True)
        shard.write_text("".join(json.dumps({"text": " ".join(sentences[i : i + 9])}) + "\n" for i in range(part, 390, 2)))
    (tmp_path / "data" / "code").mkdir()
    code = [p.read_text(encoding="utf-8") for p in sorted((ROOT / "tests").glob("*.py"))]
    pq.write_table(pa.table({"text": code}), tmp_path / "data" / "code" / "0.parquet")
    (tmp_path / "tokenizer.json").write_bytes((GOLDEN / "tokenizer.json").read_bytes())
    command = tmp_path / "bin" / "zephon-ray"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nfrom zephon_ray.cli.main import main\nmain()\n")
    command.chmod(0o755)
    return tmp_path


def _run(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    environment["RAY_ADDRESS"] = "127.0.0.1:1"  # of a stranger's cluster, which nothing may join
    command = [sys.executable, "-c", block.body] if block.language == "python" else ["bash", "-euo", "pipefail", "-c", block.body]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False)


RUNNING = [d for d in DOCUMENTS if any(b.mark == "run" for b in blocks_of(d.read_text(encoding="utf-8")))]


@pytest.mark.parametrize(
    "document", [pytest.param(d, marks=pytest.mark.xdist_group("ray")) if d.name == "README.md" else d for d in RUNNING], ids=_ids(RUNNING)
)
def test_marked_blocks_run(document: Path, desk: Path) -> None:
    for block in blocks_of(document.read_text(encoding="utf-8")):
        if block.mark.startswith("file: "):
            (desk / block.mark.removeprefix("file: ")).write_text(block.body, encoding="utf-8")
        elif block.mark == "run":
            done = _run(block, desk)
            assert done.returncode == 0, f"{document.name}, block at line {block.line}:\n{done.stdout}{done.stderr}"


def test_a_block_that_fails_is_seen(tmp_path: Path) -> None:
    text = "<!-- run -->\n```python\nassert 1 == 2\n```\n\n<!-- run -->\n```bash\nfalse\ntrue\n```\n"
    blocks = blocks_of(text)
    assert [(b.language, b.mark) for b in blocks] == [("python", "run"), ("bash", "run")]
    assert all(_run(b, tmp_path).returncode != 0 for b in blocks)


def test_readme_and_contract_have_blocks_that_run() -> None:
    assert {"README.md", "docs/contract.md"} <= set(_ids(RUNNING))


def test_the_architecture_names_the_layers_that_the_linter_holds() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    held = {name for layer in contracts[0]["layers"] for name in re.findall(r"\w+", layer)} - {"__main__"}
    table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("| layer |")[2].partition("\n\n")[0]
    firsts = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for first in firsts for name in re.findall(r"`(\w+)`", first)} == held


WITH_EXAMPLES = sorted(p for p in (ROOT / "zephon_ray").rglob("*.py") if ">>> " in p.read_text(encoding="utf-8"))


def test_docstring_examples_give_what_they_say() -> None:
    for path in WITH_EXAMPLES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        assert doctest.testmod(importlib.import_module(name)).failed == 0, name
