"""The step budget: all or nothing, never above a limit or below zero, and everything comes back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adapterd.gpu_cache.step_budget import (
    Fits,
    Lack,
    MustWait,
    NeverFits,
    Reservation,
    Resource,
    StepBudget,
    StepLimits,
    Want,
)
from adapterd.loader.errors import AdapterdError, Code

LIMITS = StepLimits(kv_blocks=10, rows=8, adapter_bytes=40, load_slots=2, load_bytes=30, page_bytes=10)
A, B, C, D = (("acme", name) for name in "abcd")


def taken(budget: StepBudget) -> dict[Resource, int]:
    return {resource: budget.taken(resource) for resource in Resource if budget.taken(resource)}


def reserved(answer: Reservation | MustWait | NeverFits) -> Reservation:
    assert isinstance(answer, Reservation), answer
    return answer


def test_a_reservation_takes_all_that_is_wanted_and_gives_it_back_once() -> None:
    budget = StepBudget(LIMITS)
    one = reserved(budget.reserve(Want(kv_blocks=3, rows=2, adapters={A: 11}, load_slots=1, load_bytes=11)))
    two = reserved(budget.reserve(Want(kv_blocks=4)))
    assert taken(budget) == {
        Resource.KV_BLOCKS: 7,
        Resource.ROWS: 2,
        Resource.ADAPTER_BYTES: 20,
        Resource.LOAD_SLOTS: 1,
        Resource.LOAD_BYTES: 11,
    }
    for _ in range(2):
        one.give_back()
        assert taken(budget) == {Resource.KV_BLOCKS: 4}
    two.give_back()
    assert taken(budget) == {} and budget.outstanding == 0


def test_nothing_is_taken_when_one_thing_is_short_and_every_reason_is_said() -> None:
    budget = StepBudget(LIMITS)
    reserved(budget.reserve(Want(kv_blocks=8, rows=1, load_slots=2)))
    before = taken(budget)
    answer = budget.reserve(Want(kv_blocks=3, rows=2, adapters={A: 1}, load_slots=1))
    assert answer == MustWait((Lack(Resource.KV_BLOCKS, 3, 2, 10), Lack(Resource.LOAD_SLOTS, 1, 0, 2)))
    assert str(answer.lacks[0]) == "3 kv blocks wanted, 2 of 10 free"
    assert answer.short_of(Resource.LOAD_SLOTS) and not answer.short_of(Resource.ROWS)
    assert taken(budget) == before
    assert budget.outstanding == 1


def test_an_adapter_counts_once_and_stays_until_its_last_holder_is_gone() -> None:
    budget = StepBudget(LIMITS)
    one, two = (reserved(budget.reserve(Want(adapters={A: 30}))) for _ in range(2))
    assert budget.taken(Resource.ADAPTER_BYTES) == 30
    assert isinstance(budget.ask(Want(adapters={B: 20})), MustWait)
    assert isinstance(budget.ask(Want(adapters={A: 30, B: 10})), Fits)
    one.give_back()
    assert budget.held == {A} and budget.taken(Resource.ADAPTER_BYTES) == 30
    two.give_back()
    assert not budget.held and budget.taken(Resource.ADAPTER_BYTES) == 0


def test_an_adapter_is_of_one_tenant() -> None:
    budget = StepBudget(LIMITS)
    reserved(budget.reserve(Want(adapters={("acme", "a"): 10})))
    reserved(budget.reserve(Want(adapters={("blue", "a"): 10})))
    assert budget.taken(Resource.ADAPTER_BYTES) == 20


def test_a_size_is_the_one_it_was_first_held_with() -> None:
    budget = StepBudget(LIMITS)
    one = reserved(budget.reserve(Want(adapters={A: 10})))
    two = reserved(budget.reserve(Want(adapters={A: 40, B: 30})))
    one.give_back()
    assert budget.taken(Resource.ADAPTER_BYTES) == 40
    two.give_back()
    assert budget.taken(Resource.ADAPTER_BYTES) == 0


def test_what_can_never_fit_is_refused_instead_of_waiting_for_ever() -> None:
    budget = StepBudget(LIMITS)
    answer = budget.reserve(Want(kv_blocks=11, adapters={A: 21, B: 11, C: 1}))
    assert isinstance(answer, NeverFits)
    assert [lack.resource for lack in answer.lacks] == [Resource.KV_BLOCKS, Resource.ADAPTER_BYTES]
    problem = answer.problem("request 7")
    assert (problem.code, problem.where) == (Code.BUDGET_EXCEEDED, "request 7")
    assert problem.message == "11 kv blocks wanted, there are 10; 60 adapter bytes wanted, there are 40"


def test_what_can_never_fit_is_short_of_nothing_whatever_else_is_taken() -> None:
    """Who waits because it is short comes to be had; so it is not said of what is to be refused."""
    budget = StepBudget(LIMITS)
    budget.reserve(Want(kv_blocks=10, rows=8))
    assert budget.short(kv_blocks=10, rows=1) and budget.short(kv_blocks=1, rows=8)
    assert not budget.short(kv_blocks=11, rows=1)
    assert not budget.short(kv_blocks=1, rows=9)


def test_a_reservation_grows_by_all_or_nothing() -> None:
    budget = StepBudget(LIMITS)
    one, two = (
        reserved(budget.reserve(Want(kv_blocks=4, adapters={A: 10}))),
        reserved(budget.reserve(Want(kv_blocks=4))),
    )
    assert isinstance(budget.grow(one, Want(kv_blocks=1, adapters={A: 10, B: 10})), Fits)
    assert taken(budget) == {Resource.KV_BLOCKS: 9, Resource.ADAPTER_BYTES: 20}
    assert isinstance(budget.grow(two, Want(kv_blocks=2)), MustWait)
    assert isinstance(budget.grow(one, Want(kv_blocks=6)), NeverFits), "it would wait for its own blocks"
    assert isinstance(budget.grow(one, Want(adapters={C: 10, D: 30})), NeverFits)
    one.give_back()
    assert taken(budget) == {Resource.KV_BLOCKS: 4}
    with pytest.raises(RuntimeError, match="given back"):
        budget.grow(one, Want())


def test_limits_and_wants_are_checked() -> None:
    with pytest.raises(AdapterdError) as caught:
        StepLimits(kv_blocks=1, rows=1, adapter_bytes=1, load_slots=0, load_bytes=1)
    assert caught.value.code is Code.SETTINGS_INVALID
    with pytest.raises(ValueError, match="negative"):
        Want(rows=-1)
    with pytest.raises(ValueError, match="negative"):
        Want(adapters={A: -1})


WANTS = st.builds(
    Want,
    kv_blocks=st.integers(0, 11),
    rows=st.integers(0, 9),
    adapters=st.dictionaries(st.sampled_from([A, B, C, D]), st.integers(0, 45), max_size=3),
    load_slots=st.integers(0, 3),
    load_bytes=st.integers(0, 31),
)


class BudgetMachine(RuleBasedStateMachine):
    """Against a model that adds up, from scratch, what every holder was given."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = StepBudget(LIMITS)
        self.held: dict[Reservation, list[Want]] = {}
        self.gone: list[Reservation] = []

    def total(self, held: dict[Reservation, list[Want]]) -> dict[Resource, int]:
        wants = [want for each in held.values() for want in each]
        keys = {key for want in wants for key in want.adapters}
        return {
            Resource.KV_BLOCKS: sum(want.kv_blocks for want in wants),
            Resource.ROWS: sum(want.rows for want in wants),
            Resource.ADAPTER_BYTES: sum(self.budget._sizes.get(key, 0) for key in keys),
            Resource.LOAD_SLOTS: sum(want.load_slots for want in wants),
            Resource.LOAD_BYTES: sum(want.load_bytes for want in wants),
        }

    @rule(want=WANTS)
    def reserve(self, want: Want) -> None:
        before, asked = self.total(self.held), self.budget.ask(want)
        answer = self.budget.reserve(want)
        if isinstance(answer, Reservation):
            assert isinstance(asked, Fits)
            self.held[answer] = [want]
        else:
            assert answer == asked
            assert self.total(self.held) == before
            assert answer.lacks and all(lack.wanted > min(lack.free, lack.limit) for lack in answer.lacks)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), want=WANTS)
    def grow(self, data: st.DataObject, want: Want) -> None:
        chosen = data.draw(st.sampled_from(list(self.held)))
        if isinstance(self.budget.grow(chosen, want), Fits):
            self.held[chosen].append(want)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), want=WANTS)
    def hold(self, data: st.DataObject, want: Want) -> None:
        chosen, adapters = data.draw(st.sampled_from(list(self.held))), Want(adapters=want.adapters)
        asked = self.budget.ask(adapters)
        held = self.budget.hold(chosen, want.adapters)
        assert held == isinstance(asked, Fits)
        if held:
            self.held[chosen].append(adapters)

    @rule(want=WANTS)
    def short(self, want: Want) -> None:
        """Of one thing alone: must wait for it. Of both: for at least one."""
        for part in (Want(kv_blocks=want.kv_blocks), Want(rows=want.rows)):
            said = self.budget.short(kv_blocks=part.kv_blocks, rows=part.rows)
            assert said == isinstance(self.budget.ask(part), MustWait)
        if self.budget.short(kv_blocks=want.kv_blocks, rows=want.rows):
            assert not isinstance(self.budget.ask(want), Fits)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(list(self.held)))
        del self.held[chosen]
        chosen.give_back()
        self.gone.append(chosen)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def give_back_again(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.gone)).give_back()

    @invariant()
    def adds_up(self) -> None:
        assert {resource: self.budget.taken(resource) for resource in Resource} == self.total(self.held)
        assert all(0 <= self.budget.free(resource) <= self.budget.limit(resource) for resource in Resource)
        assert self.budget.outstanding == len(self.held)

    def teardown(self) -> None:
        for reservation in self.held:
            reservation.give_back()
        assert not any(self.budget.taken(resource) for resource in Resource)
        assert self.budget.outstanding == 0


TestBudgetMachine = BudgetMachine.TestCase
TestBudgetMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
