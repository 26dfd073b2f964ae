"""Blobs in a bucket of an S3-compatible server.

The bucket is trusted with nothing: it is told the digest it must find in what it receives, and whoever
reads hashes again. Single PUTs only, so a blob has at most 5 GiB; multipart transfers are a later step.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.registry.blobs.interfaces import CHUNK_BYTES, blob_key, hash_mismatch, open_source
from adapterd.registry.errors import missing

if TYPE_CHECKING:
    from pathlib import Path

MAX_PUT_BYTES = 5 << 30  # Amazon S3 user guide, "Uploading objects": 5 GB in a single PUT
ATTEMPTS = 3
CONNECT_SECONDS = 5
READ_SECONDS = 60
_ABSENT = {"404", "NoSuchKey"}
_FULL = {"507", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"}


def make_client(
    *,
    endpoint: str = "",
    region: str = "us-east-1",
    access_key_id: str = "",
    secret_access_key: str = "",
    attempts: int = ATTEMPTS,
) -> Any:
    """A thread-safe boto3 client; empty values mean boto3's own defaults."""
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": attempts},
    )
    return boto3.client(
        "s3",
        endpoint_url=endpoint or None,
        region_name=region,
        config=config,
        aws_access_key_id=access_key_id or None,
        aws_secret_access_key=secret_access_key or None,
    )


class S3Blobs:
    """`BlobStore` in a bucket: object key `prefix + blob_key`."""

    def __init__(self, client: Any, bucket: str, prefix: str = "") -> None:
        self.client = client
        self.bucket = bucket
        self._prefix = prefix

    def key(self, tenant: str, sha256: str) -> str:
        """The blob's object key."""
        return self._prefix + blob_key(tenant, sha256)

    def close(self) -> None:
        """Close the client's connections."""
        self.client.close()

    def check(self) -> None:
        with _narrowed():
            self.client.head_bucket(Bucket=self.bucket)

    def put(self, tenant: str, sha256: str, source: Path) -> None:
        place = self._place(tenant, sha256)
        with open_source(source) as reader:
            size = _checked_size(reader, sha256)
            try:
                # A blob is created and never overwritten, whoever else is storing the same one.
                self._send(place, reader, size, sha256, {"IfNoneMatch": "*"})
            except _ExistsError:
                self._keep_or_mend(place, reader, size, sha256)

    def size(self, tenant: str, sha256: str) -> int | None:
        try:
            with _narrowed():
                return int(self.client.head_object(**self._place(tenant, sha256))["ContentLength"])
        except _AbsentError:
            return None

    def read(self, tenant: str, sha256: str, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        if length == 0:
            return
        end = "" if length is None else str(offset + length - 1)
        wanted = {"Range": f"bytes={offset}-{end}"} if offset or end else {}
        try:
            with _narrowed():
                body = self.client.get_object(**self._place(tenant, sha256), **wanted)["Body"]
                with body:
                    yield from iter(lambda: body.read(CHUNK_BYTES), b"")
        except _AbsentError:
            raise missing(sha256) from None
        except _BeyondEndError:
            return

    def delete(self, tenant: str, sha256: str) -> None:
        with _narrowed():
            self.client.delete_object(**self._place(tenant, sha256))

    def sweep(self) -> None:
        """Nothing to do: a PUT is all or nothing."""

    def _place(self, tenant: str, sha256: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.key(tenant, sha256)}

    def _send(self, place: dict[str, str], reader: BinaryIO, size: int, sha256: str, condition: dict[str, str]) -> None:
        """The server hashes what arrives and refuses it unless it is what was hashed here."""
        reader.seek(0)
        checksum = base64.b64encode(bytes.fromhex(sha256)).decode()
        with _narrowed():
            self.client.put_object(**place, Body=reader, ContentLength=size, ChecksumSHA256=checksum, **condition)

    def _keep_or_mend(self, place: dict[str, str], reader: BinaryIO, size: int, sha256: str) -> None:
        """The object is there: it holds these bytes, or was damaged in the bucket and is replaced."""
        try:
            with _narrowed():
                answer = self.client.get_object(**place)
                with answer["Body"] as body:
                    found = _digest(body)
            if found != sha256:
                self._send(place, reader, size, sha256, {"IfMatch": answer["ETag"]})
        except (_AbsentError, _ExistsError) as caught:
            raise _unavailable(Code.STORAGE_UNAVAILABLE, "another writer is changing the object") from caught


class _AbsentError(Exception):
    """The object is not there. Stays inside this module."""


class _ExistsError(Exception):
    """The object is there already, or is being made by another writer. Stays inside this module."""


class _BeyondEndError(Exception):
    """The range starts at or behind the end. Stays inside this module."""


@contextmanager
def _narrowed() -> Iterator[None]:
    try:
        yield
    except ClientError as caught:
        raise _narrow(caught) from caught
    except BotoCoreError as caught:
        raise _unavailable(Code.STORAGE_UNAVAILABLE, str(caught)) from caught


def _narrow(caught: ClientError) -> Exception:
    code = str(caught.response.get("Error", {}).get("Code", ""))
    status = caught.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if code in _ABSENT and caught.operation_name != "HeadBucket":
        return _AbsentError()
    if status == 412 or code == "ConditionalRequestConflict":
        return _ExistsError()
    if status == 416:
        return _BeyondEndError()
    if status == 507 or code in _FULL:
        return _unavailable(Code.STORAGE_FULL, str(caught))
    return _unavailable(Code.STORAGE_UNAVAILABLE, str(caught))


def _unavailable(code: Code, message: str) -> AdapterdError:
    return error(code, "blobs", message[:300], "Check the S3 settings (endpoint, bucket, credentials) and the server.")


def _digest(body: Any) -> str:
    found = hashlib.sha256()
    for piece in iter(lambda: body.read(CHUNK_BYTES), b""):
        found.update(piece)
    return found.hexdigest()


def _checked_size(reader: BinaryIO, sha256: str) -> int:
    """Bytes of the file, once its digest and size are right."""
    found = _digest(reader)
    if found != sha256:
        raise hash_mismatch(sha256, found)
    size = reader.tell()
    if size > MAX_PUT_BYTES:
        raise error(Code.QUOTA_EXCEEDED, sha256, f"{size} bytes; one file in a bucket may have {MAX_PUT_BYTES}")
    return size
