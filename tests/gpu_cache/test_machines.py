"""The state machines of `tests/machines/`: a bounded share with every run, a longer one with `make test-all`.

Longer is less than a minute on a quiet core. A test that is stopped by its time limit in the middle of an example
is reported as flaky, for the next run of the example goes on; so its size stays far below that.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings

from machines.cache_machine import CacheMachine

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # shrinking takes minutes; add it to debug
COMMON = settings(deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))


class TestCache(CacheMachine.TestCase):
    settings = settings(COMMON, max_examples=40, stateful_step_count=40)


@pytest.mark.slow
class TestCacheForLong(CacheMachine.TestCase):
    settings = settings(COMMON, max_examples=400, stateful_step_count=60)
