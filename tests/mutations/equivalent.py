"""Mutants that change nothing that anybody could notice, each with its reason. `test_sites` asserts that they exist.

A line is named by its file, its function and its text, not by its number: it stays excluded when it moves,
and comes back when it changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from mutations.sites import Mutant


@dataclass(frozen=True, slots=True)
class Equivalent:
    """Mutants of `function` in `path` by `operator` (`*`: any) whose text before is `before`."""

    path: str
    function: str
    operator: str
    before: str
    reason: str

    def covers(self, mutant: Mutant) -> bool:
        return (
            (mutant.path, mutant.function) == (self.path, self.function)
            and self.operator in {"*", mutant.operator}
            and " ".join(mutant.before.split()) == self.before
        )


EQUIVALENT: tuple[Equivalent, ...] = (
    Equivalent(
        "gpu_cache/cache.py",
        "AdapterCache.end_step",
        "true",
        "entry.dead",
        "only spares a call of Shelf.tidy, which looks at everything itself",
    ),
    Equivalent(
        "gpu_cache/revocation.py",
        "_place",
        "without part 4",
        'revocation.digest or revocation.adapter or revocation.key_id or ""',
        "a revocation names one of the three; the last part is for the type only",
    ),
    Equivalent(
        "gpu_cache/revocation.py",
        "Scrubber.issue",
        "drop",
        "entry.copied = False",
        "what was queued once is never queued again, so it is dead and keeps its pages either way",
    ),
    Equivalent(
        "gpu_cache/arrivals.py",
        "Arrivals.bring",
        "drop record.images",
        "record.fetch, record.images = None, {}",
        "who looks at them next lets go of them: there is no request any more that they belong to",
    ),
    Equivalent(
        "gpu_cache/arrivals.py",
        "Arrivals.bring",
        "without part 1",
        "ask is not None and here",
        "images come with a request, so the second part says it all; the first is for the type",
    ),
    Equivalent(
        "gpu_cache/arrivals.py",
        "Arrivals.cancel",
        "drop",
        "entry.delivery = None",
        "the request was let go, so it gives no answer, and letting go of it again does nothing",
    ),
    Equivalent(
        "gpu_cache/arrivals.py",
        "Arrivals._delivered",
        "drop",
        "entry.delivery = None",
        "an answered request gives no other answer, and the next one takes its place",
    ),
    Equivalent(
        "gpu_cache/arrivals.py",
        "Arrivals._delivered",
        "drop",
        "entry.verified.clear()",
        "the host verifies anew what it fetches next; an entry that nobody else wants is forgotten at once",
    ),
    Equivalent(
        "gpu_cache/arrivals.py",
        "Arrivals._delivered",
        "without part 1",
        "each is entry and claim_of(found) == claim",
        "a claim, an adapter of the tenant and a number, is one version",
    ),
    Equivalent(
        "gpu_cache/arrivals.py",
        "Arrivals.land",
        "drop entry.load",
        "entry.copied, entry.load = True, None",
        "looked at only when the next copy lands, which has set it anew",
    ),
    Equivalent(
        "gpu_cache/arrivals.py",
        "Arrivals.land",
        "drop",
        "entry.cold = None",
        "an entry that leaves VRAM is forgotten, unless a lease on it is being verified again just then",
    ),
    *(
        Equivalent(
            "gpu_cache/vram_tier.py",
            "VramTier.dead",
            operator,
            "entry.dead",
            "who is not dead is on the shelf, too, and would be buried twice; it keeps the list short",
        )
        for operator in ("always", "true")
    ),
    Equivalent(
        "gpu_cache/placement.py",
        "Placement._settle",
        "always",
        "e.resident is not None",
        "what was copied is resident; it is for the type",
    ),
    Equivalent(
        "gpu_cache/claims.py",
        "Claims._verified",
        "without part 1",
        "isinstance(outcome, Failure) or problems",
        "a failure has problems; the first part is for the type",
    ),
    Equivalent(
        "gpu_cache/claims.py",
        "Claims._verified",
        "without part 1",
        "e is entry and claim_of(r) == claim",
        "a claim, an adapter of the tenant and a number, is one version",
    ),
    Equivalent(
        "gpu_cache/copies.py",
        "CopyQueue.busy",
        "without part 2",
        "self._queued or self._issuing or self._flying",
        "what is being enqueued stays in the queue until it flies",
    ),
    Equivalent(
        "gpu_cache/copies.py",
        "CopyQueue.issue",
        "without part 2",
        "self._issuing or not self._queued",
        "an empty queue has no next piece either",
    ),
    Equivalent(
        "gpu_cache/admission.py",
        "inadmissible",
        "always",
        "e.facts is not None",
        "the list holds only entries whose facts are known; it is for the type",
    ),
    Equivalent(
        "gpu_cache/host/tier.py",
        "HostTier.make_room",
        "without part 2",
        "e.pages or ()",
        "what is filled has pages; the last part is for the type only",
    ),
    Equivalent(
        "gpu_cache/host/packing.py",
        "Packer._grant",
        "drop",
        "self._lines.remove(request)",
        "one that has its memory needs none at its next attempt, and leaves the line then",
    ),
)


def excluded(mutant: Mutant) -> Equivalent | None:
    """Why the mutant is left out, or None."""
    return next((e for e in EQUIVALENT if e.covers(mutant)), None)
