"""The trial of `speed=auto`: what it compares, when it pays, and that it touches nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mprun.config import compose
from mprun.train.assemble import Plan, build_parts, make_plan, speed_trial
from mprun.train.assemble.speed_trial import (
    Stepper,
    Tried,
    candidates,
    choose_by_times,
    trial_key,
    with_fastest,
)
from mprun.train.machine import speed_choices
from mprun.train.machine.speed_choices import SpeedChoice
from tests.waiting import wait_for

SMALL = ["device=cpu", "data.source=generated", "data.train_limit=64", "train.batch_size=4"]
LAST, FIRST = SpeedChoice("channels_last", "fused"), SpeedChoice("contiguous", "fused")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_choices, "_path", lambda key: tmp_path / f"speed_{key}.json")


def planned(*more: str, steps: int = 20_000) -> Plan:
    words = ["recipe=fashion_mnist", *SMALL, f"train.max_steps={steps}", "train.epochs=null", *more]
    return make_plan(compose(words).config, ())


def with_times(monkeypatch: pytest.MonkeyPatch, ms: dict[SpeedChoice, float]) -> list[SpeedChoice]:
    """Steps take these milliseconds; the list gets who steps."""
    stepped: list[SpeedChoice] = []

    def step(stepper: Stepper) -> float:
        stepped.append(stepper.choice)
        return ms[stepper.choice]

    monkeypatch.setattr(Stepper, "step_ms", step)
    return stepped


def test_the_fastest_candidate_is_chosen_recorded_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = with_times(monkeypatch, {LAST: 30.0, FIRST: 20.0})
    plan = planned()
    assert plan.speed == LAST
    found = with_fastest(plan)
    assert found.speed == FIRST
    assert found.speed_reason == (
        "speed: contiguous, fused optimizer, by a trial of 8 steps each: channels_last, fused "
        "optimizer 30 ms; contiguous, fused optimizer 20 ms"
    )
    stepped.clear()
    again = with_fastest(planned("seed=7"))
    assert (again.speed, stepped) == (FIRST, [])
    assert again.speed_reason == f"{found.speed_reason} (saved by an earlier trial)"


@pytest.mark.parametrize(
    "more", [("precision=bf16_mixed",), ("train.batch_size=8",), ("train.optimizer.name=sgd",)]
)
def test_a_result_is_kept_for_this_model_and_shape_alone(more: tuple[str, ...]) -> None:
    assert trial_key(planned(*more)) != trial_key(planned())
    assert trial_key(planned("seed=3", "train.lr=0.5")) == trial_key(planned())


def test_a_short_run_takes_the_choice_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two candidates, ten steps each: 4 % of 500 steps."""
    with_times(monkeypatch, {LAST: 30.0, FIRST: 20.0})
    assert with_fastest(planned(steps=499)).speed_reason is None
    assert with_fastest(planned(steps=500)).speed_reason is not None


def test_of_processes_that_begin_at_once_one_makes_the_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads stand for them: file locks hold between open files, not between processes alone."""
    made: list[int] = []
    asked: list[str] = []
    locked = speed_choices.choice_lock

    @contextlib.contextmanager
    def noted(key: str) -> Iterator[None]:
        asked.append(key)
        with locked(key):
            yield

    def try_all(plan: Plan) -> tuple[SpeedChoice, str]:
        made.append(1)
        wait_for(lambda: len(asked) == 3)  # the others want the trial while it is made
        return FIRST, "the trial"

    monkeypatch.setattr(speed_choices, "choice_lock", noted)
    monkeypatch.setattr(speed_trial, "_tried", try_all)
    plans = [planned(f"seed={seed}") for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(with_fastest, plans))
    assert made == [1]
    assert {plan.speed for plan in found} == {FIRST}


def test_where_nothing_can_be_locked_a_trial_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_choices, "_path", lambda key: tmp_path / "no folder" / "speed.json")
    with_times(monkeypatch, {LAST: 30.0, FIRST: 20.0})
    assert with_fastest(planned()).speed == FIRST


def test_plain_and_failing_runs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("speed=plain")
    assert with_fastest(plan) is plan

    def fails(stepper: Stepper) -> float:
        raise RuntimeError("of the user's code")

    monkeypatch.setattr(Stepper, "step_ms", fails)
    plan = planned()
    assert with_fastest(plan) is plan


def test_a_trial_changes_no_weight_and_no_random_number() -> None:
    plan = planned()
    torch.manual_seed(5)
    before = build_parts(plan).model.state_dict()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert with_fastest(plan).speed_reason is not None
    assert torch.equal(torch.get_rng_state(), state)
    after = build_parts(plan).model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize(
    ("more", "planned_s", "expected"),
    [
        ((), 60.0, ["channels_last fused", "contiguous fused"]),
        (("precision=fp16_mixed",), 60.0, ["contiguous fused", "channels_last fused"]),
        ((), 7200.0, ["channels_last fused", "contiguous fused", "channels_last fused compiled"]),
        (("speed.compile=false",), 7200.0, ["channels_last fused", "contiguous fused"]),
        (("precision=tf32", "execution=emulated"), 7200.0, ["channels_last fused"]),
    ],
)
def test_the_candidates(more: tuple[str, ...], planned_s: float, expected: list[str]) -> None:
    plan = planned(*more)
    rows = [*candidates(plan, Stepper(plan, plan.speed), planned_s)]
    texts = [f"{c.memory_format} {c.optimizer_impl}{' compiled' * c.compile}" for c in rows]
    assert texts[: len(expected)] == expected
    assert ("compiled" in texts[-1]) == ("compiled" in expected[-1])


@pytest.mark.parametrize(
    ("more", "has"),
    [
        ((), False),  # 2 x 4 samples x 4 million weights are too few FLOPs
        (("train.batch_size=8",), True),
        (("train.batch_size=8", "precision=bf16_mixed"), False),  # oneDNN's own already
        (("train.batch_size=8", "precision=tf32", "execution=emulated"), False),
    ],
)
def test_large_linear_layers_in_float32_are_tried_by_onednn(
    more: tuple[str, ...], has: bool
) -> None:
    plan = planned(*more)
    rows = [*candidates(plan, Stepper(plan, plan.speed), 60.0)]
    assert (replace(plan.speed, linear_impl="onednn") in rows) == has


def test_a_short_run_tries_as_many_as_it_can_afford(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three candidates, ten steps each: 4 % of 750 steps."""
    onednn = replace(LAST, linear_impl="onednn")
    stepped = with_times(monkeypatch, {LAST: 30.0, FIRST: 30.0, onednn: 20.0})
    assert with_fastest(planned("train.batch_size=8", steps=749)).speed == LAST
    assert onednn not in stepped
    monkeypatch.setattr(speed_choices, "read_choice", lambda key: None)
    assert with_fastest(planned("train.batch_size=8", steps=750)).speed == onednn


def tried(choice: SpeedChoice, *ms: float) -> Tried:
    return Tried(choice, ms)


def test_noise_is_no_gain() -> None:
    base = tried(FIRST, 10, 10, 10, 10)
    for other in ((9.8, 9.8, 9.8, 9.8), (8, 8, 12, 12), (5, 5, 11, 11)):
        assert choose_by_times([base, tried(LAST, *other)])[0] == FIRST
    assert choose_by_times([base, tried(LAST, 9, 9, 9, 11)])[0] == LAST


def test_gains_in_different_things_are_combined() -> None:
    base = SpeedChoice("contiguous", "forloop")
    rows = [
        tried(base, 10, 10, 10, 10),
        tried(replace(base, memory_format="channels_last"), 8, 8, 8, 8),
        tried(replace(base, optimizer_impl="fused"), 9, 9, 9, 9),
        tried(replace(base, compile=True), 12, 12, 12, 12),
    ]
    assert choose_by_times(rows)[0] == SpeedChoice("channels_last", "fused")


@pytest.mark.parametrize(
    "content",
    [
        b"[1]",
        b'{"choice": {"memory_format": "rows", "optimizer_impl": "fused"}, "reason": "x"}',
        b'{"choice": {"memory_format": "contiguous", "optimizer_impl": "c"}, "reason": "\\u001b"}',
    ],
)
def test_a_damaged_file_counts_as_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "speed_x.json").write_bytes(content)
    assert speed_choices.read_choice("x") is None


def test_what_cannot_be_compiled_is_not() -> None:
    plan = planned("speed.compile=true", "precision=tf32", "execution=emulated")
    assert not plan.speed.compile
    reason = "not compiled: emulated arithmetic rounds op by op"
    assert any(text.startswith(reason) for text in plan.warnings)


def test_compile_is_what_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with_times(monkeypatch, dict.fromkeys((LAST, FIRST, replace(LAST, compile=True)), 1.0))
    assert planned("speed.compile=true").speed == replace(LAST, compile=True)
    assert not planned("speed.compile=false").speed.compile
    monkeypatch.setattr(speed_trial, "_tried", lambda plan: (replace(FIRST, compile=True), "x"))
    assert with_fastest(planned("speed.compile=false")).speed == FIRST
    resumed: dict[str, Any] = {**planned("speed.compile=true").choices}
    words = ["recipe=fashion_mnist", *SMALL]
    assert make_plan(compose(words).config, (), resumed).speed.compile
    resumed |= {"linear_impl": "onednn"}
    assert make_plan(compose(words).config, (), resumed).speed.linear_impl == "onednn"
    del resumed["linear_impl"]  # a checkpoint of an earlier version
    assert make_plan(compose(words).config, (), resumed).speed.linear_impl == "blas"
