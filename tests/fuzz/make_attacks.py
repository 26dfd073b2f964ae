"""Write the attack files: `PYTHONPATH=tests python -m fuzz.make_attacks`.

Each is a finding of a fuzz run, or of a review, cut down to what matters and named after the defect; the outcome it
must have since then stands beside it. Inputs have the form of their target (`fuzz.header`, `fuzz.trust`).
"""

from __future__ import annotations

from pathlib import Path

from fuzz.config import seeds as config_seeds
from fuzz.header import TEXT

FOLDER = Path(__file__).parent / "attacks"


def _text(header: bytes, size: int) -> bytes:
    return TEXT + size.to_bytes(2, "little") + header


def attacks() -> dict[str, dict[str, tuple[bytes, str]]]:
    """Target → name → (input, outcome)."""
    return {
        "header": {
            # Python's JSON reads -0 as an integer, the library's as a fraction: accepted here, refused there.
            "minus_zero_offset": (
                _text(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}', 1),
                "ST_OFFSET_RANGE",
            ),
            "minus_zero_dimension": (
                _text(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}', 0),
                "ST_BAD_SHAPE",
            ),
        },
        "config": {
            "minus_zero_rank": (config_seeds()["small"].replace(b'"r": 4', b'"r": -0'), "CONFIG_BAD_TYPE"),
        },
    }


def main() -> None:
    for target, found in attacks().items():
        (FOLDER / target).mkdir(parents=True, exist_ok=True)
        for name, (data, _) in found.items():
            (FOLDER / target / name).write_bytes(data)


if __name__ == "__main__":
    main()
