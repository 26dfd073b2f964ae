"""The demo attacks itself: each attack names the code it must be refused with."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from adapterd.cli.demo.serving import WAIT_SECONDS, worker_cache
from adapterd.cli.demo.shell import Shell
from adapterd.cli.demo.world import BASE_ID, BASE_REVISION, FOREIGN_BASE, OTHER_REVISION, write_adapter
from adapterd.loader.errors import AdapterdError, Code

if TYPE_CHECKING:
    from adapterd.loader.base_model import BaseSpec
    from adapterd.loader.trust.policy import TrustStore


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack and what came of it."""

    name: str
    who_refuses: str
    wanted: str
    found: str

    @property
    def held(self) -> bool:
        return self.found == self.wanted


@dataclass(frozen=True, slots=True)
class Scene:
    """What the attacks need to know about the demo's world."""

    home: Path
    data_dir: Path
    url: str
    worker_token: str
    trust: TrustStore
    base: BaseSpec
    acme: Shell
    globex: Shell
    finance: Path
    key: Path

    def worker_says(self, ref: str, tenant: str, store: str) -> str:
        """The code a fresh worker with an empty store gives for `ref`, or `loaded`."""
        folder = self.home / "stores" / store
        with worker_cache(self.url, self.worker_token, self.trust, self.base, "cpu", folder) as cache:
            lease = cache.acquire(ref, tenant=tenant)
            try:
                lease.wait(WAIT_SECONDS)
            except AdapterdError as refusal:
                return refusal.code.value
            finally:
                lease.release()
        return "loaded"


def all_attacks(scene: Scene) -> tuple[Attack, ...]:
    """Every attack, in the order of the table."""
    return (
        flipped_byte(scene),
        unsigned_file(scene),
        other_revision(scene),
        foreign_over_rest(scene),
        foreign_in_worker(scene),
        swapped_rows(scene),
    )


def flipped_byte(scene: Scene) -> Attack:
    """A byte of a stored blob changes in the bucket; the worker's own store is empty."""
    with _flipped(_blob_of(scene.data_dir, scene.finance / "adapter_model.safetensors")):
        found = scene.worker_says("acme/finance:prod", "acme", "flipped")
    return Attack("one byte flipped in the stored blob", "worker", Code.HASH_MISMATCH.value, found)


def unsigned_file(scene: Scene) -> Attack:
    """A file is added after the publisher signed."""
    folder = scene.home / "unsigned"
    shutil.copytree(scene.finance, folder)
    scene.acme.run("sign", folder, "--key", scene.key)
    (folder / "README.md").write_text("added after signing\n")
    found = _code_of(scene.acme, "upload", folder, "acme/extra", "--base", f"{BASE_ID}@{BASE_REVISION}")
    return Attack("a file added after signing", "server", Code.MANIFEST_NOT_EXACT.value, found)


def other_revision(scene: Scene) -> Attack:
    """An adapter, well signed and admitted, for another revision of the base."""
    folder = write_adapter(FOREIGN_BASE, scene.home / "elsewhere")
    base = f"{BASE_ID}@{OTHER_REVISION}"
    scene.acme.run("upload", folder, "acme/elsewhere", "--base", base, "--sign", scene.key, "--alias", "prod")
    found = scene.worker_says("acme/elsewhere:prod", "acme", "elsewhere")
    return Attack("an adapter for another base revision", "worker", Code.BASE_REVISION_MISMATCH.value, found)


def foreign_over_rest(scene: Scene) -> Attack:
    """Tenant globex asks for acme's adapter, and for one of a tenant that does not exist."""
    foreign = _answer(scene.globex, "acme", "finance")
    missing = _answer(scene.globex, "nobody", "finance")
    found = "the same 404" if foreign == missing and foreign[0] == httpx.codes.NOT_FOUND else f"{foreign} ≠ {missing}"
    return Attack("another tenant's adapter over REST", "server", "the same 404", found)


def foreign_in_worker(scene: Scene) -> Attack:
    """The same in the worker, whose own token may read both tenants."""
    foreign = scene.worker_says("acme/finance:prod", "globex", "foreign")
    missing = scene.worker_says("globex/nothing:prod", "globex", "foreign")
    same = f"{foreign} = {missing}" if foreign == missing else f"{foreign} ≠ {missing}"
    return Attack("another tenant's adapter in the worker", "worker", "NOT_FOUND = NOT_FOUND", same)


def swapped_rows(scene: Scene) -> Attack:
    """Two version rows change places in the database: finance:prod now means legal's well-signed bytes."""
    database = scene.data_dir / "registry.sqlite3"
    _swap_adapters(database, "acme", "finance", "legal")
    try:
        found = scene.worker_says("acme/finance:prod", "acme", "swapped")
    finally:
        _swap_adapters(database, "acme", "finance", "legal")
    return Attack("two version rows swapped in the database", "worker", Code.STATEMENT_MISMATCH.value, found)


def _blob_of(data_dir: Path, original: Path) -> Path:
    """The stored blob with `original`'s bytes."""
    data = original.read_bytes()
    return next(
        p for p in data_dir.rglob("*") if p.is_file() and p.stat().st_size == len(data) and p.read_bytes() == data
    )


@contextmanager
def _flipped(path: Path) -> Iterator[None]:
    """The file with its last byte changed."""
    good, mode = path.read_bytes(), path.stat().st_mode
    path.chmod(0o600)
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    try:
        yield
    finally:
        path.write_bytes(good)
        path.chmod(mode)


def _code_of(shell: Shell, *words: str | Path) -> str:
    try:
        shell.run(*words)
    except AdapterdError as refusal:
        return refusal.code.value
    return "accepted"


def _answer(shell: Shell, tenant: str, adapter: str) -> tuple[int, str, list[str]]:
    """Status, body with the path that was asked for left out, and header names."""
    path = f"/v1/tenants/{tenant}/adapters/{adapter}/versions/1"
    answer = httpx.get(f"{shell.url}{path}", headers={"Authorization": f"Bearer {shell.token}"})
    return answer.status_code, answer.text.replace(path, "PATH"), sorted(answer.headers)


def _swap_adapters(database: Path, tenant: str, one: str, other: str) -> None:
    """Exchange the rows of two adapters' versions, files and aliases, as somebody with the database could."""
    with closing(sqlite3.connect(database, timeout=10)) as connection, connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        for table in ("versions", "version_files", "aliases"):
            for old, new in ((one, "~"), (other, one), ("~", other)):
                statement = f"UPDATE {table} SET adapter = ? WHERE tenant = ? AND adapter = ?"  # noqa: S608 - fixed names
                connection.execute(statement, (new, tenant, old))
