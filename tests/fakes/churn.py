"""Churn on a real device: leases come and go beyond capacity, and every row checks what it reads, on the device.

Every page of an adapter holds one tag (`adapters.tag`). A row reads one word of one page of its own adapter and
compares it with that tag; nothing is waited for, so a page that is overwritten too early, or read too early, is
read wrong. Kernels start late now and then, to make room for such mistakes; `delayed_cuda` does it to copies.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from adapterd.gpu_cache import AdapterCache, Lease

from .adapters import PAGE_BYTES, Published, tag

WORDS = PAGE_BYTES // 8
RING = 4
"""Steps that the host may be ahead of the device."""


@dataclass
class Outcome:
    """What a churn saw. `loads`: leases that became ready."""

    rows: int = 0
    wrong: int = 0
    loads: int = 0
    steps: int = 0


@dataclass(eq=False)
class _Active:
    lease: Lease
    pages: np.ndarray
    tags: np.ndarray
    steps_left: int


@dataclass
class _Upload:
    """[2, rows]: where each row reads, and what it must find; pinned, and its copy on the device."""

    host: torch.Tensor
    device: torch.Tensor
    used: torch.cuda.Event | None = None


@dataclass
class Churn:
    """A serving loop over `versions`.

    Attributes:
        rows: of a step, shared out among its leases.
        active, ahead: how many leases a step has at most, and how many are on their way.
        cycles: how long a kernel is late at most; 0 on a CPU.
    """

    cache: AdapterCache
    versions: Sequence[Published]
    rows: int = 512
    active: int = 12
    ahead: int = 12
    seed: int = 0
    cycles: int = 0
    _uploads: list[_Upload] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng, self._numbers = random.Random(self.seed), np.random.default_rng(self.seed)
        self._cuda = self.cache.arena.is_cuda
        self._words = self.cache.arena.view(torch.int64)
        self._wrong = torch.zeros((), dtype=torch.int64, device=self._words.device)
        for _ in range(RING):
            host = torch.zeros(2, self.rows, dtype=torch.int64, pin_memory=self._cuda)
            self._uploads.append(_Upload(host, torch.zeros_like(host, device=self._words.device)))
        self._coming: deque[tuple[Published, Lease]] = deque()
        self._running: list[_Active] = []
        self._tags = {
            v.digest: np.array([tag(v.digest, page) for page in range(v.pages)], np.int64) for v in self.versions
        }

    def run(self, rows: int) -> Outcome:
        """Until that many rows are checked, and everything is let go."""
        outcome = Outcome()
        while outcome.rows < rows:
            outcome.loads += self._admit()
            if not self._running:
                self.cache.pump()
                continue
            self._step(self._uploads[outcome.steps % RING])
            outcome.rows += self.rows
            outcome.steps += 1
        for lease in (*(lease for _, lease in self._coming), *(each.lease for each in self._running)):
            lease.release()
        outcome.wrong = int(self._wrong.item())
        return outcome

    def _admit(self) -> int:
        """Asks for what is missing and takes what is ready, in whatever order it comes."""
        while len(self._coming) < self.ahead:
            version = self._rng.choice(self.versions)
            self._coming.append((version, self.cache.acquire(version.pinned, tenant=version.resolved.tenant)))
        taken = [pair for pair in self._coming if pair[1].ready][: self.active - len(self._running)]
        for version, lease in taken:
            self._coming.remove((version, lease))
            ((resident, _),) = lease.composition
            pages = np.array(resident.pages, np.int64)
            self._running.append(_Active(lease, pages, self._tags[version.digest], self._rng.randrange(1, 4)))
        assert not any(lease.failed for _, lease in self._coming), "a load failed"
        return len(taken)

    def _step(self, upload: _Upload) -> None:
        if upload.used is not None:
            upload.used.synchronize()
        self._plan(upload.host.numpy())
        with self.cache.begin_step([each.lease for each in self._running]):
            upload.device.copy_(upload.host, non_blocking=True)
            if self.cycles and self._rng.random() < 0.3:
                torch.cuda._sleep(self._rng.randrange(self.cycles))
            self._wrong += (self._words[upload.device[0]] != upload.device[1]).sum()
            if self._cuda:
                upload.used = torch.cuda.Event()
                upload.used.record()
        self._retire()

    def _plan(self, out: np.ndarray) -> None:
        """Each row reads a word of a page of one lease's adapter."""
        owners = self._numbers.integers(len(self._running), size=self.rows)
        for index, each in enumerate(self._running):
            mine = np.flatnonzero(owners == index)
            chosen = self._numbers.integers(len(each.pages), size=len(mine))
            out[0, mine] = each.pages[chosen] * WORDS + self._numbers.integers(WORDS, size=len(mine))
            out[1, mine] = each.tags[chosen]

    def _retire(self) -> None:
        """The lease is let go while the step's kernels may still wait to start."""
        kept = []
        for each in self._running:
            each.steps_left -= 1
            if each.steps_left:
                kept.append(each)
            else:
                each.lease.release()
        self._running = kept
