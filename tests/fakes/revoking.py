"""What tests of revocations say and look at."""

from __future__ import annotations

from adapterd.gpu_cache import Lease
from adapterd.gpu_cache.revocation import Revocation
from adapterd.loader.errors import Code

from .adapters import PAGE_BYTES, Published
from .cache_world import World


def code_of(lease: Lease) -> Code | None:
    return None if lease.problem is None else lease.problem.code


def zeros(world: World, arena_pages: tuple[int, ...]) -> bool:
    words = world.cache.arena.view(-1, PAGE_BYTES)
    return all(not bool(words[page].any()) for page in arena_pages)


def revoke(world: World, version: Published, **more: object) -> None:
    world.cache.revoke(Revocation(version.resolved.tenant, digest=version.digest, **more))  # type: ignore[arg-type]
