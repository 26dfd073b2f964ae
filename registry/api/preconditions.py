"""If-Match: what a caller has seen must still be so (RFC 9110 §13.1.1)."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header

from adapterd.loader.errors import Code, error

IfMatch = Annotated[str | None, Header(alias="If-Match", max_length=256)]


def strong_tag(header: str) -> str:
    """What one strong ETag holds. Raises Failed (REQUEST_INVALID) for anything else."""
    if len(header) > 2 and header[0] == header[-1] == '"' and '"' not in header[1:-1]:
        return header[1:-1]
    raise error(
        Code.REQUEST_INVALID, "If-Match", "this precondition is not understood",
        'Send If-Match: "<tag>" as a GET shows it in ETag.',
    )  # fmt: skip
