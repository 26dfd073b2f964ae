"""Adapters whose bytes tell whose they are, the loader that serves them, and a pool that waits to be told.

Every page of an adapter's image is filled with one tag, made of its version digest and the page's index. So
whoever reads a page knows whether it holds what it should.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256

import torch

from adapterd.gpu_cache import Resident
from adapterd.gpu_cache.host.interface import Origin
from adapterd.gpu_cache.host.loading import Cancelled, Fill, Prepared, Serving, Told
from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.errors import Code, Problem, error, error_from
from adapterd.loader.identity import FileEntry, Ref
from adapterd.loader.image import Memory, PackedImage
from adapterd.loader.layout import Layout
from adapterd.loader.manifest import Manifest, ModuleEntry, TensorEntry
from adapterd.loader.sources import Resolved

from .devices import Barrier

PAGE_BYTES = 256
MODULE = "layers.0.q_proj"


def make_base(revision: str = "a" * 40) -> BaseSpec:
    return BaseSpec("test/base", revision, (BaseModule(MODULE, ModuleKind.LINEAR, 16, 16),))


def tag(digest: str, page: int) -> int:
    """A positive 63-bit number that no other page has."""
    return int.from_bytes(sha256(f"{digest} {page}".encode()).digest()[:8]) >> 1


@dataclass(frozen=True)
class Published:
    """One version in the memory loader."""

    resolved: Resolved
    pages: int
    rank: int = 4
    publisher: str | None = None

    @property
    def digest(self) -> str:
        return self.resolved.version_digest

    @property
    def pinned(self) -> str:
        return f"{self.resolved.tenant}/{self.resolved.adapter}@sha256:{self.digest}"

    @property
    def manifest(self) -> Manifest:
        a = TensorEntry("a", "F32", (self.rank, 16), 0, 4)
        b = TensorEntry("b", "F32", (16, self.rank), 4, 8)
        module = ModuleEntry(MODULE, self.rank, 1.0, 1.0, "F32", 16, 16, a, b)
        return Manifest(self.resolved.base, (module,), (FileEntry("adapter_model.safetensors", self.digest, 8),))


@dataclass
class TaggedImage:
    """Prepared."""

    version: Published
    loader: MemoryLoader
    origin: Origin

    @property
    def manifest(self) -> Manifest:
        return self.version.manifest

    @property
    def publisher(self) -> str | None:
        return self.version.publisher

    @property
    def layout(self) -> Layout:
        return Layout(PAGE_BYTES, "F32", self.version.pages, ())

    def fill(self, out: Memory) -> Fill:
        self.loader.say("fill", self.version)
        image = PackedImage(self.layout, out)
        for page in range(self.version.pages):
            for part in image.parts(page * PAGE_BYTES, (page + 1) * PAGE_BYTES):
                part[:] = tag(self.version.digest, page).to_bytes(8, "little") * (PAGE_BYTES // 8)
        return Fill(self.origin, partial(self.loader.say, "keep", self.version) if self.loader.keeps_packed else None)


@dataclass
class MemoryLoader:
    """Loader over versions in memory. `calls` says what was asked; barriers and failures are set by the test."""

    base: BaseSpec = field(default_factory=make_base)
    calls: list[str] = field(default_factory=list)
    barriers: dict[str, Barrier] = field(default_factory=dict)
    failures: dict[str, Problem] = field(default_factory=dict)
    answers: dict[str, Resolved] = field(default_factory=dict)
    """A lying source: what it answers for a digest."""
    breaks: bool = False
    """A loader with a bug."""
    keeps_packed: bool = False
    """Whether it wants to keep packed forms."""
    trust_changes: int = 0

    def __post_init__(self) -> None:
        self._versions: dict[tuple[str, str], Published] = {}
        self._aliases: dict[tuple[str, str, str], str] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._on_disk: set[tuple[str, str]] = set()

    def publish(
        self,
        name: str,
        pages: int = 1,
        *,
        rank: int = 4,
        digest: str = "",
        alias: str = "default",
        publisher: str | None = None,
    ) -> Published:
        """A new version of `tenant/name`, to which `alias` points from now on."""
        ref = Ref.parse(name)
        number = self._numbers[ref.tenant, ref.name] = self._numbers.get((ref.tenant, ref.name), 0) + 1
        digest = digest or sha256(f"{name} {number}".encode()).hexdigest()
        resolved = Resolved(replace(ref, digest=digest), ref.tenant, ref.name, digest, number, self.base.pin)
        version = Published(resolved, pages, rank, publisher)
        self._versions[f"{ref.tenant}/{ref.name}", digest] = version
        self._aliases[ref.tenant, ref.name, alias] = digest
        return version

    def move(self, version: Published, alias: str = "default") -> None:
        """The alias points to that version from now on."""
        resolved = version.resolved
        self._aliases[resolved.tenant, resolved.adapter, alias] = version.digest

    def resolve(self, ref: Ref, tenant: str) -> Resolved:
        self._note("resolve", f"{ref.tenant}/{ref.name}")
        assert ref.tenant == tenant, "the cache asked for another tenant's adapter"
        digest = ref.digest or self._aliases.get((ref.tenant, ref.name, ref.wanted_alias or ""), "")
        version = self._versions.get((f"{ref.tenant}/{ref.name}", digest))
        if version is None:
            raise error(Code.NOT_FOUND, str(ref), "this source knows no such thing")
        if digest in self.answers:
            return self.answers[digest]
        return replace(version.resolved, ref=replace(ref, digest=digest))

    def prepare(self, resolved: Resolved, serving: Serving, cancelled: Cancelled, told: Told) -> Prepared:
        name = (f"{resolved.tenant}/{resolved.adapter}", resolved.version_digest)
        version = self._versions[name]
        told.expect(version.pages * PAGE_BYTES)
        told.add(PAGE_BYTES)
        self.say("prepare", version)
        if cancelled():
            raise error(Code.LEASE_CANCELLED, str(resolved.ref), "nobody waits for it any more")
        assert serving.base.pin == resolved.base
        origin = Origin.DISK if name in self._on_disk else Origin.SOURCE
        self._on_disk.add(name)
        return TaggedImage(version, self, origin)

    def say(self, what: str, version: Published) -> None:
        self._note(what, f"{version.resolved.tenant}/{version.resolved.adapter}")

    def _note(self, what: str, name: str) -> None:
        self.calls.append(f"{what} {name}")
        if self.breaks:
            raise ZeroDivisionError
        for key in (what, f"{what} {name}"):
            if key in self.barriers:
                self.barriers[key].stop()
            if key in self.failures:
                raise error_from([self.failures[key]])


class ManualPool:
    """LoaderPool whose jobs run when the test says so, in an order drawn from a seed."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._jobs: list[Callable[[], None]] = []
        self._closed = False

    def submit(self, tenant: str, work: Callable[[], None]) -> None:
        if not self._closed:
            self._jobs.append(work)

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def run_one(self) -> bool:
        if not self._jobs:
            return False
        index = self._random.randrange(len(self._jobs)) if self._random else 0
        self._jobs.pop(index)()
        return True

    def run_all(self) -> None:
        while self.run_one():
            pass

    def close(self, timeout: float) -> None:
        self._closed = True
        self._jobs.clear()


def image_bytes(digest: str, pages: int) -> bytes:
    """What `TaggedImage` packs."""
    return b"".join(tag(digest, page).to_bytes(8, "little") * (PAGE_BYTES // 8) for page in range(pages))


def wrong_pages(arena: torch.Tensor, resident: Resident) -> list[int]:
    """Pages of `resident` that do not hold its bytes, as indexes into `resident.pages`."""
    words = arena.view(torch.int64).view(-1, PAGE_BYTES // 8)
    return [
        index
        for index, page in enumerate(resident.pages)
        if not bool((words[page].cpu() == tag(resident.key.digest, index)).all())
    ]
