"""adapterctl as a user runs it, in this process, with a home of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from adapterd.cli.main import app

VARIABLES = (
    "ADAPTERD_URL", "ADAPTERD_TOKEN", "ADAPTERD_TRUST", "ADAPTERD_DEBUG", "ADAPTERD_DATA_DIR",
    "ADAPTERD_DATABASE_URL", "ADAPTERD_HOST", "ADAPTERD_PORT", "COLUMNS",
)  # fmt: skip


INTERRUPTIBLE = ("env", "--default-signal=INT")
"""In front of a command that a test interrupts: a shell's background jobs, and what they start, ignore SIGINT."""


@dataclass(frozen=True)
class Commands:
    """A shell: nothing of the real user's configuration reaches it.

    Attributes:
        home: where configuration and state go.
        variables: more environment.
    """

    home: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str | None]:
        own = {
            "HOME": str(self.home),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            "XDG_STATE_HOME": str(self.home / "state"),
        }
        return {**dict.fromkeys(VARIABLES), **own, **self.variables}

    def with_variables(self, **variables: str) -> Commands:
        """The same shell with more environment."""
        return replace(self, variables={**self.variables, **variables})

    def run(self, *words: object, stdin: str | None = None) -> Result:
        """Run one command. Our own code must not let anything escape but an exit status."""
        return CliRunner(env=self.environment).invoke(app, [str(w) for w in words], input=stdin, catch_exceptions=False)

    def json(self, *words: object, status: int = 0) -> dict[str, Any]:
        """The one object that `--json` prints; the command must end with `status`."""
        result = self.run(*words, "--json")
        assert result.exit_code == status, result.output
        body = json.loads(result.stdout)
        assert isinstance(body, dict)
        assert body["schema"].startswith("adapterctl.")
        assert body["ok"] is (status == 0)
        return body

    def codes(self, *words: object, status: int) -> list[str]:
        """The codes of a command that must fail with `status`."""
        return [p["code"] for p in self.json(*words, status=status)["problems"]]
