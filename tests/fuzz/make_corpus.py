"""Write the seeds that fuzzing starts from: `PYTHONPATH=tests python -m fuzz.make_corpus`.

They are stored, so that a run of yesterday can be repeated; a test compares them with this script.
"""

from __future__ import annotations

from fuzz import config, header, package, trust
from fuzz.engine import folder


def seeds() -> dict[str, dict[str, bytes]]:
    """Target → name → bytes."""
    return {
        "header": header.seeds(), "config": config.seeds(), "package": package.seeds(),
        "oms": trust.seeds("oms"), "admission": trust.seeds("admission"),
    }  # fmt: skip


def main() -> None:
    for target, files in seeds().items():
        folder(target).mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder(target) / name).write_bytes(data)


if __name__ == "__main__":
    main()
