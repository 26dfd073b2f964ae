"""The console script, and `python -m adapterd.cli`: Ctrl-C while Python still imports is no traceback either."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; see `adapterd.cli.main.main`."""
    try:
        from adapterd.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
