"""How other threads and signal handlers reach the loop, and the loop's own run."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Semaphore

from adapterd.cli.worker.loop import ServingLoop
from adapterd.cli.worker.tally import Progress

LOADING_SECONDS = 0.001
"""How often the loop looks at adapters on their way while it has nothing to run."""
MAX_LINES = 1024
"""Lines of a client that were read and are not looked at yet; then it has to wait."""

Command = Callable[[ServingLoop], None]


class Inbox:
    """Commands for the loop, run between its steps and on its thread, in the order in which they came."""

    def __init__(self) -> None:
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._room, self._over = Semaphore(MAX_LINES), False

    def put(self, command: Command) -> None:
        """From any thread, and from a signal handler: SimpleQueue may be entered again while it is in use."""
        self._commands.put(command)

    def put_line(self, command: Command) -> None:
        """From the thread that reads a client's lines: waits while too many are not done yet. So whoever writes faster
        than the loop goes, or does not read its answers, fills no memory."""
        if not self._over:
            self._room.acquire()

        def done(loop: ServingLoop) -> None:
            self._room.release()
            command(loop)

        self.put(done)

    def flush(self, loop: ServingLoop) -> None:
        """Runs what came too late, so that it gets its answer."""
        self._run_commands(loop, Progress.RAN)

    def serve(self, loop: ServingLoop) -> None:
        """Runs the loop until it is drained. What a command or a sink raises ends it; the caller closes the loop."""
        progress = Progress.IDLE
        try:
            while not loop.drained:
                self._run_commands(loop, progress)
                if not loop.drained:
                    progress = loop.step()
        finally:
            self._over = True
            self._room.release()

    def _run_commands(self, loop: ServingLoop, progress: Progress) -> None:
        """All that are there, but none that come meanwhile: a flood of them must not keep steps from running. The
        first one is waited for if the loop has nothing else to do."""
        wait = {Progress.RAN: 0.0, Progress.WAITING: LOADING_SECONDS, Progress.IDLE: None}[progress]
        try:
            self._commands.get(block=wait != 0.0, timeout=wait or None)(loop)
            for _ in range(self._commands.qsize()):
                self._commands.get_nowait()(loop)
        except Empty:
            return
