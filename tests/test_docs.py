"""The documentation against the code: nothing promised that is not there, nothing there that is not told."""

from __future__ import annotations

import re
from pathlib import Path

import typer
from typer.main import get_command

from adapterd.cli.main import app
from adapterd.loader.errors import Code
from adapterd.registry.app import create_app
from adapterd.registry.operations import initialise
from adapterd.registry.settings import load_settings

ROOT = Path(__file__).resolve().parent.parent
SURFACES = (ROOT / "docs/surfaces.md").read_text()
WORDS = set(re.findall(r"`([^`\n]+)`", SURFACES))


def section(title: str) -> str:
    return SURFACES.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_problem_code_is_listed() -> None:
    listed = set(re.findall(r"`([A-Z][A-Z_]+)`", section("Problems")))
    assert listed == {code.value for code in Code}


def test_every_command_is_listed() -> None:
    def commands(app: typer.Typer) -> set[str]:
        found = set()
        for name, one in get_command(app).commands.items():  # type: ignore[attr-defined]
            below = getattr(one, "commands", None)
            found |= {f"{name} {sub}" for sub in below} if below else {name}
        return found

    assert commands(app) <= WORDS
    rows = [line for line in section("adapterctl").splitlines() if line.startswith("| `")]
    promised = {word for line in rows for word in re.findall(r"`([a-z -]+)`", line.split("|")[1])}
    assert promised == commands(app)


def test_every_route_is_listed(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path / "registry")
    initialise(settings)
    served = set(create_app(settings).openapi()["paths"])
    promised = {word for word in re.findall(r"`(/[^`]+)`", section("REST")) if not word.startswith("/openapi")}
    assert promised == served


def test_links_between_documents_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert len(pages) > 8
    for page in pages:
        for target in re.findall(
            r"`((?:docs|tests|examples|benchmarks|loader|registry|gpu_cache|cli)/[\w./-]+)`", page.read_text()
        ):
            assert (ROOT / target).exists(), f"{page.name}: {target}"


def test_every_test_that_a_document_names_exists() -> None:
    named = set()
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        named |= set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()))
    assert len(named) > 40
    for path, test in sorted(named):
        assert re.search(rf"(?m)^\s*(?:async )?def {test}\(", (ROOT / path).read_text()), f"{path}::{test}"


def test_every_known_failure_has_a_test() -> None:
    cells = [
        line.strip("|").split(" | ") for line in (ROOT / "docs/failures.md").read_text().splitlines() if line[:1] == "|"
    ]
    rows = [row for row in cells if len(row) == 3 and row[2].strip() != "held by"]
    assert len(rows) > 20
    for what, _, tests in rows:
        assert re.fullmatch(r"(`tests/[\w/]+\.py::\w+`(, )?)+", tests.strip()), what
