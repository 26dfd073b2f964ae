"""The merged model's folder appears whole, under its name, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from adapterd.loader.errors import AdapterdError, Code, error
from adapterd.loader.merge.shards import NewModel, Progress, must_fit, sync, write_model
from adapterd.loader.parts import naming
from adapterd.loader.scratch import scratch_folder


def new_folder(model: NewModel, target: Path, base: Path, progress: Progress) -> None:
    """Write `model` beside `target`, under a name that says that it is temporary, and rename it at the end.

    A folder that a killed process left there is removed by the next merge into the same parent.

    Args:
        base: the base's folder, into which nothing is written.

    Raises:
        Conflict: ALREADY_EXISTS.
        Failed: REQUEST_INVALID for a target inside the base.
        Unavailable: STORAGE_FULL where the disk has too little room to begin with.
        OSError: the disk, while it is written; about `target`, if it is about no other file.
    """
    must_be_free(target, base)
    parent = _real(target.absolute().parent)
    parent.mkdir(parents=True, exist_ok=True)
    must_fit(model.total_bytes, parent)
    with naming(target):
        with scratch_folder("merge", parent) as scratch:
            made = scratch / "model"
            made.mkdir()
            write_model(model, made, progress)
            must_be_free(target, base)
            put(made, parent / target.name, target)
        sync(parent)


def must_be_free(target: Path, base: Path) -> None:
    """Raises Conflict (ALREADY_EXISTS), Failed (REQUEST_INVALID)."""
    if target.exists() or target.is_symlink():
        raise _taken(target)
    if _real(target.absolute().parent).is_relative_to(_real(base)):
        raise error(Code.REQUEST_INVALID, str(target), "lies inside the base", "Name a place outside of it.")


def _real(path: Path) -> Path:
    """Without links and `..`: to make `base/new/../..` would make `base/new`. Links in a ring stay as they are."""
    return Path(os.path.realpath(path))


def put(made: Path, place: Path, target: Path) -> None:
    """Rename `made` to `place`, which the user calls `target`. Of two merges to one place, one is refused here.

    Raises:
        Conflict: ALREADY_EXISTS. OSError.
    """
    try:
        made.rename(place)
    except OSError as fault:
        if fault.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise _taken(target) from None


def _taken(target: Path) -> AdapterdError:
    return error(Code.ALREADY_EXISTS, str(target), "exists already", "Move it away, or name another with --out.")
