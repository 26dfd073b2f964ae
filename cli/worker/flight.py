"""One forward, from the choice of its rows to its tokens. The device works while the host does other things.

A flight is a forward that was launched and not looked at. The next one is launched before it lands: who decodes goes on
with a token that only the device knows yet (`Generation.promise`). So the device never waits for the host, as long as
the host needs less time for a step than the device. A request may end while it is in flight, at a stop token, say: then
its row in the next one was in vain. Where the host has to draw tokens itself, a flight lands before the next one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from adapterd.cli.worker.forward import FlatModel
from adapterd.cli.worker.generation import Generation, State
from adapterd.cli.worker.inputs import MOST_SAID
from adapterd.cli.worker.prefix import PrefixCache
from adapterd.cli.worker.refusals import problems_of
from adapterd.cli.worker.requests import Token
from adapterd.cli.worker.roll import Roll
from adapterd.cli.worker.sampling import Verdict
from adapterd.cli.worker.scheduling import Scheduler
from adapterd.gpu_cache import Lease
from adapterd.gpu_cache.engine import LoRAEngine
from adapterd.gpu_cache.engine.device_plan import LaunchShape
from adapterd.loader.errors import AdapterdError, Code, Problem, reject

_BASE_ALONE = "base"

Chosen = Sequence[tuple[Generation, int]]
"""Requests in row order, and how many rows each runs."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A forward that was launched.

    Attributes:
        ran: requests in row order, which of their lives it was, and how many tokens have keys and values with it.
        spoke: whether all rows of each are in, so that a token comes.
        logits: [sequences, vocabulary].
        ahead: the next forward may be launched before the host knows these tokens.
    """

    ran: Sequence[tuple[Generation, int, int]]
    spoke: Sequence[bool]
    logits: Tensor
    verdict: Verdict
    ahead: bool


class Pilot:
    """Launches forwards and takes their tokens.

    Attributes:
        steps, rows: that were launched.

    Args: see `ServingLoop`.
    """

    def __init__(
        self,
        model: FlatModel,
        engine: LoRAEngine[Lease | None],
        roll: Roll,
        *,
        scheduler: Scheduler,
        prefix: PrefixCache,
        max_rows: int,
    ) -> None:
        self.steps = self.rows = 0
        self._model, self._engine, self._roll = model, engine, roll
        self._scheduler, self._prefix, self._max_rows = scheduler, prefix, max_rows
        self._bound = engine.served
        self._flight: _Flight | None = None

    @property
    def flying(self) -> bool:
        return self._flight is not None

    def advance(self) -> None:
        """Launches the next forward, if anything can run, and then takes the tokens of the one before."""
        if self._flight is not None and not self._flight.ahead:
            self.land()
        launched = self._launch()
        try:
            self.land()
        finally:
            self._flight = launched

    # Launching

    def _launch(self) -> _Flight | None:
        chosen = self._chosen()
        logits_NV = self._run(chosen) if chosen else None
        if logits_NV is None:
            return None
        self.steps += 1
        self.rows += sum(rows for _, rows in chosen)
        ran = [each for each, _ in chosen]
        try:
            return self._flight_of(ran, logits_NV)
        except RuntimeError as fault:  # no memory for a verdict
            self.land()
            self._fail_all(ran, fault)
            return None

    def _flight_of(self, ran: Sequence[Generation], logits_NV: Tensor) -> _Flight:
        spoke = [not each.pending for each in ran]
        verdict = self._model.verdict()
        ahead = len(ran) <= MOST_SAID and all(each.sample.greedy for each in ran)
        if ahead:
            self._model.hear(verdict.tokens)
            for sequence, (each, speaks) in enumerate(zip(ran, spoke, strict=True)):
                if speaks:
                    each.promise(sequence)
        return _Flight([(each, each.life, each.kv.length) for each in ran], spoke, logits_NV, verdict, ahead)

    def _chosen(self) -> Chosen:
        """What the scheduler picks, less what turns out to be in the prefix cache already."""
        ready = self._roll.of(State.READY)
        if not ready:
            return ()
        choice = self._scheduler.choose(ready, self._max_rows)
        for each, problem in choice.refused:
            self._roll.fail(each, (problem,))
        chosen = []
        for each, rows in choice.run:
            try:
                if not each.started:
                    self._prefix.fill(each.prefix_key, each.tokens, each.kv)
                count = min(rows, each.pending)
                if count:
                    each.kv.reserve(count)
                    chosen.append((each, count))
            except (RuntimeError, AdapterdError) as fault:  # no memory for its keys and values
                if self._flight is not None:  # which may end it, or another whose blocks it can have
                    self.land()
                    return self._chosen()
                self._roll.fail(each, problems_of(fault))
        return chosen

    def _run(self, chosen: Chosen) -> Tensor | None:
        """The logits, to be there some time. None: it failed.

        Whose lease is at fault fails alone then; the others lose nothing and go on. That goes for a step that fails
        after the model has run, too: there are logits then, of those that are left.
        """
        plan = self._model.plan([(each.rows(rows), each.kv) for each, rows in chosen])
        leases: list[tuple[Lease | None, int]] = [(each.lease if each.adapted else None, rows) for each, rows in chosen]
        if plan.padding:
            leases.append((None, plan.padding))
        logits_NV = None
        try:
            with self._engine.step(leases) as step:
                logits_NV = self._model.run(plan, self._launches(chosen, step.shape))
        except Exception as fault:  # noqa: BLE001 - whatever the model does, the worker goes on
            self.land()
            if not _comes_too_soon(fault):
                self._blame([each for each, _ in chosen if each.state is State.READY], fault)
        return logits_NV

    def _launches(self, chosen: Chosen, shape: LaunchShape | None) -> Hashable | None:
        """What the engine launches in this step: nothing for base rows, else by its shape. None: anything."""
        if self._bound is not self._engine.served:  # it was bound anew, with other tables at other addresses
            self._bound = self._engine.served
            self.land()  # on one of the graphs that go
            self._model.runner.forget()
        return shape if any(each.adapted for each, _ in chosen) else _BASE_ALONE

    def _blame(self, ran: Sequence[Generation], fault: Exception) -> None:
        guilty = [(each, problems) for each in ran if (problems := self._unusable(each))]
        for each, problems in guilty:
            self._roll.fail(each, problems)
        if not guilty:
            self._fail_all(ran, fault)

    def _fail_all(self, ran: Sequence[Generation], fault: Exception) -> None:
        for each in ran:
            self._roll.fail(each, problems_of(fault))

    def _unusable(self, each: Generation) -> tuple[Problem, ...]:
        try:
            self._engine.check(each.lease)
        except Exception as fault:  # noqa: BLE001 - an engine that was closed, say
            return problems_of(fault)
        return ()

    # Landing

    def land(self) -> None:
        """Waits for the forward that was launched, if one was, and takes the tokens that it brings. Idempotent.

        Raises what ending a request has raised, the first of it, once all tokens are taken: others go on by theirs.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return
        try:
            verdicts = flight.verdict.wait()[: len(flight.ran)]  # behind them perhaps padding's
        except RuntimeError as fault:  # what the device says only now
            self._fail_all([each for each, life, _ in flight.ran if each.life == life], fault)
            return
        brought = zip(flight.ran, flight.spoke, verdicts, strict=True)
        faults: list[Exception] = []
        for row, ((each, life, length), spoke, (sound, largest)) in enumerate(brought):
            if each.life != life:
                continue
            if sound:
                each.landed = length
            try:
                if spoke:
                    self._take(each, flight.logits, row, sound=sound, largest=largest)
            except Exception as fault:  # noqa: BLE001 - of a lease that could not be given back, say
                faults.append(fault)
        if faults:
            raise faults[0]

    def _take(self, each: Generation, logits_NV: Tensor, row: int, *, sound: int, largest: int) -> None:
        if not sound:
            self._roll.fail(each, (reject(Code.NONFINITE, each.id, "its logits are not finite"),))
            return
        if not each.generated:
            self._roll.remember(each)
        try:
            token = each.sample(logits_NV, row, largest)
        except RuntimeError as fault:
            self._roll.fail(each, problems_of(fault))
            return
        reason = each.take(token)
        self._roll.put(each, Token(each.id, each.generated - 1, token))
        if reason is not None:
            self._roll.end(each, reason)


def _comes_too_soon(fault: Exception) -> bool:
    """The device is behind, after forwards that failed, say. Nobody is at fault, nothing ran: the next step tries."""
    return isinstance(fault, AdapterdError) and fault.code is Code.PLAN_RING_FULL
