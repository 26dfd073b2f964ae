"""The house itself: links, import names, the wheel's file list, and a type checker that sees the code."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import adapterd

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cli", "gpu_cache", "loader", "migrations", "registry")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_root_folder_has_its_link() -> None:
    links = {p.name: p for p in (ROOT / "src/adapterd").iterdir() if p.is_symlink()}
    assert sorted(links) == list(FOLDERS)
    for name, link in links.items():
        assert link.readlink() == Path("../..") / name
        assert (link / "__init__.py").is_file()


def test_every_root_folder_stands_in_the_lists() -> None:
    banned = PYPROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert sorted(banned) == list(FOLDERS)
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    layered = set(re.findall(r"\w+", " ".join(" ".join(c.get("layers", [])) for c in contracts)))
    assert set(FOLDERS) <= layered


def test_no_module_is_loaded_under_a_bare_name() -> None:
    """`import registry` works by accident from the root and gives a second set of classes (ADR 0001)."""
    code = (
        "import pkgutil, importlib, sys, adapterd\n"
        "for m in pkgutil.walk_packages(adapterd.__path__, 'adapterd.'):\n"
        "    if '.migrations.' not in m.name and not m.name.endswith('.__main__'): importlib.import_module(m.name)\n"
        f"print([n for n in sys.modules if n.split('.')[0] in {FOLDERS!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_the_registry_and_the_cli_import_without_torch() -> None:
    code = (
        "import sys\n"
        "import adapterd.cli.main, adapterd.registry.app, adapterd.loader.store, adapterd.loader.pack\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False False", done.stderr


@pytest.mark.slow
def test_mypy_sees_the_code(tmp_path: Path) -> None:
    """A planted type error against a real signature must be reported (links can blind a checker)."""
    planted = tmp_path / "planted.py"
    planted.write_text("from adapterd.loader.identity import sha256_hex\nsha256_hex('text, not bytes')\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(planted)],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert "[arg-type]" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_the_wheel_holds_the_code_and_nothing_else(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    code = {n for n in names if n.startswith("adapterd/")}
    sources = {
        f"adapterd/{p.relative_to(ROOT)}"
        for folder in FOLDERS
        for p in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in p.parts
    }
    tables = {f"adapterd/{p.relative_to(ROOT)}" for p in (ROOT / "gpu_cache/engine/kernels/tables").glob("*.json")}
    extra = {"adapterd/__init__.py", "adapterd/py.typed", "adapterd/migrations/script.py.mako"}
    assert tables
    assert code == sources | tables | extra
    assert all(n.startswith(("adapterd/", "adapterd-")) for n in names)


def test_the_version_is_the_distributions() -> None:
    assert adapterd.__version__ == PYPROJECT["project"]["version"]
    with pytest.raises(AttributeError, match="nonsense"):
        _ = adapterd.nonsense
