"""The caller's token: from the environment or from a file that only its owner can read, never an argument.

An argument stands in the process list and in the shell's history.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from adapterd.cli.environment import config_dir

TOKEN_VARIABLE = "ADAPTERD_TOKEN"  # noqa: S105 - the name of a variable
OTHERS = stat.S_IRWXG | stat.S_IRWXO
MAX_TOKEN_BYTES = 4096


def token_path() -> Path:
    """The file that `adapterctl token save` writes."""
    return config_dir() / "token"


def load_token() -> str | None:
    """The token, or None if there is none.

    Raises:
        Failed: SETTINGS_INVALID for a file that others may read, or for what is no token.
    """
    given = os.environ.get(TOKEN_VARIABLE, "").strip()
    return checked_token(os.fsencode(given), TOKEN_VARIABLE) if given else _from_file(token_path())


def _from_file(path: Path) -> str | None:
    from adapterd.loader.errors import Code, error
    from adapterd.loader.regular_file import NotRegular, open_regular

    try:
        opened = open_regular(path, os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except NotRegular as fault:
        raise error(Code.SETTINGS_INVALID, str(path), "is no regular file") from fault
    with opened as file:
        if os.fstat(file.fileno()).st_mode & OTHERS:
            raise error(Code.SETTINGS_INVALID, str(path), "others may read the token", f"chmod 600 {path}")
        text = file.read(MAX_TOKEN_BYTES + 1)
    return checked_token(text, str(path))


def checked_token(text: bytes, where: str) -> str:
    """`text` as a token: one printable word. Raises Failed (SETTINGS_INVALID), without repeating it.

    Args:
        text: all of it, or more than `MAX_TOKEN_BYTES` of it.
    """
    from adapterd.loader.errors import Code, error

    if len(text) > MAX_TOKEN_BYTES:
        raise error(
            Code.SETTINGS_INVALID, where, f"holds more than {MAX_TOKEN_BYTES} bytes, which is no token",
            "Store one with `adapterctl token save`.",
        )  # fmt: skip
    token = text.strip()
    if token and all(0x21 <= byte <= 0x7E for byte in token):
        return token.decode("ascii")
    raise error(Code.SETTINGS_INVALID, where, "holds no token", "Store one with `adapterctl token save`.")


def save_token(token: str) -> Path:
    """Write the file, 0600 from its first moment, and put it in place at once."""
    path = token_path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(path, token.encode() + b"\n", replace=True)
    return path


def write_private(path: Path, data: bytes, *, replace: bool = False, mode: int = 0o600) -> None:
    """`data` at `path`, complete or not at all, with `mode` from the start.

    Raises:
        FileExistsError: something is there and `replace` is off.
        OSError: about `path`, whatever name it was on its way under.
        NotFound: as `named`.
    """
    from adapterd.loader.parts import write_whole

    write_whole(named(path), data, replace=replace, mode=mode)


def write_together(*files: tuple[Path, bytes, int]) -> None:
    """New files with their modes: all of them, or none. Raises as `write_private`."""
    begun: list[Path] = []
    try:
        for path, data, mode in files:
            begun.append(path)
            write_private(path, data, mode=mode)
    except FileExistsError:
        begun.pop()  # somebody else's
        _remove(begun)
        raise
    except BaseException:
        _remove(begun)
        raise


def _remove(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def named(path: Path) -> Path:
    """`path`, if it names something in a folder. Raises NotFound (PATH_NOT_FOUND) for "", ".", ".." and "/"."""
    from adapterd.loader.errors import Code, error

    if path.name not in {"", ".."}:
        return path
    raise error(Code.PATH_NOT_FOUND, str(path), "names no file", "Name a file or folder to make.")
