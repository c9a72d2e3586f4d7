"""What every test shares: an empty current folder, remembered results, and sweeps in part.

A sweep over modes, recipes or seeds repeats one behaviour many times. Its few representative
cases run in every test run; the others are marked `exhaustive`:

    @pytest.mark.representative("mnist-fp16_true", "linear-*")
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_one_behaviour(recipe, mode): ...
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from mprun.assemble import Plan, footprint
from mprun.config.compose import OPEN_MAPPINGS
from mprun.config.reference import GROUPS
from mprun.config.schema import RunConfig
from mprun.report.plots import draw

# By name: `mprun.config` exports a function of the module's name.
_compose = importlib.import_module("mprun.config.compose")
_by_hydra = _compose._compose
_composed: dict[tuple[str, ...], DictConfig] = {}
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


def _is_case(item: pytest.Function, case: str | int) -> bool:
    """Whether an id, a pattern of ids or a position is that of this case."""
    if isinstance(case, int):
        return set(item.callspec.indices.values()) == {case}
    pattern = ".*".join(re.escape(part) for part in case.split("*"))
    return re.fullmatch(pattern, item.callspec.id, re.DOTALL) is not None


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder, so that a stray run folder is seen and removed."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(autouse=True)
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember what Hydra composed of the shipped files: it takes 0.15 s, in nearly every test.

    Tests of the composition itself, in tests/config, have a fixture of this name that does nothing.
    """
    monkeypatch.setattr(_compose, "_compose", _remembered)


@pytest.fixture(autouse=True)
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember the memory of a shipped recipe's step: it takes 0.1 s, in every run."""
    monkeypatch.setattr("mprun.run.footprint", _remembered_footprint)


@pytest.fixture(autouse=True)
def native_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """`execution=auto` takes native bfloat16 kernels, however slow they are where tests run."""
    monkeypatch.setattr("mprun.precision.execution.slowdown", lambda dtype, device: 0.5)


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


@pytest.fixture(autouse=True)
def one_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report draws one of its plots: all take a second. Those in tests/report draw all."""
    monkeypatch.setattr("mprun.report.plots.draw", functools.partial(draw, names=["difference"]))


def _remembered(texts: list[str], parsed: list[Any]) -> DictConfig:
    """What Hydra does: choose the files of the groups, then set the fields in turn."""
    fields = [o for o in parsed if o.key_or_group not in GROUPS]
    choices = tuple(text for text in texts if text.partition("=")[0] in GROUPS)
    if len(choices) + len(fields) < len(texts):  # further folders of files
        return _by_hydra(texts, parsed)  # type: ignore[no-any-return]
    try:
        if choices not in _composed:
            _composed[choices] = _by_hydra(list(choices), parsed)
        config = copy.deepcopy(_composed[choices])
        for field in fields:
            new = field.key_or_group.startswith(OPEN_MAPPINGS)
            OmegaConf.update(config, field.key_or_group, field.value(), force_add=new)
    except Exception:  # a mistake: Hydra's own message is explained
        return _by_hydra(texts, parsed)  # type: ignore[no-any-return]
    return config
