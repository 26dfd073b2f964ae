"""What the rows of steps read: every page of every row, compared when the kernel executes, not when it is queued.

Pages hold tags (`fakes.adapters`) of which each names one page of one version. So a wrong page can be told:

* `stale`: another version of the same adapter;
* `displaced`: another page of the same version;
* `foreign`: another adapter of the tenant;
* `leaked`: another tenant's adapter;
* `mixed`: words of several pages;
* `empty`: zeros; `unknown`: words that nobody has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from adapterd.gpu_cache import Lease, Resident
from fakes.adapters import PAGE_BYTES, Published, tag

WORDS = PAGE_BYTES // 8


@dataclass
class Rows:
    """Launches kernels and keeps what they found wrong.

    Args:
        published: all versions there are.
        arena: what kernels read.
        launch: enqueues a kernel in the compute stream.
    """

    published: list[Published]
    arena: torch.Tensor
    launch: Callable[[Callable[[], object]], None]
    wrong: list[str] = field(default_factory=list)
    read: int = 0
    """Rows that were compared."""

    def of(self, leases: Iterable[Lease | None]) -> list[tuple[Resident, ...]]:
        """What each row reads; nothing for base rows. Taken while the leases are ready."""
        return [() if lease is None else tuple(r for r, _ in lease.composition) for lease in leases]

    def run(self, rows: list[tuple[Resident, ...]]) -> None:
        """Enqueues one kernel that reads all pages of all rows."""
        self.launch(lambda: self._compare(rows))

    def _compare(self, rows: list[tuple[Resident, ...]]) -> None:
        words = self.arena.view(torch.int64).view(-1, WORDS)
        for number, residents in enumerate(rows):
            self.read += 1
            for resident in residents:
                for index, page in enumerate(resident.pages):
                    wanted = tag(resident.key.digest, index)
                    if not bool((words[page] == wanted).all()):
                        found = words[page].tolist()
                        self.wrong.append(f"row {number}, arena page {page}: {self.explain(resident, index, found)}")

    def explain(self, resident: Resident, index: int, words: list[int]) -> str:
        """What is wrong with page `index` of `resident`, which holds `words`."""
        owners = {tag(v.digest, p): (v, p) for v in self.published for p in range(v.pages)}
        wanted = owners[tag(resident.key.digest, index)]
        found = sorted({self._name(owners.get(word), word) for word in words})
        kind = "mixed" if len(found) > 1 else _kind(wanted, owners.get(words[0]), words[0])
        return f"{kind}: {', '.join(found)} instead of {self._name(wanted, 0)}"

    def _name(self, owner: tuple[Published, int] | None, word: int) -> str:
        if owner is None:
            return "zeros" if word == 0 else f"{word & (1 << 64) - 1:016x}"
        version, page = owner
        resolved = version.resolved
        return f"{resolved.tenant}/{resolved.adapter} version {resolved.version_number} page {page}"


def _kind(wanted: tuple[Published, int], found: tuple[Published, int] | None, word: int) -> str:
    if found is None:
        return "empty" if word == 0 else "unknown"
    ours, theirs = wanted[0].resolved, found[0].resolved
    if ours.tenant != theirs.tenant:
        return "leaked"
    if ours.adapter != theirs.adapter:
        return "foreign"
    return "displaced" if ours.version_digest == theirs.version_digest else "stale"
