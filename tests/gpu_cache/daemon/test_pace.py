from __future__ import annotations

from adapterd.gpu_cache.daemon.pace import Pace


def answered(pace: Pace) -> int:
    count = 0
    while not pace.pause:
        pace.take()
        count += 1
    return count


def test_a_burst_and_then_the_rate() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0], rate=8, burst=4)
    assert answered(pace) == 4
    now[0] += 1
    assert answered(pace) == 4  # what was not used is not saved up beyond a burst
    now[0] += pace.pause
    assert answered(pace) == 1
    total = 0
    for _ in range(80):
        now[0] += 1 / 8
        total += answered(pace)
    assert total == 80
