"""Base models: a (id, revision) means one module table, for ever."""

from __future__ import annotations

import dataclasses

import pytest
from sqlalchemy import text

from adapterd.loader.base_alternatives import Alternative
from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.errors import Code, Conflict, Failed
from adapterd.registry.services import Services
from fakes.clock import FakeClock

REVISION = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "d" * 64


def spec(model_id: str = "org/model", revision: str = REVISION, width: int = 8) -> BaseSpec:
    paths = ["model.layers.0.q_proj", "model.layers.0.v_proj"]
    modules = [BaseModule(path, ModuleKind.LINEAR, width, width) for path in paths]
    return BaseSpec.of(modules, id=model_id, revision=revision)


def test_add_get_list(services: Services, clock: FakeClock) -> None:
    info = services.base_models.add(spec(), actor="op")
    assert (info.pin, info.modules, info.created_at) == (spec().pin, 2, clock())
    assert services.base_models.get("org/model", REVISION) == spec()
    others = [spec("org/another"), spec(revision="sha256:" + "a" * 64)]
    for other in others:
        services.base_models.add(other, actor="op")
    pins = [info.pin for info in services.base_models.list()]
    assert pins == [others[0].pin, spec().pin, others[1].pin]
    after = (pins[0].id, pins[0].revision)
    assert [info.pin for info in services.base_models.list(after=after, limit=1)] == [pins[1]]


def test_unknown(services: Services) -> None:
    services.base_models.add(spec(), actor="op")
    assert services.base_models.get("org/model", "f" * 40) is None
    assert services.base_models.get("org/nobody", REVISION) is None


def test_the_same_again_changes_nothing(services: Services, clock: FakeClock) -> None:
    first = services.base_models.add(spec(), actor="op")
    clock.advance(days=1)
    assert services.base_models.add(spec(), actor="op") == first
    assert [entry.action for entry in services.audit.list(None)] == ["base.add"]


def test_another_table_is_a_conflict(services: Services) -> None:
    services.base_models.add(spec(), actor="op")
    with pytest.raises(Conflict) as caught:
        services.base_models.add(spec(width=16), actor="op")
    assert caught.value.code is Code.ALREADY_EXISTS
    assert services.base_models.get("org/model", REVISION) == spec()


def test_a_table_changed_behind_our_back_is_noticed(services: Services) -> None:
    services.base_models.add(spec(), actor="op")
    with services.db.write() as session:
        change = "UPDATE base_models SET table_json = replace(table_json, :old, :new)"
        session.execute(text(change), {"old": '"in_features":8', "new": '"in_features":16'})
    with pytest.raises(Failed) as caught:
        services.base_models.get("org/model", REVISION)
    assert caught.value.code is Code.BASE_TABLE_INVALID


def test_alternatives_and_weights_are_kept_and_listed(services: Services) -> None:
    renamed = Alternative.of("old", {"model.layers.0.query": "model.layers.0.q_proj"})
    full = dataclasses.replace(spec().with_alternatives([renamed]), weights_digest=WEIGHTS)
    services.base_models.add(full, actor="op")
    assert services.base_models.get("org/model", REVISION) == full
    (info,) = services.base_models.list()
    assert (info.alternatives, info.weights_digest, info.pin) == (("old",), WEIGHTS, full.pin)
    with pytest.raises(Conflict):
        services.base_models.add(spec(), actor="op")  # without the alternatives it is another table


def test_a_weights_digest_may_come_later_and_is_then_compared(services: Services) -> None:
    weighed = dataclasses.replace(spec(), weights_digest=WEIGHTS)
    services.base_models.add(spec(), actor="op")
    assert services.base_models.add(weighed, actor="op").weights_digest == WEIGHTS
    assert services.base_models.get("org/model", REVISION) == weighed
    assert services.base_models.add(spec(), actor="op").weights_digest == WEIGHTS
    assert services.base_models.add(weighed, actor="op").pin == spec().pin
    with pytest.raises(Conflict) as caught:
        services.base_models.add(dataclasses.replace(spec(), weights_digest="e" * 64), actor="op")
    assert caught.value.code is Code.ALREADY_EXISTS
    entries = services.audit.list(None)
    assert sorted(entry.action for entry in entries) == ["base.add", "base.weights"]
    assert {"base.weights": WEIGHTS}.items() <= {e.action: e.detail.get("weights_digest") for e in entries}.items()


def test_a_weights_digest_changed_behind_our_back_is_noticed(services: Services) -> None:
    services.base_models.add(dataclasses.replace(spec(), weights_digest=WEIGHTS), actor="op")
    with services.db.write() as session:
        session.execute(text("UPDATE base_models SET weights_digest = :other"), {"other": "e" * 64})
    with pytest.raises(Failed):
        services.base_models.get("org/model", REVISION)
