"""The weights' digest: about tensors, whatever files they are in."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from adapterd.loader.base_weights import weights_bytes, weights_digest
from adapterd.loader.errors import Code, Failed, NotFound
from adapterd.loader.identity import canonical_json, sha256_hex
from fakes.packages import safetensors_bytes

TENSORS = {
    "b.weight": np.arange(6, dtype="<f4").reshape(2, 3), "a.weight": np.ones((2, 2), dtype="<f2"),
    "c.bias": np.zeros(4, dtype="<f4"),
}  # fmt: skip
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def whole(folder: Path, **metadata: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(TENSORS, metadata))
    return folder


def sharded(folder: Path, weight_map: dict[str, str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    shards = {
        "model-00001-of-00002.safetensors": ["c.bias"],
        "model-00002-of-00002.safetensors": ["a.weight", "b.weight"],
    }
    for shard, names in shards.items():
        (folder / shard).write_bytes(safetensors_bytes({name: TENSORS[name] for name in names}))
    listed = weight_map or {name: shard for shard, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return folder


def test_it_is_the_digest_of_names_shapes_and_bytes(tmp_path: Path) -> None:
    words = {"<f4": "F32", "<f2": "F16"}
    tensors = [
        {
            "name": name, "dtype": words[value.dtype.str], "shape": list(value.shape),
            "sha256": sha256_hex(value.tobytes()),
        }
        for name, value in sorted(TENSORS.items())
    ]  # fmt: skip
    wanted = sha256_hex(canonical_json({"tensors": tensors, "type": "adapterd.weights/1"}))
    assert weights_digest(whole(tmp_path)) == wanted


def test_sharding_and_metadata_change_nothing_and_progress_is_told(tmp_path: Path) -> None:
    seen: list[int] = []
    digest = weights_digest(whole(tmp_path / "one"))
    assert weights_digest(whole(tmp_path / "noted", made_by="somebody")) == digest
    assert weights_digest(sharded(tmp_path / "many"), seen.append) == digest
    assert sum(seen) == weights_bytes(tmp_path / "many") == sum(v.nbytes for v in TENSORS.values())


def test_one_bit_changes_it(tmp_path: Path) -> None:
    before = weights_digest(whole(tmp_path))
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    assert weights_digest(tmp_path) != before


def test_an_index_must_say_where_the_tensors_are(tmp_path: Path) -> None:
    folder = sharded(tmp_path, {"a.weight": FIRST, "b.weight": SECOND})
    with pytest.raises(Failed, match=r"a\.weight: model\.safetensors\.index\.json says"):
        weights_digest(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / FIRST).write_bytes(safetensors_bytes(TENSORS))
    with pytest.raises(Failed, match="is stored twice"):
        weights_digest(folder)


def test_a_missing_shard_is_not_found(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / SECOND).unlink()
    with pytest.raises(NotFound):
        weights_digest(folder)


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    data = (whole(tmp_path) / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(Failed, match="ends inside this tensor"):
        weights_digest(tmp_path)


@pytest.mark.parametrize(
    "offsets", [None, [], [1], [4, 0], [-4, 4], ["0", "4"], [0, 1 << 60], [1 << 80, (1 << 80) + 4]]
)
def test_offsets_that_are_none_are_refused(tmp_path: Path, offsets: object) -> None:
    text = json.dumps({"a.weight": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    with pytest.raises(Failed) as caught:
        weights_digest(tmp_path)
    assert caught.value.code is Code.BASE_TABLE_INVALID
