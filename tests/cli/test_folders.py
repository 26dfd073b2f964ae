"""Folders as people have them: what counts, what is refused, and sending just the package."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.commands import Commands
from fakes.packages import TINY_ID, TINY_REVISION, tiny_llama_spec, write_package
from fakes.server import running_registry

PICKLE = b"\x80\x04N."
WEIGHTS = "adapter_model.safetensors"
TRASH = ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", f"Copy of {WEIGHTS}",
         "adapter_model (1).safetensors")  # fmt: skip


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """What a trainer and a browser leave behind."""
    folder = write_package(tmp_path / "run", files={"README.md": b"# card\n", "tokenizer.json": b"{}"}).directory
    for name in TRASH:
        (folder / name).write_bytes(PICKLE)
    (folder / "trainer_state.json").write_text("{}")
    write_package(folder / "checkpoint-500", seed=9)
    (folder / "checkpoint-500/optimizer.pt").write_bytes(PICKLE)
    return folder


@pytest.fixture(scope="module")
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """A tenant's shell against a registry that wants no signatures."""
    root = tmp_path_factory.mktemp("folders")
    with running_registry(root / "registry") as registry:
        (root / "home").mkdir()
        operator = Commands(root / "home", {"ADAPTERD_URL": registry.url, "ADAPTERD_TOKEN": registry.operator_token})
        tiny_llama_spec().save(root / "base.json")
        operator.json("base", "add", root / "base.json")
        operator.json("tenant", "create", "acme")
        operator.json("tenant", "policy", "acme", "--allow-unsigned")
        words = ["--scope", "adapters:upload", "--scope", "adapters:read"]
        token = operator.json("token", "create", "acme", *words)["token"]
        yield operator.with_variables(ADAPTERD_TOKEN=token)


def test_one_answer_names_the_files_that_count_and_the_others(shell: Commands, trainer: Path, base_file: Path) -> None:
    result = shell.run("verify", trainer, "--base", base_file)
    assert result.exit_code == 6
    lines = {line.split("  ")[0]: line for line in result.stdout.splitlines()}
    assert lines["the adapter"].split("  ")[-1].strip() == f"README.md, adapter_config.json, {WEIGHTS}, tokenizer.json"
    assert "optimizer.pt" in lines["refused"] or "and" in lines["refused"]
    assert "trainer_state.json" in lines["left out"]
    told = shell.json("verify", trainer, "--base", base_file, status=6)["problems"]
    by_name = {p["where"]: p for p in told}
    assert {*TRASH, f"checkpoint-500/{WEIGHTS}", "checkpoint-500/optimizer.pt"} <= by_name.keys()
    assert "the optimizer's state" in by_name["optimizer.pt"]["message"]
    assert "copy" in by_name[f"Copy of {WEIGHTS}"]["message"]
    assert "copy" in by_name["adapter_model (1).safetensors"]["message"]
    assert "checkpoint-500" in by_name[f"checkpoint-500/{WEIGHTS}"]["message"]
    assert all("--only-package" in p["hint"] for p in told if p["severity"] == "reject")


def test_the_package_alone_can_be_verified(shell: Commands, trainer: Path, base_file: Path, tmp_path: Path) -> None:
    (trainer / "latest").symlink_to("checkpoint-500")
    assert shell.codes("verify", trainer, "--base", base_file, status=6) == ["UNSAFE_LINK"]
    body = shell.json("verify", trainer, "--base", base_file, "--only-package")
    assert body["problems"] == []
    files = [f["path"] for f in body["manifest"]["files"]]
    assert files == ["README.md", "adapter_config.json", WEIGHTS, "tokenizer.json"]
    (trainer / WEIGHTS).unlink()
    (trainer / WEIGHTS).symlink_to("checkpoint-500/adapter_model.safetensors")
    assert shell.codes("verify", trainer, "--base", base_file, "--only-package", status=6) == ["UNSAFE_LINK"]


def test_upload_sends_just_the_package_where_it_is_told_to(publisher: Commands, trainer: Path) -> None:
    words = ["upload", trainer, "acme/run", "--base", f"{TINY_ID}@{TINY_REVISION}"]
    refused = publisher.json(*words, status=6)
    assert all("--only-package" in p["hint"] for p in refused["problems"])
    body = publisher.json(*words, "--only-package")
    assert set(body["left_out"]) == {*TRASH, "trainer_state.json", "checkpoint-500"}
    version = publisher.json("show", body["ref"])["version"]
    assert [f["path"] for f in version["files"]] == ["README.md", "adapter_config.json", WEIGHTS, "tokenizer.json"]


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("n", 6)])
def test_on_a_terminal_it_asks(publisher: Commands, trainer: Path, answer: str, status: int) -> None:
    ours, theirs = pty.openpty()
    base = f"{TINY_ID}@{TINY_REVISION}"
    command = [sys.executable, "-m", "adapterd.cli", "upload", trainer, f"acme/asked-{answer}", "--base", base]
    environment = {**os.environ, **{k: v for k, v in publisher.environment.items() if v is not None}}
    os.write(ours, f"{answer}\n".encode())
    with subprocess.Popen(
        [*command, "-q"], stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, env=environment, close_fds=True
    ) as run:
        os.close(theirs)
        shown = _all_of(ours)
        assert run.stdout is not None
        printed = run.stdout.read()
    assert run.returncode == status, shown
    assert "Send just the adapter's own files" in shown
    assert (f"acme/asked-{answer}@sha256:".encode() in printed) is (status == 0)


def _all_of(terminal: int) -> str:
    """What a program wrote on its terminal; Linux reports its end as an error."""
    parts = []
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:
            part = b""
        if not part:
            os.close(terminal)
            return b"".join(parts).decode()
        parts.append(part)
