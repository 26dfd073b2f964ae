"""Hostile and broken bases: refused before a byte is written, or with nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from adapterd.loader.errors import AdapterdError, Code
from adapterd.loader.merge.folder import opened_base
from adapterd.loader.merge.output import must_be_free, put
from fakes.disk import file_size_limit
from fakes.merging import INDEX, SHARDS, merge, read_tensors, write_base
from fakes.packages import write_package


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_package(tmp_path / "adapter").directory


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


def refusal(base: Path, adapter: Path, out: Path) -> AdapterdError:
    before = sorted(out.parent.iterdir())
    with pytest.raises(AdapterdError) as caught:
        merge(base, adapter, out)
    assert sorted(out.parent.iterdir()) == before
    return caught.value


def _truncated(base: Path) -> None:
    shard = base / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:-1])


def _longer(base: Path) -> None:
    shard = base / SHARDS[1]
    shard.write_bytes(shard.read_bytes() + b"\0")


def _header_only(base: Path) -> None:
    shard = base / SHARDS[0]
    shard.write_bytes(shard.read_bytes()[:40])


def _edited(change: Callable[[dict[str, object]], None]) -> Callable[[Path], None]:
    """The second shard with another header, of the same length, in front of the same bytes."""

    def edit(base: Path) -> None:
        data = (base / SHARDS[1]).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        entries = [info for name, info in header.items() if name != "__metadata__"]
        for info in entries[:2]:
            change(info)
        text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
        (base / SHARDS[1]).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return edit


def _overlapping(info: dict[str, object]) -> None:
    """To the file's start, at its own length: over the first one, with a hole where it was."""
    begin, end = info["data_offsets"]  # type: ignore[misc]
    info["data_offsets"] = [0, end - begin]  # type: ignore[has-type]


def _no_shard(base: Path) -> None:
    (base / SHARDS[1]).unlink()


def _index_lacks(base: Path) -> None:
    body = json.loads((base / INDEX).read_text())
    moved = next(n for n, shard in body["weight_map"].items() if shard == SHARDS[1])
    body["weight_map"][moved] = SHARDS[0]
    (base / INDEX).write_text(json.dumps(body))


def _index_escapes(base: Path) -> None:
    body = json.loads((base / INDEX).read_text())
    body["weight_map"] = dict.fromkeys(body["weight_map"], "../model.safetensors")
    (base / INDEX).write_text(json.dumps(body))


def _index_of_no_name(base: Path) -> None:
    body = json.loads((base / INDEX).read_text())
    body["weight_map"] = dict.fromkeys(body["weight_map"], "model\0.safetensors")
    (base / INDEX).write_text(json.dumps(body))


def _replaced(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    def replace(base: Path) -> None:
        (base / name).unlink()
        make(base / name)

    return replace


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (_truncated, Code.BASE_TABLE_INVALID),
        (_longer, Code.BASE_TABLE_INVALID),
        (_header_only, Code.BASE_TABLE_INVALID),
        (_edited(_overlapping), Code.BASE_TABLE_INVALID),
        (_edited(lambda info: info.update(data_offsets=[0, 1 << 62])), Code.BASE_TABLE_INVALID),
        (_edited(lambda info: info.update(data_offsets=[-8, 8])), Code.BASE_TABLE_INVALID),
        (_edited(lambda info: info.update(data_offsets="")), Code.BASE_TABLE_INVALID),
        (_edited(lambda info: info.update(shape=[1 << 40, 1 << 40])), Code.BASE_TABLE_INVALID),
        (_edited(lambda info: info.update(dtype="F64")), Code.BASE_TABLE_INVALID),
        (_no_shard, Code.PATH_NOT_FOUND),
        (_index_lacks, Code.BASE_TABLE_INVALID),
        (_index_escapes, Code.BASE_TABLE_INVALID),
        (lambda base: (base / "config.json").unlink(), Code.PATH_NOT_FOUND),
        (lambda base: (base / "config.json").write_text("[]"), Code.BASE_TABLE_INVALID),
        (_index_of_no_name, Code.BASE_TABLE_INVALID),
        (_replaced("config.json", os.mkfifo), Code.BASE_TABLE_INVALID),
        (_replaced(INDEX, os.mkfifo), Code.ARCHIVE_SPECIAL_FILE),
        (_replaced("config.json", lambda path: path.symlink_to("/dev/zero")), Code.BASE_TABLE_INVALID),
        (lambda base: os.mkfifo(base / "pipe"), Code.ARCHIVE_SPECIAL_FILE),
        (lambda base: (base / "notes.md").symlink_to("/etc/hostname"), Code.UNSAFE_LINK),
        (lambda base: (base / "more").symlink_to("/etc"), Code.UNSAFE_LINK),
        (lambda base: (base / "gone").symlink_to("nowhere"), Code.UNSAFE_LINK),
        (lambda base: (base / "loop").symlink_to("loop"), Code.UNSAFE_LINK),
        (lambda base: (base / "self").symlink_to("."), Code.UNSAFE_LINK),
    ],
)
def test_a_base_that_lies_is_refused(
    base: Path, adapter: Path, tmp_path: Path, spoil: Callable[[Path], None], code: Code
) -> None:
    spoil(base)
    assert refusal(base, adapter, tmp_path / "out").code is code


def test_a_snapshot_of_links_as_the_hub_caches_it(tmp_path: Path, base: Path, adapter: Path) -> None:
    snapshot = tmp_path / "hub/models--x/snapshots/0123"
    blobs = tmp_path / "hub/models--x/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(base.iterdir())):
        shutil.copy(file, blobs / f"{i}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    merge(snapshot, adapter, tmp_path / "one")
    merge(base, adapter, tmp_path / "two")
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("one", "two"))
    assert one == two
    assert not any(p.is_symlink() for p in (tmp_path / "one").iterdir())
    (tmp_path / "hub/secret").write_text("not the model's")
    (snapshot / "README.md").symlink_to("../../../secret")
    assert refusal(snapshot, adapter, tmp_path / "three").code is Code.UNSAFE_LINK


def test_nothing_is_overwritten_and_the_base_is_not_written_into(base: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    assert refusal(base, adapter, tmp_path / "taken").code is Code.ALREADY_EXISTS
    (tmp_path / "link").symlink_to("nowhere")
    assert refusal(base, adapter, tmp_path / "link").code is Code.ALREADY_EXISTS
    assert refusal(base, adapter, base / "out").code is Code.REQUEST_INVALID


def test_a_way_through_the_base_makes_nothing_there(base: Path, adapter: Path, tmp_path: Path) -> None:
    before = sorted(base.iterdir())
    merge(base, adapter, base / "new" / ".." / ".." / "out")
    assert sorted(base.iterdir()) == before
    assert read_tensors(tmp_path / "out").keys() == read_tensors(base).keys()


def test_links_in_a_ring_are_told(base: Path, tmp_path: Path) -> None:
    ring = tmp_path / "ring"
    ring.symlink_to(ring)
    must_be_free(tmp_path / "out", ring)  # the ring is no base, which its reader says
    with pytest.raises(AdapterdError) as caught:
        opened_base(ring).__enter__()
    assert caught.value.code is Code.PATH_NOT_FOUND
    must_be_free(ring / "out", base)


def test_of_two_merges_to_one_place_one_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    class Rival(list[int]):
        """Merges to the same place while the first is at work."""

        def append(self, count: int) -> None:
            if not self:
                super().append(count)
                merge(base, adapter, tmp_path / "out")

    with pytest.raises(AdapterdError) as caught:
        merge(base, adapter, tmp_path / "out", progress=Rival())
    assert (caught.value.code, caught.value.problem.where) == (Code.ALREADY_EXISTS, str(tmp_path / "out"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base", "out"]
    assert read_tensors(tmp_path / "out").keys() == read_tensors(base).keys()


def test_the_last_word_is_the_disks(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    (tmp_path / "plain").write_text("mine")
    for name in ("taken", "plain"):
        with pytest.raises(AdapterdError) as caught:
            put(tmp_path / "made", tmp_path / name, Path(name))
        assert (caught.value.code, caught.value.problem.where) == (Code.ALREADY_EXISTS, name)
        assert (tmp_path / "made").is_dir()


def test_a_full_disk_leaves_nothing(base: Path, adapter: Path, tmp_path: Path) -> None:
    with file_size_limit(20_000), pytest.raises(OSError, match="File too large"):
        merge(base, adapter, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base"]
    merge(base, adapter, tmp_path / "out")
    assert read_tensors(tmp_path / "out").keys() == read_tensors(base).keys()


def test_room_is_looked_for_before_anything_is_written(tmp_path: Path) -> None:
    from adapterd.loader.merge.shards import must_fit

    free = shutil.disk_usage(tmp_path).free
    must_fit(1, tmp_path)
    with pytest.raises(AdapterdError) as caught:
        must_fit(free * 2, tmp_path)
    assert (caught.value.code, caught.value.exit_status) == (Code.STORAGE_FULL, 8)


KILLED = """
import os, signal, sys
from pathlib import Path
from fakes.merging import merge

class Fatal(list):
    def append(self, n):
        os.kill(os.getpid(), signal.SIGKILL)

merge(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), progress=Fatal())
"""


def test_a_kill_half_way_leaves_a_folder_that_the_next_merge_removes(base: Path, adapter: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", KILLED, str(base), str(adapter), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, env=environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.glob("adapterd-merge-*"))) == 1
    merge(base, adapter, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base", "out"]
