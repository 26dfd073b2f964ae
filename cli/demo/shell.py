"""Runs `adapterctl` commands as a person would, in this process, and reads their JSON."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterd.loader.errors import AdapterdError, Code, Problem, error_from, reject


@dataclass(frozen=True, slots=True)
class Shell:
    """One user at a shell: a server's address, a token, a home of their own; `data_dir` for who runs the server."""

    url: str
    token: str
    home: Path
    data_dir: Path | None = None

    def run(self, *words: str | Path) -> dict[str, Any]:
        """The JSON object of `adapterctl WORDS --json`. Raises the error that the command reported."""
        from adapterd.cli.main import app

        output, diagnosis = io.StringIO(), io.StringIO()
        with _environment(self._variables()), redirect_stdout(output), redirect_stderr(diagnosis):
            status = app([*(str(w) for w in words), "--json"], standalone_mode=False)
        answer = _parsed(output.getvalue())
        if status:
            raise _failure(words, answer, diagnosis.getvalue())
        return answer

    def _variables(self) -> Mapping[str, str]:
        own = {"ADAPTERD_DATA_DIR": str(self.data_dir)} if self.data_dir else {}
        return {
            **own,
            "ADAPTERD_URL": self.url,
            "ADAPTERD_TOKEN": self.token,
            "ADAPTERD_TRUST": str(self.home / "trust.json"),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            "XDG_STATE_HOME": str(self.home / "state"),
        }


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """`os.environ` with `variables`, put back afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _parsed(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text) if text.strip() else {}
    return found


def _failure(words: tuple[str | Path, ...], answer: Mapping[str, Any], diagnosis: str) -> AdapterdError:
    problems = [Problem.from_json(p) for p in answer.get("problems", [])]
    if not any(p.severity == "reject" for p in problems):
        command = " ".join(str(w) for w in words[:2])
        problems.append(reject(Code.INTERNAL, f"adapterctl {command}", diagnosis.strip() or "failed without a word"))
    return error_from(problems)
