"""`speed=auto`, measured: a short trial chooses memory format and compilation.

Which choice is faster depends on the model, the batch and the machine: channels-last images win on
one CPU and lose on the next. So a few steps of the run itself are timed with each candidate. One
that gains replaces the choice of the table (`machine/speed_choices.py`). The result is saved for
this machine, model and shape: later seeds, and other runs of the same study, use it. Neither random
numbers nor data of the run are touched.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch

from mprun import __version__
from mprun.precision import devices
from mprun.precision.nested import all_tensors
from mprun.train.assemble.parts import build_parts, compile_model
from mprun.train.assemble.plan import Plan
from mprun.train.assemble.planned_memory import has_room_for_another
from mprun.train.data import TensorSet
from mprun.train.data.random_numbers import untouched
from mprun.train.loop import Limits, Trainer
from mprun.train.machine import speed_choices
from mprun.train.machine.machine import cpu_name, usable_cores
from mprun.train.machine.speed_choices import SpeedChoice

ROUNDS = 8
WARM_UP = 2  # Rounds that are not timed: caches fill, and optimizers make their state
SHARE = 0.04  # Of the planned time, the most that a trial takes
MIN_STEPS = 2 * (ROUNDS + WARM_UP) / SHARE  # Shorter runs have no time for two candidates
MIN_GAIN = 0.97  # A ratio of medians above it is within the noise of a few steps
# `speed.compile=auto` tries it where at least this is planned: compiling takes about a minute
COMPILE_FROM_S = 1800.0
SAVED = " (saved by an earlier trial)"


@dataclass(frozen=True)
class Tried:
    """A candidate and its times."""

    choice: SpeedChoice
    times_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)


def with_fastest(plan: Plan) -> Plan:
    """The plan of a new run with the choices that are fastest here, if any can be tried."""
    is_short = plan.planned_steps is not None and plan.planned_steps < MIN_STEPS
    if plan.config.speed.name == "plain" or is_short:
        return plan
    if not isinstance(plan.splits.train, TensorSet):
        return plan  # a loader may be a stream, whose samples are read once
    key = trial_key(plan)
    with speed_choices.choice_lock(key):  # of processes that begin at once, one tries
        if (saved := speed_choices.read_choice(key)) is not None:
            return _with(plan, saved.choice, saved.reason + SAVED)
        return _after_trial(plan, key)


def _after_trial(plan: Plan, key: str) -> Plan:
    """The plan with the result of a trial, which is saved."""
    try:
        with plan.backend_flags(), untouched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself shows them
            result = _tried(plan)
    except Exception:
        return plan  # the run fails in the same way, and reports it
    if result is None:
        return plan
    choice, reason = result
    speed_choices.write_choice(key, speed_choices.SavedChoice(choice, reason))
    return _with(plan, choice, reason)


def _with(plan: Plan, choice: SpeedChoice, reason: str) -> Plan:
    # a saved result may be of a run that left compiling open; what the user sets wins
    if plan.config.speed.compile is True:
        choice = replace(choice, compile=plan.speed.compile)
    elif plan.config.speed.compile is False:
        choice = replace(choice, compile=False)
    return replace(plan, speed=choice, speed_reason=reason)


def _tried(plan: Plan) -> tuple[SpeedChoice, str] | None:
    """The best choice and a sentence about the trial; None where the run is too short for one."""
    first = Stepper(plan, plan.speed)
    first.step_ms()  # the first step allocates
    # the shorter of two, which other processes disturbed less
    step_s = min(first.step_ms(), first.step_ms()) / 1e3
    steps, limit_s = plan.planned_steps, plan.limits.max_time_s
    known = [s for s in (None if steps is None else steps * step_s, limit_s) if s is not None]
    planned_s = min(known, default=0.0)  # of training
    affordable = int(SHARE * planned_s / ((ROUNDS + WARM_UP) * step_s)) - 1
    rest = [c for c in candidates(plan, first, planned_s) if c != plan.speed][: max(affordable, 0)]
    if not rest:
        return None
    steppers = [first, *(Stepper(plan, choice) for choice in rest)]
    return choose_by_times(times(steppers, ROUNDS))


class Stepper:
    """Takes steps of a plan with one choice, on a model of its own."""

    def __init__(self, plan: Plan, choice: SpeedChoice) -> None:
        self.choice = choice
        self._parts = build_parts(replace(plan, speed=choice))
        self.model = self._parts.model
        if choice.compile:
            compile_model(self.model)
        self._trainer = Trainer(self._parts, Limits(None, None, None))
        self.model.train()

    def step_ms(self) -> float:
        """Prepare the first batch, take a step, and wait for it."""
        began = time.perf_counter()
        batch = next(iter(self._parts.train.epoch(None)))
        self._trainer.optimizer_step(batch.trained)
        devices.synchronize(self._parts.train.device)
        return (time.perf_counter() - began) * 1e3


def candidates(plan: Plan, first: Stepper, planned_s: float) -> Iterator[SpeedChoice]:
    """The choices that a trial compares, the plan's own first."""
    own, config = plan.speed, plan.config.speed
    parameters, data = list(first.model.parameters()), plan.splits.train
    if not has_room_for_another(first.model, plan.device):
        return
    yield own
    assert isinstance(data, TensorSet)
    # [B, C, H, W]: a memory format of channels exists only for tensors of 4 dimensions
    images = any(x.dim() == 4 for x in all_tensors(data.inputs))
    if images and any(p.dim() == 4 for p in parameters):
        other = "contiguous" if own.memory_format == "channels_last" else "channels_last"
        yield replace(own, memory_format=other)
    in_fp32 = (plan.policy.name, plan.execution, plan.device.type) == ("fp32", "native", "cpu")
    layers = [m.weight.numel() for m in first.model.modules() if type(m) is torch.nn.Linear]
    is_large = 2 * plan.batch.micro * max(layers, default=0) >= speed_choices.MIN_FLOPS
    if in_fp32 and is_large and plan.config.parallel.world_size == 1:
        yield replace(own, linear_impl="onednn")
    if config.compile == "auto" and planned_s >= COMPILE_FROM_S and plan.why_not_compiled is None:
        yield replace(own, compile=True)


def times(steppers: list[Stepper], rounds: int) -> list[Tried]:
    """Milliseconds of each in turns, without the first rounds, in which caches fill."""
    rows: list[list[float]] = [[] for _ in steppers]
    for n in range(WARM_UP + rounds):
        order = list(enumerate(steppers))
        # in turns, so that a machine that becomes slower does so for each; in both orders, because
        # a step inherits the caches of the one before
        for i, stepper in order if n % 2 else reversed(order):
            ms = stepper.step_ms()
            if n >= WARM_UP:
                rows[i].append(ms)
    return [Tried(s.choice, tuple(row)) for s, row in zip(steppers, rows, strict=True)]


def choose_by_times(tried: list[Tried]) -> tuple[SpeedChoice, str]:
    """The choice by the times, and a sentence with the reason.

    Candidates differ from the first in one thing each. Those that gain are combined.
    """
    base, *others = tried
    choice = base.choice
    # the fastest last: where two change the same thing, its change stays
    for other in sorted(others, key=lambda t: t.median_ms, reverse=True):
        if gains(base, other):
            changed = {k: v for k, v in vars(other.choice).items() if v != vars(base.choice)[k]}
            choice = replace(choice, **changed)
    rows = "; ".join(f"{t.choice} {t.median_ms:.3g} ms" for t in tried)
    return choice, f"speed: {choice}, by a trial of {len(base.times_ms)} steps each: {rows}"


def gains(base: Tried, other: Tried) -> bool:
    """Whether `other` is faster than `base`, beyond noise."""
    won = sum(b < a for a, b in zip(base.times_ms, other.times_ms, strict=True))
    is_faster = other.median_ms < MIN_GAIN * base.median_ms
    # a median alone may come from a few slow steps of the base
    return is_faster and won >= 0.75 * len(base.times_ms)


def trial_key(plan: Plan) -> str:
    """Identifies machine, versions, model and shapes."""
    config, data = plan.config, plan.splits.train
    assert isinstance(data, TensorSet)
    shapes = [[*x.shape[1:], str(x.dtype)] for x in all_tensors(data.content)]
    sections = (config.op_lists, config.loss_scale, config.train.optimizer)
    facts = {
        "versions": [__version__, str(torch.__version__)],
        "machine": [cpu_name(), usable_cores(), torch.get_num_threads(), str(plan.device)],
        "recipe": asdict(config.recipe),
        "source": None if plan.recipe_source is None else plan.recipe_source.sha256,
        "policy": plan.policy.columns(),
        "mode": [plan.execution, plan.fp32_fallback, plan.layers],
        "sections": [asdict(section) for section in sections],
        "compile": config.speed.compile,
        "batch": asdict(plan.batch),
        "shapes": shapes,
        "table": vars(plan.speed),
    }
    text = json.dumps(facts, sort_keys=True, default=str)  # str: a recipe may have any parameter
    return hashlib.sha256(text.encode()).hexdigest()[:24]  # 96 bits: enough for a file's name
