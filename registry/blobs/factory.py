"""Which store the settings ask for."""

from __future__ import annotations

from adapterd.registry.blobs.interfaces import BlobStore
from adapterd.registry.blobs.local import LocalBlobs
from adapterd.registry.settings import Settings


def open_blobs(settings: Settings) -> BlobStore:
    """The store of the settings; reaches out to nothing yet (`check` does)."""
    if settings.blobs == "local":
        return LocalBlobs(settings.blobs_dir)
    # boto3 is an extra, and slow to import: only who uses S3 pays for it.
    from adapterd.registry.blobs.s3 import S3Blobs, make_client

    client = make_client(
        endpoint=settings.s3_endpoint, region=settings.s3_region, access_key_id=settings.s3_access_key_id,
        secret_access_key=settings.s3_secret_access_key.get_secret_value(),
    )  # fmt: skip
    return S3Blobs(client, settings.s3_bucket, settings.s3_prefix)
