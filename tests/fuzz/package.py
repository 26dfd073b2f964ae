"""A whole package in memory, through the examination that `verify`, the server and the loader share."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from binascii import Error

from adapterd.loader.checks import examine
from adapterd.loader.checks.findings import Verdict
from adapterd.loader.formats.files import file_entries
from fakes.packages import tiny_llama_spec
from fuzz.target import Defect, Target
from strategies.packages import MemoryPackage, packages, sound_files

BASE = tiny_llama_spec()


def as_input(files: dict[str, bytes]) -> bytes:
    """Files as one JSON text, so that a finding can be kept as one file."""
    return json.dumps({name: b64encode(data).decode() for name, data in files.items()}).encode()


def run(data: bytes) -> str:
    """A verdict, whatever the files are; the manifest goes with it."""
    try:
        files = {str(name): b64decode(text, validate=True) for name, text in json.loads(data).items()}
    except (ValueError, Error, AttributeError, TypeError, RecursionError):
        return "no package"
    verdict = examine(MemoryPackage(files), BASE)
    _must_be_sound(verdict, files)
    if verdict.manifest is None:
        return str(verdict.problems[0].code)
    return "accepted with warnings" if verdict.problems else "accepted"


def _must_be_sound(verdict: Verdict, files: dict[str, bytes]) -> None:
    rejected = any(p.severity == "reject" for p in verdict.problems)
    if rejected == (verdict.manifest is not None):
        raise Defect(f"a manifest and {verdict.problems}")
    if not all(p.where.isprintable() and p.message.isprintable() for p in verdict.problems):
        raise Defect(f"problems that cannot be shown: {verdict.problems}")
    if verdict.manifest is not None:
        known = set(file_entries(MemoryPackage(files)))
        if not known.issuperset(verdict.manifest.files):
            raise Defect("the manifest lists what is not there")
        if any(m.delta_norm is None for m in verdict.manifest.modules):
            raise Defect("admitted without its norms")


def seeds() -> dict[str, bytes]:
    """One package."""
    return {"sound": as_input(dict(sound_files(1, "BF16", 0)))}


TARGET = Target("package", run, packages().map(lambda files: as_input(dict(files))), ("adapterd.loader",))
