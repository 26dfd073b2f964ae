"""The key under which a store remembers what it read and packed: docs/adr/0005-the-store-remembers-under-a-key.md."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from adapterd.loader.disk import storage_code
from adapterd.loader.errors import Code, error
from adapterd.loader.parts import write_whole
from adapterd.loader.regular_file import NotRegular, open_regular

_TEXT = re.compile(rb"adapterd\.store-key/1 ([0-9a-f]{64})\n")
_LENGTH = 32
_CONTEXT = b"adapterd.store/1\n"
_DERIVED = b"adapterd.store-derived/1\n"


class StoreKey:
    """A secret that authenticates what this worker wrote beside verified files. Never shown."""

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError unless `secret` has 32 bytes."""
        if len(secret) != _LENGTH:
            raise ValueError(f"a key of {_LENGTH} bytes is needed")
        self._secret = secret

    @classmethod
    def load(cls, path: Path, *, outside: Path | None = None) -> StoreKey:
        """Read the file, which is made with a new key if it is not there; two that make it at once get one key.

        Args:
            path: where the trust file is, say. Who can read this file, and write into the store, is believed.
            outside: the store's folder, where the key must not be.

        Raises:
            Failed: SETTINGS_INVALID if it is there all the same.
            Untrusted: TRUST_FILE_INVALID if it is no key file, or if others than its owner may read it.
            Unavailable: STORAGE_FULL, STORAGE_UNAVAILABLE if it cannot be made.
        """
        if outside is not None and path.resolve().is_relative_to(outside.resolve()):
            raise error(
                Code.SETTINGS_INVALID, str(path), "the store's key cannot lie in the store that it protects",
                "Put it beside the trust file.",
            )  # fmt: skip
        try:
            if not path.exists():
                with suppress(FileExistsError):  # of two that make it at once, the second takes the first one's
                    write_whole(path, f"adapterd.store-key/1 {secrets.token_hex(_LENGTH)}\n".encode())
            with open_regular(path) as file:
                data, mode = file.read(1024), os.fstat(file.fileno()).st_mode
        except NotRegular as e:
            raise error(Code.TRUST_FILE_INVALID, str(path), "is no regular file", "Name another place.") from e
        except OSError as e:
            raise error(storage_code(e), str(path), f"no key file can be used there: {e.strerror}") from e
        if mode & 0o077:
            raise error(
                Code.TRUST_FILE_INVALID, str(path), f"others may read it (mode {mode & 0o777:04o})",
                "Delete it; a new one is made, and what was kept under it is made anew.",
            )  # fmt: skip
        match = _TEXT.fullmatch(data)
        if match is None:
            raise error(Code.TRUST_FILE_INVALID, str(path), "is no key file", "Delete it; a new one is made.")
        return cls(bytes.fromhex(match[1].decode()))

    def mac(self, data: bytes) -> str:
        """HMAC-SHA256 (hex)."""
        return hmac.new(self._secret, _CONTEXT + data, hashlib.sha256).hexdigest()

    def derived(self, about: bytes) -> bytes:
        """A key of 32 bytes for one purpose: says nothing about this one or those for others."""
        return hmac.new(self._secret, _DERIVED + about, hashlib.sha256).digest()

    def made(self, mac: str, data: bytes) -> bool:
        """Whether `mac` was made of `data` with this key."""
        return hmac.compare_digest(self.mac(data).encode(), mac.encode())
