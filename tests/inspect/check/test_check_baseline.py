"""The baseline of a check: written, read again, and what changed since."""

from dataclasses import replace
from pathlib import Path

import pytest

from mprun.errors import UsageError
from mprun.inspect.check.check import check_modes, plan_check
from mprun.inspect.check.check_baseline import (
    Baseline,
    BaselineFigure,
    changes,
    figures_of,
    read_baseline,
    reference_of,
    updated,
)
from mprun.inspect.check.check_result import CheckRecord, CheckSettings, Finding

RECIPE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x)) * {scale}


def model():
    return nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 1))


def data():
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return {{"train": (x, x.sum(1, keepdim=True)), "validation": None}}


def loss(output, batch):
    return nn.functional.mse_loss(output, batch[1])
"""
MODES = "precision=fp32,bf16_mixed"
BF16 = "bf16_mixed"


def recipe(folder: Path, scale: float = 1.0) -> str:
    """A recipe with a block whose outputs are scaled; its file has another name for each scale."""
    path = folder / f"scaled{str(scale).replace('.', '_')}.py"
    path.write_text(RECIPE.format(scale=scale))
    return f"recipe={path}"


def figures(*overrides: str) -> Baseline:
    modes = plan_check(overrides, None, CheckSettings())
    return replace(
        reference_of(modes[0]), modes={mode.checks.label: figures_of(mode) for mode in modes}
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    return figures(recipe(tmp_path_factory.mktemp("base")), MODES)


def named(old: Baseline, new: Baseline, mode: str = BF16) -> list[tuple[str, str]]:
    new = replace(new, recipe=old.recipe)
    return [(x.kind, x.module) for x in changes(old, new, mode)]


def test_the_same_recipe_gives_the_same_text_and_no_change(tmp_path: Path, base: Baseline) -> None:
    again = figures(recipe(tmp_path), MODES)
    assert again.text == base.text
    assert [named(base, again, mode) for mode in base.modes] == [[], []]


def test_a_file_says_what_was_written(tmp_path: Path, base: Baseline) -> None:
    path = tmp_path / "mprun-baseline.json"
    path.write_text(base.text)
    read = read_baseline(path)
    assert read is not None
    assert read.text == base.text
    assert list(changes(read, base, BF16)) == []
    assert max(map(len, base.text.splitlines())) < 100  # a change is a line of a pull request


def test_a_changed_module_is_named_with_its_class(tmp_path: Path, base: Baseline) -> None:
    other = figures(recipe(tmp_path, 1.25), MODES)
    assert named(base, other) == [("changed", "1")]
    found = next(iter(changes(base, replace(other, recipe=base.recipe), BF16)))
    assert "code of Block" in found.text
    assert found.severity == "error"


def test_a_module_that_is_gone_or_new_is_a_change(base: Baseline) -> None:
    assert base.reference is not None
    outputs = {name: x for name, x in base.reference.outputs.items() if name != "1.linear"}
    fewer = replace(base, reference=replace(base.reference, outputs=outputs))
    for old, new, said in ((base, fewer, "gone"), (fewer, base, "new")):
        (found,) = changes(old, new, BF16)
        assert (found.kind, found.module) == ("changed", "1.linear")
        assert found.text == f"norm of the output of 1.linear in float64 is {said}"


@pytest.mark.parametrize("override", ["execution=emulated", "precision.overflow=saturate"])
def test_other_arithmetic_of_the_mode_is_explained(
    tmp_path: Path, base: Baseline, override: str
) -> None:
    other = figures(recipe(tmp_path), f"precision={BF16}", override)
    mode = next(iter(other.modes.values()))
    moved = replace(other, machine="another CPU", modes={BF16: mode})
    assert named(base, moved) == []


def test_bits_count_on_the_same_machine_alone(base: Baseline) -> None:
    mode = base.modes[BF16]
    first = mode.losses[0]
    near = BaselineFigure(first.value + first.explained / 2, first.explained)
    modes = {**base.modes, BF16: replace(mode, losses=[near, *mode.losses[1:]])}
    assert named(base, replace(base, modes=modes)) == [("changed", "")]
    elsewhere = replace(base, modes=modes, machine="another CPU")
    assert named(base, elsewhere) == []
    far = BaselineFigure(first.value + 3 * first.explained, first.explained)
    modes = {**base.modes, BF16: replace(mode, losses=[far, *mode.losses[1:]])}
    assert named(base, replace(elsewhere, modes=modes)) == [("changed", "")]


def test_another_dtype_of_an_op_and_more_memory_are_warnings(base: Baseline) -> None:
    mode = base.modes[BF16]
    peak = {**mode.peak_bytes, "peak": 2 * mode.peak_bytes["peak"]}
    peak["activations"] += mode.peak_bytes["peak"]
    other = replace(mode, ops={"linear float32": 3}, peak_bytes=peak)
    found = list(changes(base, replace(base, modes={BF16: other}), BF16))
    assert [x.kind for x in found] == ["casts_changed", "memory_grew"]
    assert {x.severity for x in found} == {"warning"}
    assert "activations" in found[1].text


def test_modes_that_were_not_checked_stay(base: Baseline) -> None:
    only = replace(base, modes={"fp32": base.modes["fp32"]})
    assert set(updated(base, only).modes) == {"fp32", BF16}
    assert updated(replace(base, recipe="other"), only).modes == only.modes


def test_a_mode_without_figures_is_a_warning(base: Baseline) -> None:
    assert named(replace(base, modes={}), base) == [("no_baseline", "")]


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 99}', '{"schema_version": 1}'])
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mprun-baseline.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"mprun-baseline\.json"):
        read_baseline(path)


def test_a_check_writes_compares_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my.py"
    path.write_text(RECIPE.format(scale=1.0))

    def check(update: bool = False, *overrides: str) -> tuple[int, list[Finding]]:
        settings = CheckSettings()
        modes = plan_check([f"recipe={path}", f"precision={BF16}", *overrides], None, settings)
        result = check_modes(modes, settings, update)
        record = result.record
        assert isinstance(record, CheckRecord)
        return result.status, [x for _, x in record.findings if x.check == "baseline"]

    assert check() == (0, [])
    assert check(True)[0] == 0
    assert check() == (0, [])
    status, found = check(False, "seed=3")
    assert status == 1
    assert [x.kind for x in found] == ["changed"]
