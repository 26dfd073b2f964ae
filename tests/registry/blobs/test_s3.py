"""What only a bucket can do wrong, on a real server."""

from __future__ import annotations

import hashlib
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from adapterd.loader.errors import Code, Unavailable
from adapterd.registry.blobs.factory import open_blobs
from adapterd.registry.blobs.local import LocalBlobs
from adapterd.registry.blobs.s3 import S3Blobs, make_client
from adapterd.registry.settings import load_settings
from fakes.s3 import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server

DATA = b"some bytes"
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    return path


def test_the_server_itself_refuses_other_bytes(s3_blobs: S3Blobs, source: Path) -> None:
    """The second half of the double check: what reaches the bucket is hashed there, too."""
    with source.open("rb") as reader, pytest.raises(Unavailable) as caught:
        place = {"Bucket": s3_blobs.bucket, "Key": s3_blobs.key("acme", "0" * 64)}
        s3_blobs._send(place, reader, len(DATA), "0" * 64, {})
    assert caught.value.code is Code.STORAGE_UNAVAILABLE
    assert s3_blobs.size("acme", "0" * 64) is None


def test_of_many_creators_one_creates(s3_blobs: S3Blobs) -> None:
    def create(n: int) -> bool:
        try:
            s3_blobs.client.put_object(Bucket=s3_blobs.bucket, Key="race", Body=b"%d" % n, IfNoneMatch="*")
        except ClientError as caught:
            assert caught.response["ResponseMetadata"]["HTTPStatusCode"] in (409, 412)
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(create, range(8))) == 1


def test_the_prefix_is_part_of_the_key(s3_blobs: S3Blobs, source: Path) -> None:
    s3_blobs.put("acme", SHA256, source)
    listed = s3_blobs.client.list_objects_v2(Bucket=s3_blobs.bucket)["Contents"]
    assert [found["Key"] for found in listed] == [s3_blobs.key("acme", SHA256)]
    assert listed[0]["Key"].startswith("registry/")


def test_a_bucket_that_is_not_there(s3_blobs: S3Blobs) -> None:
    elsewhere = S3Blobs(s3_blobs.client, "no-such-bucket-at-all")
    for attempt in (
        elsewhere.check,
        lambda: list(elsewhere.read("acme", SHA256)),
    ):
        with pytest.raises(Unavailable) as caught:
            attempt()
        assert caught.value.code is Code.STORAGE_UNAVAILABLE


def test_wrong_credentials(s3_blobs: S3Blobs, s3_server: S3Server, source: Path) -> None:
    client = make_client(endpoint=s3_server.endpoint, access_key_id=ACCESS_KEY_ID, secret_access_key="hunter2")
    stranger = S3Blobs(client, s3_blobs.bucket)
    for attempt in (
        stranger.check,
        lambda: stranger.put("acme", SHA256, source),
        lambda: stranger.size("acme", SHA256),
    ):
        with pytest.raises(Unavailable) as caught:
            attempt()
        assert caught.value.code is Code.STORAGE_UNAVAILABLE
        assert "hunter2" not in str(caught.value)
    stranger.close()


def test_a_server_that_is_not_there(source: Path) -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        client = make_client(
            endpoint=f"http://127.0.0.1:{taken.getsockname()[1]}",
            access_key_id="k",
            secret_access_key="s",
            attempts=1,
        )
        gone = S3Blobs(client, "bucket")
        for attempt in (
            gone.check,
            lambda: gone.put("acme", SHA256, source),
            lambda: gone.size("acme", SHA256),
        ):
            with pytest.raises(Unavailable) as caught:
                attempt()
            assert caught.value.code is Code.STORAGE_UNAVAILABLE
        gone.close()


def test_settings_choose_the_store(s3_blobs: S3Blobs, s3_server: S3Server, source: Path, tmp_path: Path) -> None:
    assert isinstance(open_blobs(load_settings(data_dir=tmp_path)), LocalBlobs)
    settings = load_settings(
        data_dir=tmp_path, blobs="s3", s3_endpoint=s3_server.endpoint, s3_bucket=s3_blobs.bucket,
        s3_prefix="registry/", s3_access_key_id=ACCESS_KEY_ID, s3_secret_access_key=SECRET_ACCESS_KEY,
    )  # fmt: skip
    opened = open_blobs(settings)
    assert isinstance(opened, S3Blobs)
    opened.put("acme", SHA256, source)
    assert s3_blobs.size("acme", SHA256) == len(DATA)
    opened.close()
