from __future__ import annotations

import logging
import threading

import pytest

from adapterd.gpu_cache import TenantBudget
from adapterd.gpu_cache.host.pool import FairPool
from fakes.devices import Barrier


def test_a_tenant_with_many_jobs_does_not_hold_up_another() -> None:
    pool = FairPool(1, {}, None)
    order: list[str] = []
    first, last = Barrier(), threading.Event()
    pool.submit("acme", first.stop)
    first.await_arrival()
    for index in range(5):
        pool.submit("acme", lambda index=index: order.append(f"acme{index}"))
    pool.submit("blue", lambda: order.append("blue"))
    pool.submit("acme", last.set)
    first.open()
    assert last.wait(20)
    pool.close(20)
    assert order.index("blue") <= 1
    assert [name for name in order if name != "blue"] == [f"acme{i}" for i in range(5)]


def test_a_tenant_stays_within_its_number_of_loads() -> None:
    pool = FairPool.of(2, {"acme": TenantBudget(max_loads=1)}, TenantBudget())
    stuck, waiting, done = Barrier(), threading.Event(), threading.Event()
    pool.submit("acme", stuck.stop)
    stuck.await_arrival()
    pool.submit("acme", waiting.set)
    pool.submit("blue", done.set)
    assert done.wait(20)
    assert not waiting.is_set()
    stuck.open()
    assert waiting.wait(20)
    pool.close(20)


def test_a_broken_job_is_logged_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    pool = FairPool(1, {}, None)
    done = threading.Event()

    def broken() -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR):
        pool.submit("acme", broken)
        pool.submit("acme", done.set)
        assert done.wait(20)
        pool.close(20)
    assert "a loader job broke" in caplog.text


def test_close_drops_what_is_queued_and_ends_the_threads() -> None:
    before = set(threading.enumerate())
    pool = FairPool(2, {}, 1)
    ran, first = threading.Event(), Barrier()
    pool.submit("acme", first.stop)
    first.await_arrival()
    pool.submit("acme", ran.set)
    closing = threading.Thread(target=pool.close, args=(20,))
    closing.start()
    while not pool.closed:
        pass
    first.open()
    closing.join(20)
    pool.submit("acme", ran.set)
    assert not ran.is_set()
    assert set(threading.enumerate()) <= before


def test_close_leaves_a_job_that_hangs_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    pool, hung = FairPool(1, {}, None), Barrier()
    pool.submit("acme", hung.stop)
    hung.await_arrival()
    (thread,) = (t for t in threading.enumerate() if t.name.startswith("adapterd-loader"))
    with caplog.at_level(logging.WARNING):
        pool.close(0)
    assert "1 loader jobs still run" in caplog.text
    assert thread.daemon  # nor does it keep the process
    hung.open()
    thread.join(20)
    assert not thread.is_alive()


def test_a_tenant_with_a_share_finds_a_thread_whatever_others_do() -> None:
    pool = FairPool.of(2, {"blue": TenantBudget(guaranteed_host_bytes=1)}, TenantBudget())
    stuck, waiting, served = Barrier(), threading.Event(), threading.Event()
    pool.submit("acme", stuck.stop)
    stuck.await_arrival()
    pool.submit("acme", waiting.set)
    pool.submit("core", waiting.set)
    pool.submit("blue", served.set)
    assert served.wait(20)
    assert not waiting.is_set()  # the last free thread is kept for blue
    stuck.open()
    assert waiting.wait(20)
    pool.close(20)


def test_more_shares_than_threads_leave_others_one() -> None:
    budgets = {f"t{n}": TenantBudget(guaranteed_vram_bytes=1) for n in range(5)}
    for threads in (1, 2):
        pool = FairPool.of(threads, budgets, TenantBudget())
        done = threading.Event()
        pool.submit("acme", done.set)
        assert done.wait(20)
        pool.close(20)
