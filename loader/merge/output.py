"""The merged model's folder appears whole, under its name, or not at all."""

from __future__ import annotations

from pathlib import Path

from adapterd.loader.errors import Code, error
from adapterd.loader.merge.shards import NewModel, Progress, must_fit, sync, write_model
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
        OSError: the disk, while it is written.
    """
    must_be_free(target, base)
    parent = target.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    must_fit(model.total_bytes, parent)
    with scratch_folder("merge", parent) as scratch:
        made = scratch / "model"
        made.mkdir()
        write_model(model, made, progress)
        must_be_free(target, base)
        made.rename(target)
    sync(parent)


def must_be_free(target: Path, base: Path) -> None:
    """Raises Conflict (ALREADY_EXISTS), Failed (REQUEST_INVALID)."""
    if target.exists() or target.is_symlink():
        raise error(Code.ALREADY_EXISTS, str(target), "exists already", "Move it away, or name another with --out.")
    if target.absolute().parent.resolve().is_relative_to(base.resolve()):
        raise error(Code.REQUEST_INVALID, str(target), "lies inside the base", "Name a place outside of it.")
