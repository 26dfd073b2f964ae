"""The verdict: does this package fit this base, and what does it do there?

Rooms, in the order in which they are asked: `package` and config (in `formats`), `pairs` (names of
tensors), `base_name`, `fit` (modules, shapes, ranks), `coverage` (config against tensors),
`content` (hashes, values). `examination` is the order itself.
"""

from adapterd.loader.checks.examination import examine, examine_path
from adapterd.loader.checks.findings import ALLOWABLE, MAX_PROBLEMS, Verdict

__all__ = ["ALLOWABLE", "MAX_PROBLEMS", "Verdict", "examine", "examine_path"]
