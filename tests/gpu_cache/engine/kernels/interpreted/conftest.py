"""These run in Triton's interpreter, in a process of their own: see `../test_in_the_interpreter.py`.

Triton decides at import whether it compiles or interprets, so the two cannot be had in one process.
"""

from __future__ import annotations

import os
from pathlib import Path


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path.suffix == ".py" and os.environ.get("TRITON_INTERPRET") != "1" else None
