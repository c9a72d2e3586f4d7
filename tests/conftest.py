"""What tests share: an empty current folder, remembered results on request, and sweeps in part.

A sweep over modes, recipes or seeds repeats one behaviour many times. Its few representative
cases run in every test run; the others are marked `exhaustive`:

    @pytest.mark.representative("mnist-fp16_true", "linear-*")
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_one_behaviour(recipe, mode): ...
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from mprun.config.schema import RunConfig
from mprun.study.report.plots import draw
from mprun.train.assemble import Plan, footprint

settings.register_profile("any load", deadline=None)  # else an example has 0.2 s
settings.load_profile("any load")

_measured: dict[str, tuple[dict[str, int], str | None]] = {}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "representative(*cases): ids (* stands for any text) or positions of the cases that every"
        " run takes; the other cases are exhaustive",
    )


@pytest.hookimpl(tryfirst=True)  # before -m leaves out what is exhaustive
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unmatched: dict[str, set[str | int]] = defaultdict(set)
    matched: dict[str, set[str | int]] = defaultdict(set)
    normal: set[str] = set()
    for item in items:
        marker = item.get_closest_marker("representative")
        if marker is None:
            continue
        assert isinstance(item, pytest.Function)
        cases = {case for case in marker.args if _is_case(item, case)}
        if not cases:
            item.add_marker(pytest.mark.exhaustive)
        function = item.nodeid.partition("[")[0]
        if item.get_closest_marker("exhaustive") is None:
            normal.add(function)
        matched[function] |= cases
        unmatched[function] |= set(marker.args)
    for function, cases in unmatched.items():
        # A single case can be named on the command line; then the others are not collected.
        if cases - matched[function] and not any("[" in text for text in config.args):
            names = sorted(map(str, cases - matched[function]))
            raise pytest.UsageError(f"{function}: no case is {', '.join(names)}")
        if function not in normal and not any("[" in text for text in config.args):
            raise pytest.UsageError(f"{function}: every case is exhaustive")


def pytest_collection_finish() -> None:
    """Tests are no garbage until the end, so the collector need not visit them."""
    gc.collect()
    gc.freeze()


def _is_case(item: pytest.Function, case: str | int) -> bool:
    """Whether an id, a pattern of ids or a position is that of this case."""
    if isinstance(case, int):
        return set(item.callspec.indices.values()) == {case}
    pattern = ".*".join(re.escape(part) for part in case.split("*"))
    return re.fullmatch(pattern, item.callspec.id, re.DOTALL) is not None


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder, so that a stray run folder is seen and removed.

    A recipe adds its folder to the path of imports; the next test must not find it there.
    """
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    return folder


@pytest.fixture(scope="module")
def quick_runs() -> Iterator[None]:
    """Remember what many runs of one process would repeat; a module of tests asks for it.

    The memory of a shipped recipe's step (0.1 s), and all plots of a report but one (0.2 s each).
    No run is warned of page faults: whether they take a twentieth of a step depends on the machine.
    What these compute has tests of its own.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mprun.train.run.footprint", _remembered_footprint)
        one_plot = functools.partial(draw, names=["difference"])
        patch.setattr("mprun.study.report.plots.draw", one_plot)
        patch.setattr("mprun.train.run.page_fault_warning", lambda summary: None)
        yield


@pytest.fixture(scope="module")
def native_is_fast() -> Iterator[None]:
    """`execution=auto` takes native bfloat16 kernels, however slow they are where tests run.

    A module of tests asks for it whose runs must be native on every CPU.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mprun.precision.execution.slowdown", lambda dtype, device: 0.5)
        yield


def _remembered_footprint(
    plan: Plan, real: bool = True, quick: bool = False
) -> tuple[dict[str, int], str | None]:
    config = plan.config
    train = dataclasses.replace(config.train, max_steps=None, init_from=None)
    same = dataclasses.replace(config, seed=0, run=RunConfig(), train=train)
    key = f"{same} {plan.policy} {plan.execution} {plan.batch} {plan.splits.train.samples}"
    if not config.recipe.target.startswith("mprun.recipes."):
        return footprint(plan, real, quick)
    if key not in _measured:
        _measured[key] = footprint(plan, real, quick)
    counted, why_real = _measured[key]
    return dict(counted), why_real
