"""The manifest's digest is over its RFC 8785 form, whatever is in it."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import rfc8785
from hypothesis import example, given
from hypothesis import strategies as st

from adapterd.loader.identity import BasePin, FileEntry
from adapterd.loader.manifest import Manifest, ModuleEntry, TensorEntry

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = st.integers(0, 1 << 50)
values = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([1e-4, 9e-5, 1e16, 0.1, 16.0, -0.0, 1e21])
tensors = st.builds(TensorEntry, texts, texts, st.lists(numbers, max_size=3).map(tuple), numbers, numbers)
modules = st.builds(
    ModuleEntry, texts, numbers, values, values, texts, numbers, numbers, tensors, tensors, st.none() | values
)
manifests = st.builds(
    Manifest,
    st.builds(BasePin, texts, texts, texts),
    st.lists(modules, max_size=3).map(tuple),
    st.lists(st.builds(FileEntry, texts, texts, numbers), max_size=2).map(tuple),
    st.sampled_from(["primary", "other"]) | texts,
)


def by_the_standard(manifest: Manifest) -> str:
    body: dict[str, Any] = manifest.as_json()
    if manifest.naming == "primary":
        del body["naming"]
    for module in body["modules"]:
        del module["delta_norm"]
    return hashlib.sha256(rfc8785.dumps(body)).hexdigest()


def with_numbers(alpha: float, scaling: float) -> Manifest:
    tensor = TensorEntry("", "", (), 0, 0)
    return Manifest(BasePin("", "", ""), (ModuleEntry("", 0, alpha, scaling, "", 0, 0, tensor, tensor),), ())


@given(manifests)
@example(with_numbers(2.0**53, 0.0))
@example(with_numbers(2.0**53 - 1, 1e-9))
@example(with_numbers(16.0, 2.0**60))
def test_the_digest_is_that_of_the_canonical_form(manifest: Manifest) -> None:
    assert manifest.digest == by_the_standard(manifest)


@pytest.mark.parametrize(
    "scaling", [2 / 3, 1 / 3, 16 / math.sqrt(19), 1e-4, 9.999e-5, 1e-7, 2.0**53, 1e16, 123456.75, 0.0]
)
def test_scalings_as_they_come(scaling: float) -> None:
    tensor = TensorEntry('t\\u00e9\n\x7f"/', "BF16", (16, 4096), 8, 131_080)
    module = ModuleEntry("m.é\x01", 16, 16.0, scaling, "BF16", 4096, 4096, tensor, tensor, 0.5)
    manifest = Manifest(BasePin("b/m", "0" * 40, "1" * 64), (module,), ())
    assert manifest.digest == by_the_standard(manifest)
