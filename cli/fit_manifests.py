"""Manifests for `fit`: of a folder or an archive by its headers, of a REF by what the registry says of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adapterd.cli.author import catalog_manifest
from adapterd.cli.inputs import BaseChoice, subject_of

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.identity import Ref
    from adapterd.loader.limits import Limits
    from adapterd.loader.manifest import Manifest


def manifest_of(text: str, choice: BaseChoice, limits: Limits) -> tuple[str, Manifest, BaseSpec]:
    """Raises Refused for what is no adapter of the base; NotFound; what a registry answers."""
    target = subject_of(text)
    if isinstance(target, Path):
        return text, _of_headers(target, choice.load(), limits), choice.load()
    return _of_catalog(target, choice, limits)


def _of_headers(path: Path, base: BaseSpec, limits: Limits) -> Manifest:
    from adapterd.loader.checks.examination import examine_headers
    from adapterd.loader.checks.findings import ALLOWABLE
    from adapterd.loader.errors import error_from
    from adapterd.loader.formats.archives import open_package
    from adapterd.loader.manifest import Manifest

    with open_package(path, limits) as package:
        modules, problems = examine_headers(package, base, limits=limits, allow=ALLOWABLE)
    if modules is None:
        raise error_from(problems)
    return Manifest(base.pin, modules, ())


def _of_catalog(ref: Ref, choice: BaseChoice, limits: Limits) -> tuple[str, Manifest, BaseSpec]:
    from adapterd.loader.errors import Code, error

    pinned, manifest, own = catalog_manifest(ref)
    spec = own if choice.text is None else choice.load()
    if manifest.base != spec.pin:
        message = f"is for {manifest.base.id}@{manifest.base.revision}, --base is {spec.id}@{spec.revision}"
        raise error(Code.BASE_MISMATCH, pinned, message, "Ask for the adapters of one base at a time.")
    check_served(pinned, manifest, spec, limits)
    return pinned, manifest, spec


def check_served(pinned: str, manifest: Manifest, base: BaseSpec, limits: Limits) -> None:
    """A server's manifest is a stranger's word: no number in it may make us count for hours.

    Raises Unavailable (SERVER_ERROR).
    """
    from adapterd.loader.errors import Code, error
    from adapterd.loader.layout import ITEM_BYTES

    names = [m.name for m in manifest.modules]
    if not 0 < len(names) == len(set(names)) <= limits.max_modules:
        raise error(Code.SERVER_ERROR, pinned, f"the server's manifest lists {len(names)} modules")
    for module in manifest.modules:
        known = base.module(module.name)
        widths = None if known is None else (known.in_features, known.out_features)
        fits = (module.in_features, module.out_features) == widths and module.dtype in ITEM_BYTES
        if not fits or not 0 < module.rank <= limits.max_rank:
            raise error(Code.SERVER_ERROR, module.name, f"the server's manifest of {pinned} does not fit its base")


def one_base(found: Sequence[tuple[str, Manifest, BaseSpec]]) -> BaseSpec:
    from adapterd.loader.errors import Code, error

    first = found[0][2]
    for name, _, spec in found:
        if spec.pin != first.pin:
            message = f"is for {spec.id}@{spec.revision}, {found[0][0]} for {first.id}@{first.revision}"
            raise error(Code.BASE_MISMATCH, name, message, "Ask for the adapters of one base at a time.")
    return first
