"""How other threads and signal handlers reach the loop, and the loop's own run."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue

from adapterd.cli.worker.loop import ServingLoop
from adapterd.cli.worker.tally import Progress

LOADING_SECONDS = 0.001
"""How often the loop looks at adapters on their way while it has nothing to run."""

Command = Callable[[ServingLoop], None]


class Inbox:
    """Commands for the loop, run between its steps and on its thread, in the order in which they came."""

    def __init__(self) -> None:
        self._commands: SimpleQueue[Command] = SimpleQueue()

    def put(self, command: Command) -> None:
        """From any thread, and from a signal handler: SimpleQueue may be entered again while it is in use."""
        self._commands.put(command)

    def flush(self, loop: ServingLoop) -> None:
        """Runs what came too late, so that it gets its answer."""
        self._run_commands(loop, Progress.RAN)

    def serve(self, loop: ServingLoop) -> None:
        """Runs the loop until it is drained. What a command or a sink raises ends it; the caller closes the loop."""
        progress = Progress.IDLE
        while not loop.drained:
            self._run_commands(loop, progress)
            if not loop.drained:
                progress = loop.step()

    def _run_commands(self, loop: ServingLoop, progress: Progress) -> None:
        """All that are there; the first one is waited for if the loop has nothing else to do."""
        wait = {Progress.RAN: 0.0, Progress.WAITING: LOADING_SECONDS, Progress.IDLE: None}[progress]
        try:
            self._commands.get(block=wait != 0.0, timeout=wait or None)(loop)
            while True:
                self._commands.get_nowait()(loop)
        except Empty:
            return
