"""Verdicts on packages that are made for one test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.checks import Verdict, examine_path
from adapterd.loader.errors import Code
from adapterd.loader.manifest import Manifest
from fakes.packages import tiny_llama_spec, write_package

BASE = tiny_llama_spec()


def verdict(folder: Path, base: BaseSpec = BASE, **options: Any) -> Verdict:
    """The verdict on a fresh package made from `options`, some of which are `examine`'s."""
    asked = {k: options.pop(k) for k in ("limits", "allow", "content", "declared_sha256") if k in options}
    options.setdefault("base", base)
    return examine_path(write_package(folder, **options).directory, base, **asked)


def codes(found: Verdict, severity: str = "reject") -> list[Code]:
    return [p.code for p in found.problems if p.severity == severity]


def accepted(found: Verdict) -> Manifest:
    assert found.ok, found.problems
    assert found.manifest is not None
    return found.manifest
