"""`adapterctl worker` as its users run it: a process of its own, with the examples of its page."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from adapterd.cli.inputs import parse_size
from adapterd.cli.worker.models import TINY_ID, TINY_REVISION, load_model, tiny_model
from adapterd.loader.base_model import BaseSpec
from adapterd.loader.errors import AdapterdError, Code
from fakes.commands import INTERRUPTIBLE, Commands
from fakes.publisher import FolderPublisher
from fakes.worker_world import ALL

PAGE = (Path(__file__).resolve().parents[3] / "docs/worker.md").read_text()
ASK = {"id": "a", "tenant": "acme", "prompt": [1, 2], "max_tokens": 4}
LONG = {**ASK, "id": "long", "max_tokens": 500}


@pytest.fixture
def published(tmp_path: Path) -> list[str]:
    """The options of a worker over one published adapter."""
    base = BaseSpec.from_module(tiny_model(), id=TINY_ID, revision=TINY_REVISION)
    publisher = FolderPublisher(tmp_path / "published", base)
    for seed, name in enumerate(("finance", "narrow", "wide"), 1):
        publisher.publish("acme", name, modules=ALL, rank=2 * seed, alpha=8, seed=seed)
    publisher.trust.save(tmp_path / "trust.json")
    return ["--model", "tiny", "--source", str(publisher.root), "--trust", str(tmp_path / "trust.json")]


@contextmanager
def worker(options: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ADAPTERD_")}
    process = subprocess.Popen(
        [*INTERRUPTIBLE, sys.executable, "-m", "adapterd.cli", "worker", *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=kept,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def begin(process: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
    """Sends one request, and returns its first token."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, process.stderr.read()
    first: dict[str, Any] = json.loads(line)
    assert first["index"] == 0, first
    return first


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def examples(title: str) -> str:
    block = re.search(rf"## {title}\n\n```json\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    return block[1]


def test_the_examples_of_the_page_are_answered_as_it_says(published: list[str]) -> None:
    with worker([*published, "--vram", "8MiB", "--host", "8 MiB"]) as process:
        out, told = process.communicate(examples("Requests"))
    assert process.returncode == 0, told
    answers = lines(out)
    last = {a["id"]: a for a in answers if "token" not in a}
    for example in lines(examples("Answers")):
        fitting = [a for a in answers if a.keys() == example.keys() and a["id"] == example["id"]]
        assert fitting, example
        if "error" in example:
            wanted = {k: example["error"][k] for k in ("code", "severity", "where")}
            assert {k: fitting[0]["error"][k] for k in wanted} == wanted
        if "done" in example:
            assert (fitting[0]["done"], len(fitting[0]["applied"])) == (example["done"], len(example["applied"]))
    assert [last[name]["done"] for name in "123"] == ["length"] * 3
    assert last["3"]["applied"][0]["weight"] == 0.5
    first, *_, end = told.splitlines()
    assert first.startswith(f"==> worker: serving {TINY_ID}@") and "3 length" in end


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_lets_open_requests_finish(published: list[str], number: int, status: int) -> None:
    with worker([*published, "--json"]) as process:
        seen = [begin(process, {**LONG, "max_tokens": 60})]
        assert process.stdout is not None
        process.send_signal(number)
        rest = process.stdout.read()
        assert process.wait(60) == status
    written, brace, summary = rest.partition("{\n")
    seen += lines(written)
    assert [a["index"] for a in seen[:-1]] == list(range(60)) and seen[-1]["done"] == "length"
    told = json.loads(brace + summary)
    assert told["schema"] == "adapterctl.worker/1" and told["ended"] == {"length": 1}


def test_a_second_signal_ends_what_is_open(published: list[str]) -> None:
    with worker(published) as process:
        begin(process, LONG)
        assert process.stdout is not None and process.stderr is not None
        process.send_signal(signal.SIGTERM)
        assert any("taking no more" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        *_, last = lines(process.stdout.read())
        assert process.wait(60) == 0
    assert last["done"] in {"cancelled", "length"}


def ask(process: subprocess.Popen[str], *requests: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write("".join(json.dumps(request) + "\n" for request in requests))
    process.stdin.flush()


def test_its_cache_answers_on_a_socket(published: list[str], shell: Commands, tmp_path: Path) -> None:
    path = tmp_path / "run/s"
    with worker([*published, "--socket", str(path), "--metrics-port", "0"]) as process:
        begin(process, {**LONG, "ref": "acme/finance"})
        told = shell.json("cache", "status", "--socket", path)
        (row,) = told["adapters"]
        assert (row["tenant"], row["adapters"], row["tier"]) == ("acme", ["finance"], "resident")
        assert shell.run("cache", "drain", "--socket", path).exit_code == 0
        ask(process, {**ASK, "ref": "acme/finance"})
        answers = []
        assert process.stdout is not None and process.stderr is not None
        while not any(answer["id"] == "a" for answer in answers):
            answers += lines(process.stdout.readline())
        assert answers[-1]["error"]["code"] == "CACHE_DRAINING"
        process.stdin.close()  # type: ignore[union-attr]
        answers += lines(process.stdout.read())
        assert process.wait(60) == 0 and answers[-1]["done"] == "length"
        said = process.stderr.read()
        assert f"the cache's socket is {path}" in said and "metrics are at http://127.0.0.1:" in said
        process.stdin = None
    assert not path.exists()


def children(process: subprocess.Popen[str]) -> list[int]:
    """Of all its threads: a child belongs to the one that started it."""
    found = []
    for folder in Path(f"/proc/{process.pid}/task").iterdir():
        found += [int(child) for child in (folder / "children").read_text().split()]
    return found


def test_a_loader_that_is_killed_holds_up_only_what_has_to_be_loaded(published: list[str], tmp_path: Path) -> None:
    """Resident adapters serve on; what was asked for before and after the kill comes from the next loader."""
    with worker([*published, "--loader", "process", "--json"]) as process:
        begin(process, {**LONG, "ref": "acme/finance"})
        (first,) = children(process)
        ask(process, {**ASK, "id": "before", "ref": "acme/narrow"})
        os.kill(first, signal.SIGKILL)
        ask(process, {**ASK, "id": "here", "ref": "acme/finance"}, {**ASK, "id": "after", "ref": "acme/wide"})
        out, told = process.communicate()
    assert process.returncode == 0, told
    written, brace, summary = out.partition("{\n")
    answers = lines(written)
    assert [a["index"] for a in answers if a["id"] == "long" and "token" in a] == list(range(1, 500))
    last = {a["id"]: a for a in answers if "token" not in a}
    assert {name: a["done"] for name, a in last.items()} == dict.fromkeys(("long", "before", "here", "after"), "length")
    applied = {name: a["applied"][0]["version_digest"] for name, a in last.items()}
    assert applied["long"] == applied["here"] and len(set(applied.values())) == 3
    assert json.loads(brace + summary)["adapters"]["leaked"] == 0
    assert "the connection to the loader ended" in told and "Traceback" not in told


def test_the_loader_process_it_starts_has_the_store_that_the_options_say(published: list[str], tmp_path: Path) -> None:
    store, key, run = tmp_path / "store", tmp_path / "store.key", tmp_path / "run"
    options = ["--loader", "process", "--loader-socket", run / "loader.sock", "--store", store, "--store-key", key]
    with worker([*published, *map(str, options), "--store-bytes", "64MiB"]) as process:
        begin(process, {**LONG, "ref": "acme/finance"})
        assert (run / "loader.sock").is_socket()
        _, told = process.communicate()
    assert process.returncode == 0, told
    assert len(list(store.glob("*/manifest.json"))) == 1  # is kept under the key only
    assert key.is_file()


def test_a_reader_that_goes_away_ends_it(published: list[str]) -> None:
    with worker(published) as process:
        begin(process, LONG)
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == 1
        assert "Traceback" not in process.stderr.read()
        process.stdout = None


def test_what_keeps_it_from_starting_is_said(shell: Commands, tmp_path: Path, published: list[str]) -> None:
    trust = published[-2:]
    for status, code, options in (
        (3, "TRUST_NOT_CONFIGURED", ["--model", "tiny"]),
        (4, "UNAUTHENTICATED", ["--model", "tiny", *trust]),
        (4, "UNAUTHENTICATED", ["--model", "tiny", "--source", "http://127.0.0.1:1", *trust]),
        (5, "PATH_NOT_FOUND", ["--model", "tiny", "--source", tmp_path / "nowhere", *trust]),
        (5, "PATH_NOT_FOUND", ["--model", tmp_path, *published[2:]]),
        (2, "REQUEST_INVALID", ["--model", "tiny", "--vram", "lots"]),
        (2, "REQUEST_INVALID", []),
        (1, "SETTINGS_INVALID", [*published, "--vram", "1KiB"]),
        (1, "SETTINGS_INVALID", [*published, "--metrics-port", "0"]),
        (1, "SETTINGS_INVALID", [*published, "--loader-socket", tmp_path / "s"]),
        (1, "SETTINGS_INVALID", [*published, "--store-bytes", "0"]),
        (2, "REQUEST_INVALID", [*published, "--store-bytes", "lots"]),
        (1, "SETTINGS_INVALID", [*published, "--socket", tmp_path / ("s" * 200)]),
        (1, "BASE_TABLE_INVALID", [*published, "--base", wrong_table(tmp_path)]),
    ):
        result = shell.run("worker", *options)
        assert (result.exit_code, result.stderr.split()[1]) == (status, code), options
        assert "Traceback" not in result.output


def wrong_table(folder: Path) -> Path:
    from fakes.packages import tiny_llama_spec

    tiny_llama_spec().save(folder / "table.json")
    return folder / "table.json"


def test_a_model_directory_is_served_and_pickles_are_not_opened(shell: Commands, tmp_path: Path) -> None:
    import torch

    model = tiny_model()
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    loaded = load_model(str(tmp_path / "model"), "cpu")
    assert loaded.text is None and loaded.stop == frozenset({2})
    for (name, one), (_, other) in zip(model.named_parameters(), loaded.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    (tmp_path / "model/model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "model/pytorch_model.bin")
    with pytest.raises(AdapterdError) as caught:
        load_model(str(tmp_path / "model"), "cpu")
    assert caught.value.code is Code.SETTINGS_INVALID


def test_sizes_as_people_write_them() -> None:
    assert [parse_size(t, "--vram") for t in ("8GiB", "64 MiB", "512KiB", "100", "3B", "1TiB")] == [
        8 << 30, 64 << 20, 512 << 10, 100, 3, 1 << 40
    ]  # fmt: skip
