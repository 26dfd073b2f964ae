"""`convert`: prefixes off and on, proved by the base, checked like any upload; and the ways out of other formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fakes.commands import Commands
from fakes.packages import safetensors_bytes, tensors_of, tiny_llama_spec, write_package

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = "adapter_model.safetensors"


def spoilt(folder: Path, rename: Callable[[str], str], **package: object) -> Path:
    written = write_package(folder, **package)  # type: ignore[arg-type]
    tensors = {rename(name): value for name, value in tensors_of(written.factors).items()}
    (folder / WEIGHTS).write_bytes(safetensors_bytes(tensors))
    return folder


def test_the_copy_is_accepted_and_told(shell: Commands, tmp_path: Path, base_file: Path) -> None:
    folder = spoilt(tmp_path / "bad", lambda name: f"module.{name}", files={"README.md": b"hello"})
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    refused = shell.json("verify", folder, "--base", base_file, status=6)["problems"][0]
    assert refused["code"] == "KEY_PREFIX"
    assert "adapterctl convert" in refused["hint"]
    body = shell.json("convert", folder, "--base", base_file, "--out", tmp_path / "out")
    assert len(body["changes"]) == body["tensors"] == 8
    first = body["changes"][0]
    assert first["from"] == f"module.{first['to']}"
    assert first["steps"] == ["wrapper"]
    verified = shell.json("verify", tmp_path / "out", "--base", base_file)
    assert verified["manifest"]["version_digest"] == body["version_digest"]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert (tmp_path / "out/README.md").read_bytes() == b"hello"
    shown = shell.run("convert", folder, "--base", base_file, "--out", tmp_path / "again").stdout
    assert "8 renamed" in shown
    assert first["to"] in shown


def test_nothing_is_overwritten_and_nothing_half_made_is_left(shell: Commands, tmp_path: Path, base_file: Path) -> None:
    good = spoilt(tmp_path / "bad", lambda name: f"module.{name}")
    zero = spoilt(tmp_path / "zero", lambda name: f"module.{name}", scale=0.0)
    out = tmp_path / "out"
    assert shell.codes("convert", zero, "--base", base_file, "--out", out, status=6) == ["ZERO_DELTA"]
    assert not [p for p in tmp_path.iterdir() if "out" in p.name]
    allowed = shell.json("convert", zero, "--base", base_file, "--out", out, "--allow", "ZERO_DELTA")
    assert [p["severity"] for p in allowed["problems"]] == ["warn"]
    assert shell.codes("convert", good, "--base", base_file, "--out", out, status=7) == ["ALREADY_EXISTS"]
    assert shell.run("convert", good, "--out", tmp_path / "no-base").exit_code == 2
    assert shell.codes("convert", tmp_path / "nope", "--base", base_file, "--out", out / "x", status=5) == [
        "PATH_NOT_FOUND"
    ]


def test_of_a_trainers_folder_the_package_is_converted(shell: Commands, tmp_path: Path, base_file: Path) -> None:
    folder = spoilt(tmp_path / "bad", lambda name: f"_orig_mod.{name}", files={"optimizer.pt": b"\x80\x04"})
    (folder / "latest").symlink_to("/nonexistent")
    body = shell.json("convert", folder, "--base", base_file, "--out", tmp_path / "out")
    assert body["left_out"] == ["latest", "optimizer.pt"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["adapter_config.json", WEIGHTS]


def test_pickles_and_other_tools_are_called_by_name_with_the_way_out(
    shell: Commands, tmp_path: Path, base_file: Path
) -> None:
    def refusal(name: str, files: dict[str, bytes]) -> dict[str, str]:
        folder = tmp_path / name
        folder.mkdir()
        for file, data in files.items():
            (folder / file).write_bytes(data)
        body = shell.json("convert", folder, "--base", base_file, "--out", tmp_path / "out", status=6)
        problem: dict[str, str] = body["problems"][0]
        return problem

    pickled = refusal("pickle", {"adapter_config.json": b"{}", "adapter_model.bin": b"\x80\x02"})
    assert pickled["code"] == "FORBIDDEN_FILE"
    assert "PeftModel.from_pretrained" in pickled["hint"]
    mlx = refusal("mlx", {"adapter_config.json": b"{}", "adapters.safetensors": b""})
    assert (mlx["code"], "MLX" in mlx["message"]) == ("UNKNOWN_FORMAT", True)
    kohya = refusal("kohya", {"style.safetensors": b""})
    assert (kohya["code"], "Kohya" in kohya["message"]) == ("UNKNOWN_FORMAT", True)
    assert all("docs/convert.md" in p["hint"] for p in (pickled, mlx, kohya))
    for name, word in (("model.layers.0.self_attn.q_proj.lora_a", "MLX"), ("lora_te_x.lora_down.weight", "Kohya")):
        folder = write_package(tmp_path / word).directory
        (folder / WEIGHTS).write_bytes(safetensors_bytes({name: np.zeros((4, 4), np.float32)}))
        body = shell.json("convert", folder, "--base", base_file, "--out", tmp_path / "out", status=6)
        assert word in body["problems"][0]["message"]


def _recipe(heading: str) -> str:
    page = (ROOT / "docs/convert.md").read_text().split(f"\n## {heading}")[1].split("\n## ")[0]
    found = re.search(r"```python\n(.+?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_recipe_for_mlx_gives_the_same_product(
    shell: Commands, tmp_path: Path, base_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_package(tmp_path / "peft", rank=4, alpha=80)
    mlx = {}
    for path, (a, b) in written.factors.items():
        mlx |= {f"{path}.lora_a": a.T.copy(), f"{path}.lora_b": b.T.copy()}
    source = tmp_path / "mlx-adapter"
    source.mkdir()
    (source / "adapters.safetensors").write_bytes(safetensors_bytes(mlx))
    (source / "adapter_config.json").write_text(json.dumps({"lora_parameters": {"rank": 4, "scale": 20.0}}))
    monkeypatch.chdir(tmp_path)
    spec = tiny_llama_spec()
    recipe = _recipe("MLX").replace("meta-llama/Llama-3.1-8B", spec.id)
    exec(re.sub(r"\b[0-9a-f]{40}\b", spec.revision, recipe), {})
    assert _modules(shell, tmp_path / "peft-adapter", base_file) == _modules(shell, tmp_path / "peft", base_file)


def test_the_recipe_for_kohya_gives_the_same_product(
    shell: Commands, tmp_path: Path, base_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_package(tmp_path / "peft", rank=4, alpha=8)
    kohya = {}
    for path, (a, b) in written.factors.items():
        flat = f"lora_te_{path.replace('.', '_')}"
        kohya |= {f"{flat}.lora_down.weight": a, f"{flat}.lora_up.weight": b, f"{flat}.alpha": np.float32([8.0])}
    (tmp_path / "my_style.safetensors").write_bytes(safetensors_bytes(kohya))
    monkeypatch.chdir(tmp_path)
    spec = tiny_llama_spec()
    model = SimpleNamespace(named_modules=lambda: [(m.path, None) for m in spec.modules])
    recipe = _recipe("Kohya").replace('"ID"', repr(spec.id)).replace('"REVISION"', repr(spec.revision))
    exec(recipe, {"model": model})
    assert _modules(shell, tmp_path / "peft-adapter", base_file) == _modules(shell, tmp_path / "peft", base_file)


def _modules(shell: Commands, folder: Path, base_file: Path) -> list[tuple[str, float, float]]:
    manifest = shell.json("verify", folder, "--base", base_file)["manifest"]
    return [(m["name"], m["scaling"], m["delta_norm"]) for m in manifest["modules"]]
