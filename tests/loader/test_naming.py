"""An adapter binds to exactly one of a base's namings, and the manifest says which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapterd.loader.base_alternatives import MAX_ALTERNATIVES, Alternative, load_alternative
from adapterd.loader.base_model import BaseModule, BaseSpec, ModuleKind
from adapterd.loader.checks import Verdict, examine_path
from adapterd.loader.errors import Code, Failed
from adapterd.loader.limits import Limits
from adapterd.loader.manifest import Manifest
from fakes.packages import tiny_llama_spec, write_package

PLAIN = tiny_llama_spec()
PATHS = [m.path for m in PLAIN.modules]
OLD_PARTS = {"query": "q_proj", "value": "v_proj"}


def rules(tmp_path: Path, **body: Any) -> Path:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps(body))
    return path


def alternative(tmp_path: Path, name: str = "old", **body: Any) -> Alternative:
    return load_alternative(name, rules(tmp_path, **body), PATHS)


def old_and_bare(tmp_path: Path) -> BaseSpec:
    """The tiny llama with the names of an older library, and with those of a model without its head."""
    old = alternative(tmp_path, "old", parts=OLD_PARTS)
    bare = alternative(tmp_path, "bare", prefixes={"": "model."})
    return PLAIN.with_alternatives([old, bare])


def verdict(tmp_path: Path, base: BaseSpec, naming: str, modules: tuple[str, ...], **options: Any) -> Verdict:
    """On an adapter that was trained on `base` as `naming` writes it."""
    limits = options.pop("limits", Limits())
    written = write_package(tmp_path / "adapter", base=base.named(naming), modules=modules, **options)
    return examine_path(written.directory, base, limits=limits)


def accepted(found: Verdict) -> Manifest:
    assert found.manifest is not None, found.problems
    return found.manifest


# ------------------------------------------------------------------ the base's side


def test_rules_are_spelled_out_over_the_table(tmp_path: Path) -> None:
    by_parts = alternative(tmp_path, parts=OLD_PARTS)
    assert dict(by_parts.renames) == {
        f"model.layers.{i}.self_attn.{old}": f"model.layers.{i}.self_attn.{new}"
        for i in range(2)
        for old, new in OLD_PARTS.items()
    }
    bare = alternative(tmp_path, prefixes={"": "model."})
    assert dict(bare.renames)["embed_tokens"] == "model.embed_tokens"
    assert len(bare.renames) == len(PATHS) - 1  # all but the head
    both = alternative(tmp_path, prefixes={"decoder.": "model."}, parts={"query": "q_proj"})
    assert dict(both.renames)["decoder.layers.1.self_attn.query"] == "model.layers.1.self_attn.q_proj"
    listed = alternative(tmp_path, renames={"wte": "model.embed_tokens"}, prefixes={"": "model."})
    assert dict(listed.renames)["wte"] == "model.embed_tokens"
    assert "embed_tokens" not in dict(listed.renames)


def test_the_digest_covers_alternatives_only_if_there_are_any(tmp_path: Path) -> None:
    assert PLAIN.table_digest == "4f54d78677e1fb8a48aca39b5207e364f65c2854b766ddb03c9a4471b361f426"
    base = old_and_bare(tmp_path)
    assert base.table_digest != PLAIN.table_digest
    assert BaseSpec.from_json(json.loads(json.dumps(base.as_json()))) == base
    assert "alternatives" not in PLAIN.as_json()
    assert [a.name for a in base.alternatives] == ["bare", "old"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "renames nothing"),
        ({"more": {}}, "unknown field"),
        ({"parts": []}, "must be dict"),
        ({"parts": {"a": 1}}, "must be a string"),
        ({"parts": {"query": "queue_proj"}}, "fits no module"),
        ({"prefixes": {"x.": "encoder."}}, "fits no module"),
        ({"parts": {"a": "q_proj", "b": "q_proj"}}, "two rules"),
        ({"parts": {"x": "q_proj", "k_proj": "v_proj"}}, "of the base's own table, too"),
        ({"prefixes": {"a.": "model.layers.0.", "a.mlp.": "model.layers.1.mlp."}}, "one name"),
        ({"renames": {"embed_tokens": "lm_head"}, "prefixes": {"": "model."}}, "a rule gives this name"),
        ({"renames": {"x": "no.such.module"}}, "not in the base's module table"),
        ({"renames": {"lm_head": "model.embed_tokens"}}, "of the base's own table, too"),
        ({"renames": {"x": "lm_head", "y": "lm_head"}}, "is called x, too"),
        ({"renames": {"": "lm_head"}}, "not a module path"),
    ],
)
def test_an_alternative_that_is_no_table_of_its_own_is_refused(tmp_path: Path, body: Any, words: str) -> None:
    with pytest.raises(Failed) as caught:
        PLAIN.with_alternatives([alternative(tmp_path, **body)])
    assert caught.value.code is Code.BASE_TABLE_INVALID
    assert words in caught.value.problem.message


@pytest.mark.parametrize("name", ["primary", "", "Old", "a b"])
def test_an_alternative_has_a_name(name: str) -> None:
    with pytest.raises(Failed, match="an alternative is called"):
        PLAIN.with_alternatives([Alternative.of(name, {"x": "lm_head"})])


def test_names_are_unique_and_few() -> None:
    one = Alternative.of("a", {"x": "lm_head"})
    with pytest.raises(Failed, match="each name once"):
        PLAIN.with_alternatives([one, one])
    with pytest.raises(Failed, match="at most"):
        PLAIN.with_alternatives(Alternative.of(f"a{i}", {"x": "lm_head"}) for i in range(MAX_ALTERNATIVES + 1))


# ------------------------------------------------------------------ the adapter's side


@pytest.mark.parametrize(
    ("naming", "modules"),
    [
        ("primary", ("q_proj", "v_proj")),
        ("primary", ("up_proj",)),  # a name that is the same in `old` as well
        ("old", ("query", "value")),
        ("old", ("query", "up_proj")),
        ("bare", ("q_proj", "up_proj")),
    ],
)
def test_an_adapter_binds_to_the_one_naming_that_has_all_its_names(
    tmp_path: Path, naming: str, modules: tuple[str, ...]
) -> None:
    base = old_and_bare(tmp_path)
    manifest = accepted(verdict(tmp_path, base, naming, modules))
    assert manifest.naming == manifest.as_json()["naming"] == naming
    assert manifest.base == base.pin
    assert all(base.module(m.name) for m in manifest.modules)
    assert [m.name for m in manifest.modules] == sorted(m.name for m in manifest.modules)
    assert Manifest.from_json(manifest.as_json()) == manifest


def test_the_same_values_under_either_name_are_the_same_modules(tmp_path: Path) -> None:
    base = old_and_bare(tmp_path)
    new = accepted(verdict(tmp_path / "new", base, "primary", ("q_proj", "v_proj"), seed=4))
    old = accepted(verdict(tmp_path / "old", base, "old", ("query", "value"), seed=4))
    facts = [[(m.name, m.rank, m.scaling, m.delta_norm) for m in manifest.modules] for manifest in (new, old)]
    assert facts[0] == facts[1]
    assert old.modules[0].a.name.endswith("self_attn.query.lora_A.weight")


def test_only_a_naming_that_is_not_primary_is_in_the_digest(tmp_path: Path) -> None:
    manifest = accepted(verdict(tmp_path, PLAIN, "primary", ("q_proj",)))
    other = Manifest(manifest.base, manifest.modules, manifest.files, "old")
    assert manifest.digest != other.digest
    without = {k: v for k, v in manifest.as_json().items() if k != "naming"}
    assert Manifest.from_json(without).digest == manifest.digest


def test_patterns_of_the_config_speak_the_adapters_names(tmp_path: Path) -> None:
    base = old_and_bare(tmp_path)
    pattern = {"rank_pattern": {"query": 2}, "target_modules": r".*\.(query|value)"}
    ranks = {f"model.layers.{i}.self_attn.query": 2 for i in range(2)}
    manifest = accepted(verdict(tmp_path, base, "old", ("query", "value"), ranks=ranks, **pattern))
    assert {m.name.rpartition(".")[2]: m.rank for m in manifest.modules} == {"q_proj": 2, "v_proj": 4}


def test_names_of_two_tables_are_refused(tmp_path: Path) -> None:
    base = old_and_bare(tmp_path)
    mixed = BaseSpec.of(
        [m for naming in ("primary", "old") for m in base.named(naming).modules if ".self_attn." in m.path
         and (m.path.startswith("model.layers.0") == (naming == "old"))],
        id=base.id, revision=base.revision,
    )  # fmt: skip
    written = write_package(tmp_path / "adapter", base=mixed, modules=("query", "v_proj"))
    (problem,) = [p for p in examine_path(written.directory, base).problems if p.severity == "reject"]
    assert problem.code is Code.UNKNOWN_MODULE
    assert "while others of the adapter are of" in problem.message


def test_an_unknown_name_gets_near_ones_of_the_nearest_table_and_the_tables_tried(tmp_path: Path) -> None:
    base = old_and_bare(tmp_path)
    near = base.named("old").modules
    wrong = [BaseModule(m.path.replace("value", "vlue"), m.kind, m.in_features, m.out_features) for m in near]
    written = write_package(
        tmp_path / "adapter", base=BaseSpec.of(wrong, id=base.id, revision=base.revision), modules=("query", "vlue")
    )
    (problem,) = [p for p in examine_path(written.directory, base).problems if p.severity == "reject"]
    assert problem.code is Code.UNKNOWN_MODULE
    assert "model.layers.0.self_attn.value" in problem.hint
    assert problem.hint.endswith("No table has all of its names; tried: primary, bare, old.")


def test_a_name_in_two_alternatives_is_not_guessed(tmp_path: Path) -> None:
    one = alternative(tmp_path, "one", parts={"x": "q_proj"})
    two = alternative(tmp_path, "two", parts={"x": "o_proj"})
    base = PLAIN.with_alternatives([one, two])
    found = verdict(tmp_path, base, "one", ("x",))
    assert [p.code for p in found.problems] == [Code.UNKNOWN_MODULE]
    assert "several alternative tables of the base: one, two" in found.problems[0].message


def test_a_policy_speaks_of_the_bases_own_names(tmp_path: Path) -> None:
    base = old_and_bare(tmp_path)
    own, old = Limits(allowed_target_modules=("q_proj",)), Limits(allowed_target_modules=("query",))
    assert verdict(tmp_path, base, "old", ("query",), limits=own).ok
    found = verdict(tmp_path, base, "old", ("query",), limits=old)
    assert [p.code for p in found.problems] == [Code.TARGET_NOT_ALLOWED]


def test_another_name_makes_no_head_a_common_linear(tmp_path: Path) -> None:
    base = PLAIN.with_alternatives([alternative(tmp_path, renames={"h.0.out": "lm_head"})])
    found = verdict(tmp_path, base, "old", ("h.0.out",))
    assert [p.code for p in found.problems] == [Code.UNSUPPORTED_FEATURE]
    assert "output head" in found.problems[0].message


def test_shapes_are_those_of_the_module_that_is_meant(tmp_path: Path) -> None:
    base = old_and_bare(tmp_path)
    name = "base_model.model.model.layers.0.self_attn.value.lora_B.weight"
    found = verdict(tmp_path, base, "old", ("value",), tensors={name: np.ones((17, 4), dtype="<f4")})
    assert Code.SHAPE_MISMATCH in [p.code for p in found.problems]


def test_kinds_follow_their_modules(tmp_path: Path) -> None:
    view = old_and_bare(tmp_path).named("bare")
    assert view.module("embed_tokens") == BaseModule("embed_tokens", ModuleKind.EMBEDDING, 96, 32)
    with pytest.raises(KeyError):
        PLAIN.named("old")
