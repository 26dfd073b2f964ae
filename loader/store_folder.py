"""How the verified store lies on disk, and how it is written so that a crash leaves nothing half done.

    ROOT/<key>/package/…             the stored files, without model.sig
    ROOT/<key>/evidence/<id>.dsse.json, <id>.sig    per adapter name: its statement and model.sig
    ROOT/<key>/packed/…              packed forms, see `packed`
    ROOT/<key>/manifest.json         see `known_manifest`
    ROOT/<key>/use                   its bytes, as a number; the file's time is the version's last use
    ROOT/<key>/verified.json         the mark, written last: all bytes were hashed once, here
    ROOT/.incoming-<key>/            the same while it arrives; swept at the next start
    ROOT/.locks/<key>                one writer at a time, across threads and processes
    ROOT/.locks/room                 one that makes room at a time

<key> is `VersionKey.path_digest()`, <id> the SHA-256 of the adapter's name: no name becomes a path (I6).
Two adapters of a tenant may hold the same version; each has its own evidence.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from adapterd.loader.disk import FULL
from adapterd.loader.errors import Code, error
from adapterd.loader.identity import sha256_hex
from adapterd.loader.trust.admission import MAX_ENVELOPE_BYTES, AdmissionStatement
from adapterd.loader.trust.oms import MAX_BUNDLE_BYTES
from adapterd.loader.trust.strict_json import HEX_64, Fields, Malformed, parse

MARK_SCHEMA = "adapterd.verified/1"
INCOMING_PREFIX = ".incoming-"
_LOCKS, _LOCKING = ".locks", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_MARK_BYTES = 65_536
LOCK_LOOK_SECONDS = 0.02
"""How often a version's lock is tried while another thread or process has it."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a source handed out about a version: bytes, not yet believed."""

    statement: bytes
    signature: bytes | None


@dataclass(frozen=True, slots=True)
class Entry:
    """One version's folder, final or incoming."""

    path: Path

    @property
    def package(self) -> Path:
        return self.path / "package"

    @property
    def packed(self) -> Path:
        return self.path / "packed"

    @property
    def mark_path(self) -> Path:
        return self.path / "verified.json"

    def is_marked_for(self, statement: AdmissionStatement) -> bool:
        """Whether these very files were hashed here once. Anything unreadable counts as no mark."""
        data = read_small(self.mark_path, _MAX_MARK_BYTES)
        if data is None:
            return False
        try:
            mark = Fields(parse(data), "", need={"schema", "version_digest", "manifest_digest"})
            mark.exactly("schema", MARK_SCHEMA)
            facts = (mark.hex64("version_digest"), mark.hex64("manifest_digest"))
        except Malformed:
            return False
        return facts == (statement.version_digest, statement.manifest_digest)

    def mark(self, statement: AdmissionStatement) -> None:
        """Say that the bytes in `package` are those of the statement. On disk when this returns."""
        facts = {
            "schema": MARK_SCHEMA,
            "version_digest": statement.version_digest,
            "manifest_digest": statement.manifest_digest,
        }
        write_file(self.mark_path, json.dumps(facts).encode())

    def read_evidence(self, adapter: str) -> Evidence | None:
        """What is kept for this adapter name, or None."""
        statement = read_small(self._evidence(adapter, "dsse.json"), MAX_ENVELOPE_BYTES)
        if statement is None:
            return None
        return Evidence(statement, read_small(self._evidence(adapter, "sig"), MAX_BUNDLE_BYTES))

    def write_evidence(self, adapter: str, evidence: Evidence) -> None:
        (self.path / "evidence").mkdir(mode=0o700, exist_ok=True)
        signature = self._evidence(adapter, "sig")
        if evidence.signature is None:
            signature.unlink(missing_ok=True)
        else:
            write_file(signature, evidence.signature)
        write_file(self._evidence(adapter, "dsse.json"), evidence.statement)

    def _evidence(self, adapter: str, ending: str) -> Path:
        return self.path / "evidence" / f"{sha256_hex(adapter.encode())}.{ending}"


class StoreFolder:
    """The root of a store. Building it raises Unavailable; its methods raise OSError, see `narrowed`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with narrowed(root):
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            (root / _LOCKS).mkdir(exist_ok=True, mode=0o700)
            self._sweep()

    def entry(self, key: str) -> Entry:
        return Entry(self.root / key)

    @contextmanager
    def locked(self, key: str, waiting: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Wait for, then hold, the version's lock. The kernel drops it when the process dies.

        Args:
            waiting: called again and again while somebody else has the lock; may raise to give up. The
                other may hang in a download for as long as it likes.
        """
        while (file := self._lock(key)) is None:
            waiting()
            time.sleep(LOCK_LOOK_SECONDS)
        with file:
            try:
                yield
            finally:
                _let_go(file)

    @contextmanager
    def held(self, key: str) -> Iterator[bool]:
        """Hold the version's lock, or say False at once if somebody else has it."""
        file = self._lock(key)
        if file is None:
            yield False
            return
        with file:
            try:
                yield True
            finally:
                _let_go(file)

    def _lock(self, key: str) -> IO[bytes] | None:
        """The locked file, which lets go when it is closed, or None while somebody else has it."""
        path = self.root / _LOCKS / key
        while True:
            file = os.fdopen(os.open(path, _LOCKING, 0o666), "wb")
            if not _try_lock(file):
                file.close()
                return None
            if _is_still(file, path):
                return file
            file.close()  # `remove` took it away between our opening and our locking it

    @contextmanager
    def incoming(self, key: str) -> Iterator[Entry]:
        """An empty entry to fill and `keep`; removed if that does not come about. Needs the lock."""
        entry = Entry(self.root / f"{INCOMING_PREFIX}{key}")
        _remove(entry.path)
        try:
            for folder in (entry.path, entry.package):  # not its parents: the store may have gone meanwhile
                folder.mkdir(mode=0o700)
            yield entry
        finally:
            _remove(entry.path)

    def keep(self, incoming: Entry, key: str) -> Entry:
        """Put a filled entry in place of whatever is there. Needs the lock."""
        kept = self.entry(key)
        for folder in (incoming.package, incoming.path / "evidence", incoming.path):
            fsync_folder(folder)
        _remove(kept.path)
        incoming.path.rename(kept.path)
        fsync_folder(self.root)
        return kept

    def unmark(self, key: str) -> None:
        """Have a version hashed anew by whoever opens it next. Needs no lock: a lost mark costs a hash."""
        self.entry(key).mark_path.unlink(missing_ok=True)

    def discard(self, key: str) -> None:
        """Remove a version. Needs the lock. The mark goes first, so that a crash in between leaves an unmarked one."""
        self.unmark(key)
        _remove(self.entry(key).path)

    def remove(self, name: str) -> bool:
        """Remove one of `names` and forget its lock, unless somebody holds that: then False, at once."""
        key = name.removeprefix(INCOMING_PREFIX)
        with self.held(key) as mine:
            if mine:
                self.discard(name)
                (self.root / _LOCKS / key).unlink()
        return mine

    def names(self) -> list[str]:
        """Of all folders of versions, final and incoming: one look at the root."""
        with os.scandir(self.root) as found:
            return [e.name for e in found if HEX_64.fullmatch(e.name.removeprefix(INCOMING_PREFIX))]

    def _sweep(self) -> None:
        """Remove what a crash left behind, but nothing that another process is filling right now."""
        for left in self.root.glob(f"{INCOMING_PREFIX}*"):
            with self.held(left.name.removeprefix(INCOMING_PREFIX)) as mine:
                if mine:
                    _remove(left)


@contextmanager
def narrowed(path: Path) -> Iterator[None]:
    """The disk's errors, as ours. EFBIG is what a file-size limit says."""
    try:
        yield
    except OSError as e:
        where = str(e.filename or path)
        if e.errno in FULL:
            raise error(
                Code.STORAGE_FULL, where, f"there is no room for the version: {e.strerror}",
                "Make room or choose another folder for the store; nothing half-written was left.",
            ) from e  # fmt: skip
        raise error(Code.STORAGE_UNAVAILABLE, where, f"the store cannot be used: {e.strerror or e}") from e


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _let_go(file: IO[bytes]) -> None:
    """Closing is not enough: a process that was forked meanwhile has the file, and with it the lock, too."""
    fcntl.flock(file, fcntl.LOCK_UN)


def _is_still(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(target: Path, *data: bytes | memoryview) -> None:
    """The whole file or the old one, durable; the caller holds the lock, so one temporary name will do."""
    temporary = target.with_name(f".{target.name}.new")
    temporary.unlink(missing_ok=True)  # a crash's; or somebody's link, or pipe
    try:
        with temporary.open("xb") as file:
            for part in data:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(target.parent)


def read_small(path: Path, most: int) -> bytes | None:
    """At most `most` bytes and one more, so that whoever parses them sees that they are too many."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            return file.read(most + 1) or b""
    except FileNotFoundError:
        return None


def _open_at_once(path: str, flags: int) -> int:
    """A pipe that somebody put there is empty, and not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(path)
