"""From the environment to a client: the one place that puts address and token together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapterd.cli.credentials import load_token
from adapterd.cli.environment import server_url, trust_path

if TYPE_CHECKING:
    from pathlib import Path

    from adapterd.cli.client import RegistryClient
    from adapterd.loader.sources import RegistrySource
    from adapterd.loader.trust.policy import TrustStore


def connect() -> RegistryClient:
    """A client of ADAPTERD_URL with the caller's token. Raises Failed (SETTINGS_INVALID)."""
    from adapterd.cli.client import RegistryClient

    return RegistryClient(server_url(), load_token())


def open_source(url: str | None = None) -> RegistrySource:
    """The loader's own view of the server at `url`, or of ADAPTERD_URL.

    Raises:
        Failed: SETTINGS_INVALID. Unauthenticated.
    """
    from adapterd.cli.transport import TOKEN_HINT
    from adapterd.loader.errors import Code, error
    from adapterd.loader.sources import RegistrySource

    token = load_token()
    if token is None:
        raise error(Code.UNAUTHENTICATED, "token", "there is no token", TOKEN_HINT)
    return RegistrySource(url or server_url(), token)


def load_trust(path: Path | None = None) -> TrustStore:
    """The trust file at `path`, or the user's own; without it nothing is trusted (I8).

    Raises:
        Untrusted: TRUST_NOT_CONFIGURED, TRUST_FILE_INVALID.
    """
    from adapterd.loader.trust.policy import TrustStore

    return TrustStore.load(path or trust_path())
