"""Where adapterctl finds its server, its trust file and its own few files."""

from __future__ import annotations

import os
from pathlib import Path

URL_VARIABLE = "ADAPTERD_URL"
TRUST_VARIABLE = "ADAPTERD_TRUST"


def config_dir() -> Path:
    """`$XDG_CONFIG_HOME/adapterd`, by default `~/.config/adapterd`."""
    return _xdg("XDG_CONFIG_HOME", ".config")


def state_dir() -> Path:
    """`$XDG_STATE_HOME/adapterd`, by default `~/.local/state/adapterd`: what an interrupted upload needs."""
    return _xdg("XDG_STATE_HOME", ".local/state")


def _xdg(variable: str, default: str) -> Path:
    """Raises Failed (SETTINGS_INVALID) where nothing says where that is."""
    given = os.environ.get(variable, "")
    if given:
        return Path(given) / "adapterd"
    try:
        return Path.home() / default / "adapterd"
    except RuntimeError as fault:  # in a container, say, under a user that it does not know
        from adapterd.loader.errors import Code, error

        raise error(
            Code.SETTINGS_INVALID, "HOME", "this user has no home directory", f"Set HOME, or {variable}."
        ) from fault


def trust_path() -> Path:
    """ADAPTERD_TRUST, else `trust.json` in the configuration folder."""
    given = os.environ.get(TRUST_VARIABLE, "")
    return Path(given) if given else config_dir() / "trust.json"


def server_url() -> str:
    """ADAPTERD_URL without a slash at its end.

    Raises:
        Failed: SETTINGS_INVALID if it is not set: nothing is sent to a server that nobody named.
    """
    from adapterd.loader.errors import Code, error

    url = os.environ.get(URL_VARIABLE, "").rstrip("/")
    if url:
        return url
    raise error(
        Code.SETTINGS_INVALID,
        URL_VARIABLE,
        "no server is named",
        f"export {URL_VARIABLE}=http://127.0.0.1:8347 (or yours).",
    )


def has_server() -> bool:
    """Whether a server is named at all."""
    return bool(os.environ.get(URL_VARIABLE))
