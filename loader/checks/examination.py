"""The examination: the checks in their order, cheapest and most decisive first.

    names and sizes → config → header → second parser → names of tensors → base → modules → scaling,
    shapes → config against tensors → hashes → values

Caps are checked from sizes and the header alone, before content is read (I7). Within a step all
findings are collected; a step that rejects ends the examination, because the next ones would
speak about what is not there. The same input gives the same problems and the same manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterd.loader.base_model import BaseSpec
from adapterd.loader.checks.base_name import base_problems
from adapterd.loader.checks.content import hash_problems, judge_content
from adapterd.loader.checks.coverage import coverage_problems
from adapterd.loader.checks.crew import Crew
from adapterd.loader.checks.findings import Findings, Verdict
from adapterd.loader.checks.fit import shape_problems
from adapterd.loader.checks.naming import Naming, bind, naming_problems
from adapterd.loader.checks.one_pass import OnePass
from adapterd.loader.checks.pairs import Pair, pair_up
from adapterd.loader.effect import Measured, Source, measure
from adapterd.loader.errors import AdapterdError, Code, NotFound, Problem, Refused, reject
from adapterd.loader.formats.archives import open_package
from adapterd.loader.formats.files import FileReader, Package, file_entries, order, read_all
from adapterd.loader.formats.library_check import agree_with_library
from adapterd.loader.formats.package import judge_package
from adapterd.loader.formats.peft_config import PeftConfig, parse_config
from adapterd.loader.formats.safetensors_header import read_header
from adapterd.loader.formats.text import shown
from adapterd.loader.identity import CONFIG_FILE, SIGNATURE_FILE, WEIGHTS_FILE, FileEntry
from adapterd.loader.limits import DEFAULT_LIMITS, Limits
from adapterd.loader.manifest import Manifest, ModuleEntry
from adapterd.loader.scaling import Effective, effective, scaling_problems

Progress = Callable[[int], None]


def examine(
    package: Package,
    base: BaseSpec,
    *,
    limits: Limits = DEFAULT_LIMITS,
    files: tuple[FileEntry, ...] | None = None,
    allow: frozenset[Code] = frozenset(),
    refuse: frozenset[Code] = frozenset(),
    content: bool = True,
    declared_sha256: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Judge `package` for `base`.

    Args:
        package: open files; each is read by position and never opened again.
        base: the base that the uploader names.
        limits: caps of the tenant.
        files: hashes that the caller made from these bytes, of all files to be stored; None: made here.
        allow: codes that the uploader allows by name (those of `ALLOWABLE` become warnings).
        refuse: codes that the tenant's policy does not take even as a warning.
        content: False leaves the values unread: `delta_norm` is None, the manifest digest is the same.
        declared_sha256: name → SHA-256 in hex that must hold.
        progress: called with the number of bytes hashed since the last call.

    Returns:
        A verdict; a refusal is in it and not raised. Never an AdapterdError.
    """
    findings = Findings(allow, refuse)
    examination = _Examination(package, base, limits, findings)
    try:
        found = examination.structure()
        manifest = None
        if found is not None:
            manifest = examination.contents(found, files, declared_sha256 or {}, progress, values=content)
    except AdapterdError as refusal:
        findings.add(*refusal.problems)
        manifest = None
    return findings.verdict(manifest)


def examine_headers(
    package: Package, base: BaseSpec, *, limits: Limits = DEFAULT_LIMITS, allow: frozenset[Code] = frozenset()
) -> tuple[tuple[ModuleEntry, ...] | None, tuple[Problem, ...]]:
    """As `examine`, as far as sizes, config and the tensor file's header go: no byte of a tensor is read or hashed.

    Returns:
        The modules, sorted by name, without norms; None if something rejects. And all problems.
    """
    findings = Findings(allow)
    try:
        found = _Examination(package, base, limits, findings).structure()
    except AdapterdError as refusal:
        findings.add(*refusal.problems)
        found = None
    problems = findings.verdict(None).problems
    return (None if found is None else found.modules({})), problems


def examine_path(path: Path, base: BaseSpec, *, limits: Limits = DEFAULT_LIMITS, **options: Any) -> Verdict:
    """`examine` of a folder or an archive; `options` are those of `examine`.

    Raises:
        NotFound: PATH_NOT_FOUND for what cannot be read. Everything else is in the verdict.
    """
    findings = Findings()
    try:
        opened = open_package(path, limits)
    except NotFound:
        raise
    except AdapterdError as refusal:
        findings.add(*refusal.problems)
        return findings.verdict(None)
    with opened:
        return examine(opened, base, limits=limits, **options)


@dataclass(frozen=True, slots=True)
class _Structure:
    """What the header and the config gave: all but the bytes."""

    stored: tuple[str, ...]
    weights: FileReader
    pairs: tuple[Pair, ...]
    naming: Naming
    scalings: Mapping[str, Effective]

    def modules(self, norms: Mapping[str, float]) -> tuple[ModuleEntry, ...]:
        """Under the base's own names, and sorted by these."""
        path = self.naming.path
        entries = (_entry(p, path(p.module), self.scalings[p.module], norms.get(p.module)) for p in self.pairs)
        return tuple(sorted(entries, key=lambda entry: entry.name))


@dataclass(frozen=True, slots=True)
class _Examination:
    package: Package
    base: BaseSpec
    limits: Limits
    findings: Findings

    def structure(self) -> _Structure | None:
        """Everything that needs no byte of a tensor; None if something rejects."""
        stored = self._names()
        if self.findings.rejected:
            return None
        data = read_all(self.package.open(CONFIG_FILE))
        config, told = parse_config(data, self.limits)
        self.findings.add(*told)
        weights = self.package.open(WEIGHTS_FILE)
        pairs = self._tensors(weights)
        if self.findings.rejected:
            return None
        naming = bind([p.module for p in pairs], self.base)
        scalings = self._fit(config, pairs, naming, silent="revision" not in json.loads(data))
        return None if self.findings.rejected else _Structure(stored, weights, pairs, naming, scalings)

    def _names(self) -> tuple[str, ...]:
        contents = judge_package(self.package.sizes(), self.limits)
        self.findings.add(*contents.problems)
        return contents.stored

    def _tensors(self, weights: FileReader) -> tuple[Pair, ...]:
        header = read_header(weights, self.limits, max_modules=self.limits.max_modules)
        agree_with_library(weights, header)
        return pair_up(header.tensors, self.findings)

    def _fit(
        self, config: PeftConfig, pairs: Sequence[Pair], naming: Naming, *, silent: bool
    ) -> Mapping[str, Effective]:
        """Each step asks only if the ones before it passed. Config and tensors are read in the adapter's naming."""
        scalings = effective(config, [p.module for p in pairs])
        steps: tuple[Callable[[], Iterable[Problem]], ...] = (
            lambda: base_problems(config, self.base, silent=silent),
            lambda: naming_problems(pairs, naming, self.base, self.limits),
            lambda: scaling_problems(scalings),
            lambda: shape_problems(pairs, naming.base, scalings.by_module, self.limits),
            lambda: coverage_problems(config, [p.module for p in pairs], naming.base),
        )
        for step in steps:
            self.findings.add(*step())
            if self.findings.rejected:
                break
        return scalings.by_module

    def contents(
        self,
        found: _Structure,
        files: tuple[FileEntry, ...] | None,
        declared: Mapping[str, str],
        progress: Progress | None,
        *,
        values: bool,
    ) -> Manifest | None:
        """Hashes beside values, judged one after the other; the manifest if all holds."""
        known = None if files is None else _given(files, found.stored)
        entries, measured = self._read(found, known, progress) if values else (self._hashed(found, known, progress), ())
        self.findings.add(*hash_problems(self.package, entries, declared))
        if self.findings.rejected:
            return None
        norms: Mapping[str, float] = {}
        if values:
            content = judge_content(found.weights, found.pairs, measured)
            self.findings.add(*content.problems)
            norms = content.norms
        content_files = tuple(f for f in entries if f.path != SIGNATURE_FILE)
        return Manifest(self.base.pin, found.modules(norms), content_files, found.naming.name)

    def _hashed(
        self, found: _Structure, known: tuple[FileEntry, ...] | None, progress: Progress | None
    ) -> tuple[FileEntry, ...]:
        return file_entries(self.package, found.stored, progress) if known is None else known

    def _read(
        self, found: _Structure, known: tuple[FileEntry, ...] | None, progress: Progress | None
    ) -> tuple[tuple[FileEntry, ...], tuple[Measured, ...]]:
        """Entries of the files, and what each pair does: the tensor file's digest and values come from one pass."""
        digest = hashlib.sha256()

        def take(data: memoryview) -> None:
            digest.update(data)
            if progress is not None:
                progress(len(data))

        def measured(source: Source, pair: Pair) -> Measured:
            return measure(source, pair.a, pair.b, found.scalings[pair.module].scaling)

        one_pass = OnePass(found.weights, found.pairs, measured, take if known is None else None)
        with Crew(found.weights.size) as crew:
            crew.together(one_pass.work)
        if known is None:
            others = file_entries(self.package, (n for n in found.stored if n != WEIGHTS_FILE), progress)
            weights = FileEntry(WEIGHTS_FILE, digest.hexdigest(), found.weights.size)
            known = tuple(sorted((weights, *others), key=lambda entry: order(entry.path)))
        return known, one_pass.results()


def _given(files: Iterable[FileEntry], stored: Sequence[str]) -> tuple[FileEntry, ...]:
    """The stored files' entries, in their order. Raises Refused (HASH_MISMATCH) if one has none."""
    known = {f.path: f for f in files}
    for name in stored:
        if name not in known:
            raise Refused(reject(Code.HASH_MISMATCH, shown(name), "is in the package, but has not been hashed"))
    return tuple(known[name] for name in stored)


def _entry(pair: Pair, path: str, scale: Effective, norm: float | None) -> ModuleEntry:
    # F32 holds every value of the two narrower ones.
    dtype = pair.a.dtype if pair.a.dtype == pair.b.dtype else "F32"
    return ModuleEntry(
        name=path,
        rank=scale.rank,
        alpha=scale.alpha,
        scaling=scale.scaling,
        dtype=dtype,
        in_features=pair.a.shape[1],
        out_features=pair.b.shape[0],
        a=pair.a,
        b=pair.b,
        delta_norm=norm,
    )
