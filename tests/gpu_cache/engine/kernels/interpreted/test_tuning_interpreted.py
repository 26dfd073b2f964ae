"""Any configuration gives the same result; a tuning table reaches the launches; compiling ahead is told and bounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adapterd.gpu_cache.engine.device_plan import LaunchShape, PlanView, Regime
from adapterd.gpu_cache.engine.kernels import configs, launch
from adapterd.gpu_cache.engine.kernels.configs import RowsConfig, TilesConfig
from adapterd.gpu_cache.engine.kernels.forms import Form, Linear
from adapterd.gpu_cache.engine.kernels.launch import Launcher
from adapterd.gpu_cache.engine.kernels.tuned import Entry, Table
from adapterd.gpu_cache.engine.tuning.cases import Case, expand_candidates, shrink_candidates
from adapterd.gpu_cache.engine.tuning.stand import Stand
from adapterd.gpu_cache.engine.tuning.workloads import Widths, Workload
from adapterd.loader.errors import AdapterdError, Code
from fakes.one_linear import OneLinear, alone, close

SMALL = Widths("small", 512, (64, 32))


@pytest.fixture(autouse=True)
def scratch_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes of partial sums begin as NaN."""
    empty = torch.empty
    monkeypatch.setattr(launch.torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))


@pytest.mark.parametrize(
    ("workload", "regime"),
    [
        (Workload(SMALL, 4, "distinct", 0), Regime.ROWS),
        (Workload(SMALL, 64, "zipf", 24), Regime.TILES),
    ],
    ids=str,
)
def test_candidates_are_right_and_what_is_not_is_seen(
    workload: Workload, regime: Regime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configs, "SAVED_BY_TILES", 0)  # so that a linear as small as this one wants tiles
    monkeypatch.setattr(configs, "SAVED_BY_A_TILE", 0)
    case = Case(workload, regime)
    stand = Stand(case, "cpu", pdl=False)
    tried = [case.by_rule(), *shrink_candidates(case)[::4], *expand_candidates(case)[::4]]
    for config in tried:
        stand.use(config)
        assert stand.right(), config
    stand.world.cache.arena.view(torch.bfloat16)[::2] *= 1.25
    assert not stand.right()


def test_an_engine_launches_what_its_table_says(tmp_path: Path) -> None:
    key = (64, 48, 1, 16, 3)
    config = RowsConfig(2, 16, 1, 16, 1)
    own = tmp_path / "own.json"
    own.write_text(Table("cpu", "", "", (Entry(key, 4, config, 1.0, 2.0),)).text())
    plain, tuned = (OneLinear(64, [48], [[4], [9]], engine_options=o) for o in ({}, {"tuning": own}))
    owners = alone([0, -1, 1])
    x, y = plain.inputs(3)
    wanted = plain.wanted(x, y, owners)
    for world in (plain, tuned):
        close(world.run(x, y, owners)[0], wanted)
    found = [world.engine._fast.launcher.configs.rows(key, 4) for world in (plain, tuned)]  # type: ignore[union-attr]
    assert found[1] == config != found[0]


@pytest.mark.parametrize(("text", "code"), [("{}", Code.SETTINGS_INVALID), (None, Code.PATH_NOT_FOUND)])
def test_an_engine_refuses_a_bad_table_before_it_wraps(text: str | None, code: Code, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(AdapterdError) as caught:
        OneLinear(64, [48], [[4]], engine_options={"tuning": path})
    assert caught.value.code is code


def test_warming_up_is_bounded_and_tells_how_far_it_is() -> None:
    form = Form(32, 16, ((0, 16),), 16)
    other = replace(form, out_features=32, slices=((0, 32),))
    arena = torch.zeros(1 << 12, dtype=torch.uint8)
    launcher = Launcher([form, other], arena, torch.float32, 2)
    cells = torch.zeros(64, dtype=torch.int64)
    linears = [Linear(one, cells, cells, cells.view(torch.float32)) for one in (form, other, form)]
    none = torch.zeros(4096, dtype=torch.int32)

    def plan(rows: int, regime: Regime) -> PlanView:
        tile = 1 if regime is Regime.ROWS else 16
        shape = LaunchShape(regime, rows, tile, rows, rows, 1)
        return PlanView(shape, none, none, none, none, none.view(torch.float32))

    plans = [plan(rows, regime) for rows in (1, 2, 5) for regime in (Regime.ROWS, Regime.TILES)]
    told: list[tuple[int, int]] = []
    launcher.warm_up(linears, iter(plans), iter([(torch.float32, torch.float32)]), lambda *at: told.append(at))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]  # two forms in two regimes, whatever the numbers of rows


def test_other_configurations_take_over() -> None:
    world = OneLinear(64, [48], [[20], [9]], engine_options={"batch_invariant": True})
    owners = alone([0, -1, 1, 0])
    x, y = world.inputs(4)
    wanted = world.wanted(x, y, owners)
    close(world.run(x, y, owners)[0], wanted)

    class One:
        asked = 0

        def rows(self, key: object, item_bytes: int) -> RowsConfig:
            raise AssertionError("the step is in tiles")

        def tiles(self, key: object, item_bytes: int, *, batch_invariant: bool) -> TilesConfig:
            self.asked += 1
            return TilesConfig(2, 16, 16, 1, 1, 16, 2, 1, 1)

    one = One()
    world.engine._fast.launcher.use(one)  # type: ignore[union-attr, arg-type]
    close(world.run(x, y, owners)[0], wanted)
    assert one.asked == 1
