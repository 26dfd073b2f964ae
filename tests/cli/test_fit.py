"""`fit`: what is said of folders and REFs, without a byte of a tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from adapterd.cli.fit_manifests import check_served
from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.errors import Code, Unavailable
from adapterd.loader.limits import DEFAULT_LIMITS
from adapterd.loader.manifest import Manifest, ModuleEntry, TensorEntry
from fakes.commands import Commands
from fakes.packages import TINY_ID, TINY_REVISION, tiny_llama_spec, write_package
from fakes.server import running_registry

MIB = 1 << 20


def test_every_module_and_the_sum(shell: Commands, tmp_path: Path, base_file: Path) -> None:
    folder = write_package(tmp_path / "p", rank=5, modules=("q_proj", "down_proj")).directory
    body = shell.json("fit", folder, "--base", base_file, "--budget", "3MiB")
    (adapter,) = body["adapters"]
    assert body["arena"] == {"budget": 3 * MIB, "page_bytes": MIB, "pages": 3, "slots": 1024, "unused": 0}
    assert body["fit"] == adapter["fit"] == 3
    by_name = {m["name"].removeprefix("model.layers."): m for m in adapter["modules"]}
    assert len(by_name) == 4
    assert by_name["0.mlp.down_proj"]["bytes"] == 5 * (64 + 32) * 4
    assert by_name["1.self_attn.q_proj"]["bytes"] == 5 * (32 + 32) * 4
    assert by_name["1.self_attn.q_proj"]["alignment"] == 2 * (768 - 5 * 32 * 4)
    assert {(m["scales"], m["zeros"], m["cells"], m["rank"]) for m in adapter["modules"]} == {(0, 0, 2, 5)}
    assert adapter["bytes"] + adapter["alignment"] + adapter["slack"] == adapter["total_bytes"] == MIB
    tables = body["tables"]
    assert (tables["modules"], tables["rows"], tables["bytes"]) == (14, 1024, 1024 * tables["row_bytes"])
    shown = shell.run("fit", folder, "--base", base_file, "--budget", "3MiB").stdout
    assert str(by_name["0.mlp.down_proj"]["bytes"]) in shown
    assert str(tables["bytes"]) in shown
    assert shell.run("fit", folder, "--base", base_file, "--budget", "3MiB", "-q").stdout == "3\n"


def test_a_mix_is_counted_in_turn(shell: Commands, tmp_path: Path, base_file: Path) -> None:
    small = write_package(tmp_path / "small", rank=1).directory
    large = write_package(tmp_path / "large", rank=64, modules=("q_proj", "k_proj", "down_proj")).directory
    options = ("--base", base_file, "--budget", 70_000, "--page-bytes", 4096)
    body = shell.json("fit", small, large, *options)
    pages = [a["pages"] for a in body["adapters"]]
    assert pages[0] < pages[1]
    rounds, left = divmod(70_000 // 4096, sum(pages))
    assert body["fit"] == 2 * rounds + (left >= pages[0])
    assert [a["fit"] for a in body["adapters"]] == [17 // n for n in pages]
    assert body["arena"]["unused"] == 70_000 % 4096
    assert shell.json("fit", small, large, *options, "--slots", 1)["fit"] == 1


def test_dtype_of_the_cache_decides(shell: Commands, tmp_path: Path, base_file: Path) -> None:
    folder = write_package(tmp_path / "p", rank=8).directory
    options = ("fit", folder, "--base", base_file, "--budget", "8MiB")
    own, half = (shell.json(*options, "--dtype", word) for word in ("auto", "BF16"))
    assert own["adapters"][0]["dtype"] == own["tables"]["dtype"] == "F32"
    assert own["adapters"][0]["bytes"] == 2 * half["adapters"][0]["bytes"]
    assert shell.run(*options, "--dtype", "INT8").exit_code == 2


def test_what_will_not_be_served_well_is_told(shell: Commands, tmp_path: Path, base_file: Path) -> None:
    folder = write_package(tmp_path / "p", rank=64, modules=("q_proj", "k_proj", "down_proj")).directory
    half = write_package(tmp_path / "half", rank=4, dtype="BF16").directory
    options = ("--base", base_file, "--page-bytes", 4096)
    codes = [p["code"] for p in shell.json("fit", folder, *options, "--budget", 4096, "--max-rank", 16)["problems"]]
    assert codes == ["BUDGET_EXCEEDED", "KERNEL_UNAVAILABLE"]
    body = shell.json("fit", folder, half, folder, *options, "--budget", "8MiB")
    assert [(p["code"], p["where"]) for p in body["problems"]] == [("KERNEL_UNAVAILABLE", str(half))]


def test_a_module_that_no_engine_wraps_by_default(shell: Commands, tmp_path: Path) -> None:
    classifier = BaseModule("classifier.dense", ModuleKind.LINEAR, 32, 32)
    base = BaseSpec.of([*tiny_llama_spec().modules, classifier], id=TINY_ID, revision=TINY_REVISION)
    base.save(tmp_path / "base.json")
    folder = write_package(tmp_path / "p", base=base, modules=("q_proj", "classifier.dense")).directory
    body = shell.json("fit", folder, "--base", tmp_path / "base.json", "--budget", "8MiB")
    assert [p["code"] for p in body["problems"]] == ["MODULE_NOT_SERVED"]
    assert "classifier.dense" in body["problems"][0]["message"]


def test_a_folder_of_ten_gigabytes_is_answered_from_its_header(
    shell: Commands, tmp_path: Path, base_file: Path
) -> None:
    """Its tensors are a hole in the disk: whoever read or hashed them would take minutes."""
    base = tiny_llama_spec()
    wide = BaseSpec.of(
        [BaseModule(m.path, m.kind, m.in_features << 15, m.out_features << 4) for m in base.modules],
        id=base.id, revision=base.revision,
    )  # fmt: skip
    wide.save(tmp_path / "wide.json")
    folder = write_package(tmp_path / "p", rank=1, modules=("q_proj",)).directory
    _widen(folder, rank=512, n_in=32 << 15, n_out=32 << 4)
    assert (folder / "adapter_model.safetensors").stat().st_size > 4 << 30
    before = _bytes_read()
    body = shell.json("fit", folder, "--base", tmp_path / "wide.json", "--budget", "80GiB", "--page-bytes", "64MiB")
    assert _bytes_read() - before < 8 * MIB
    assert body["adapters"][0]["bytes"] == 2 * 512 * 4 * ((32 << 15) + (32 << 4))


def _widen(folder: Path, rank: int, n_in: int, n_out: int) -> None:
    """Write another header over the tensor file, and a hole behind it."""
    header, position = {}, 0
    for layer in range(2):
        for side, shape in (("A", (rank, n_in)), ("B", (n_out, rank))):
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight"
            size = 4 * shape[0] * shape[1]
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, position + size]}
            position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": rank, "lora_alpha": rank}))


def _bytes_read() -> int:
    """By this process's calls, so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def test_each_rank_of_a_group_holds_its_part(shell: Commands, tmp_path: Path, base_file: Path) -> None:
    folder = write_package(tmp_path / "p", rank=5, modules=("q_proj", "k_proj", "down_proj")).directory
    options = ("fit", folder, "--base", base_file, "--budget", "8MiB", "--tp", 4)
    body = shell.json(*options)
    widths = {
        m["name"].rpartition(".")[2]: (m["in_features"], m["out_features"]) for m in body["adapters"][0]["modules"]
    }
    assert widths == {"q_proj": (32, 8), "k_proj": (32, 4), "down_proj": (16, 32)}
    assert {r["name"]: (r["axis"], r["slices"]) for r in body["tp"]["rules"]} == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("column", 4)),
        **dict.fromkeys(("o_proj", "down_proj"), ("row", 4)),
    }
    for module in body["adapters"][0]["modules"]:
        assert module["bytes"] == 5 * 4 * (module["in_features"] + module["out_features"])
    said = shell.json(*options, "--column", "q_proj", "--column", "k_proj=2", "--row", "o_proj")
    found = {m["name"].rpartition(".")[2]: m["out_features"] for m in said["adapters"][0]["modules"]}
    assert found == {"q_proj": 8, "k_proj": 8, "down_proj": 32}
    assert "4; all figures are those of each" in shell.run(*options).stdout


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("--tp", "3"), 1),  # 32 outputs
        (("--tp", "4", "--column", "k_proj=3"), 1),
        (("--tp", "2", "--row", "nothing"), 1),
        (("--tp", "2", "--row", "embed_tokens"), 1),
        (("--tp", "2", "--row", "down_proj=x"), 2),
        (("--tp", "2", "--row", "=2"), 2),
        (("--tp", "65"), 2),
        (("--tp", "0"), 2),
        (("--row", "down_proj"), 2),
    ],
)
def test_rules_that_cut_nothing_are_refused(
    words: tuple[str, ...], status: int, shell: Commands, package: Path, base_file: Path
) -> None:
    done = shell.run("fit", package, "--base", base_file, "--budget", "8MiB", *words)
    assert done.exit_code == status, done.output


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("--budget", "lots"), 2),
        (("--budget", "5"), 2),
        (("--budget", "٨GiB"), 2),
        (("--budget", "8MiB", "--page-bytes", "1000"), 1),
        (("--budget", "8MiB", "--page-bytes", "0"), 1),
        (("--budget", "8TiB", "--page-bytes", "2TiB"), 2),
        (("--budget", "8MiB", "--slots", "0"), 2),
        (("--budget", "8MiB", "--max-rank", "0"), 2),
        ((), 2),
        (("--budget", "8MiB", "--page-bytes", "256"), 0),
    ],
)
def test_nonsense_is_a_usage_fault(
    words: tuple[str, ...], status: int, shell: Commands, package: Path, base_file: Path
) -> None:
    assert shell.run("fit", package, "--base", base_file, *words).exit_code == status


def test_what_is_no_adapter_is_refused(shell: Commands, tmp_path: Path, base_file: Path) -> None:
    good = write_package(tmp_path / "good").directory
    bad = write_package(tmp_path / "bad", use_dora=True).directory
    options = ("--base", base_file, "--budget", "8MiB")
    assert shell.codes("fit", good, bad, *options, status=6) == ["UNSUPPORTED_FEATURE"]
    assert shell.codes("fit", good, tmp_path / "nope", *options, status=5) == ["PATH_NOT_FOUND"]
    assert shell.run("fit", good, "--budget", "8MiB").exit_code == 2
    row = write_package(tmp_path / "row", rank=1).directory
    assert shell.codes("fit", row, *options[:2], "--budget", 8192, "--page-bytes", 0x40, status=1) == [
        "SETTINGS_INVALID"
    ]


def test_it_needs_no_torch(tmp_path: Path, base_file: Path) -> None:
    folder = write_package(tmp_path / "p").directory
    code = (
        "import sys\n"
        "from adapterd.cli.main import app\n"
        f"status = app(['fit', {str(folder)!r}, '--base', {str(base_file)!r}, '--budget', '8MiB', '-q'], "
        "standalone_mode=False)\n"
        "print(status, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.strip().splitlines()[-1] == "0 False"
    assert done.stdout == "8\n"


# --- REFs


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """acme's shell; `acme/small` and `acme/large` are published."""
    root = tmp_path_factory.mktemp("fit")
    with running_registry(root / "registry") as registry:
        homes = {name: root / name for name in ("operator", "acme", "globex")}
        for home in homes.values():
            home.mkdir()
        operator = Commands(
            homes["operator"], {"ADAPTERD_URL": registry.url, "ADAPTERD_TOKEN": registry.operator_token}
        )
        tiny_llama_spec().save(root / "base.json")
        operator.json("base", "add", root / "base.json")
        scopes = ("--scope", "adapters:read", "--scope", "adapters:upload", "--scope", "aliases:promote")
        operator.json("tenant", "create", "acme")
        operator.json("tenant", "policy", "acme", "--allow-unsigned")
        token = operator.json("token", "create", "acme", *scopes)["token"]
        shell = Commands(homes["acme"], {"ADAPTERD_URL": registry.url, "ADAPTERD_TOKEN": token})
        for name, rank in (("small", 2), ("large", 64)):
            folder = write_package(root / f"{name}-files", rank=rank).directory
            done = shell.run(
                "upload", folder, f"acme/{name}", "--base", f"{TINY_ID}@{TINY_REVISION}", "--alias", "default"
            )
            assert done.exit_code == 0, done.output
        yield shell


def test_a_ref_takes_what_its_folder_takes(acme: Commands, tmp_path: Path, base_file: Path) -> None:
    folder = write_package(tmp_path / "large", rank=64).directory
    options = ("--budget", 200_000, "--page-bytes", 4096)
    (here,) = acme.json("fit", folder, "--base", base_file, *options)["adapters"]
    there = acme.json("fit", "acme/large", "acme/small", *options)
    assert {**here, "subject": ""} == {**there["adapters"][0], "subject": ""}
    assert there["adapters"][0]["subject"].startswith("acme/large@sha256:")
    assert there["fit"] == 48 // (there["adapters"][0]["pages"] + there["adapters"][1]["pages"]) * 2
    mixed = acme.json("fit", "acme/large", folder, "--base", f"{TINY_ID}@{TINY_REVISION}", *options)
    assert mixed["fit"] == mixed["adapters"][0]["fit"]


def test_a_ref_for_another_base_or_of_nobody(acme: Commands, tmp_path: Path) -> None:
    tiny_llama_spec(revision="8" * 40).save(tmp_path / "other.json")
    options = ("--budget", "8MiB")
    assert acme.codes("fit", "acme/small", "--base", tmp_path / "other.json", *options, status=6) == ["BASE_MISMATCH"]
    assert acme.codes("fit", "globex/small", *options, status=5) == ["NOT_FOUND"]


@pytest.mark.parametrize(
    "lie",
    [
        {"rank": 1 << 40}, {"rank": 0}, {"rank": -3}, {"in_features": 1 << 40}, {"name": "model.layers.9.q_proj"},
        {"dtype": "I8"}, {"out_features": 31},
    ],
)  # fmt: skip
def test_a_servers_manifest_cannot_make_us_count_for_hours(lie: dict[str, object]) -> None:
    base = tiny_llama_spec()
    tensors = TensorEntry("a", "F32", (1, 1), 0, 4), TensorEntry("b", "F32", (1, 1), 4, 8)
    good = ModuleEntry("model.layers.0.self_attn.q_proj", 4, 8.0, 2.0, "F32", 32, 32, *tensors)
    check_served("acme/a", Manifest(base.pin, (good,), ()), base, DEFAULT_LIMITS)
    for modules in ((replace(good, **lie),), (good, good), ()):  # type: ignore[arg-type]
        with pytest.raises(Unavailable) as caught:
            check_served("acme/a", Manifest(base.pin, modules, ()), base, DEFAULT_LIMITS)
        assert caught.value.code is Code.SERVER_ERROR
