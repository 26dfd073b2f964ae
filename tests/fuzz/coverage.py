"""One target under atheris (libFuzzer): mutations guided by the coverage of our own code.

    python -m fuzz.coverage --target header --runs 1000 --seed 1 --out report.json

A process of its own, because libFuzzer takes over the process and ends it. https://github.com/google/atheris
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

MAX_BYTES = 4096


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()

    import atheris

    with atheris.instrument_imports(include=["adapterd.loader.formats", "adapterd.loader.trust"]):
        import adapterd.loader.formats.peft_config
        import adapterd.loader.formats.safetensors_header
        import adapterd.loader.trust.admission
        import adapterd.loader.trust.oms  # noqa: F401
    from fuzz.engine import Watch, folder
    from fuzz.target import target

    chosen = target(asked.target)
    watch = Watch(chosen, asked.seed, "coverage")

    def test_one_input(data: bytes) -> None:
        going = watch.one(data)
        if not going or watch.report.runs >= asked.runs:
            asked.out.write_text(watch.report.as_text())
            os._exit(0)  # libFuzzer's own end runs no Python any more

    with tempfile.TemporaryDirectory(prefix="adapterd-fuzz-") as scratch:
        words = Path(scratch, "words")
        words.write_text("".join(f'"{_escaped(w)}"\n' for w in chosen.words or (b"{",)))
        found = Path(scratch, "found")
        found.mkdir()
        arguments = [
            f"-seed={asked.seed or 1}",
            f"-max_len={MAX_BYTES}",
            f"-dict={words}",
            "-timeout=60",
            "-verbosity=0",
        ]
        atheris.Setup([sys.argv[0], *arguments, str(found), str(folder(chosen.name))], test_one_input)
        atheris.Fuzz()


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    main()
