"""A run without its training: its plan, for the commands that inspect a step, and its model.

A `PolicyProbe` takes the run's forward and backward pass in another precision, with a model of its
own: the run's weights and running statistics stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mprun.config import Composed, Config, compose
from mprun.config.reference import as_text, quoted
from mprun.errors import MprunError, NotMeasurableError, RunFailedError, UsageError
from mprun.precision import Policy, Precision, StaticLossScale, backend_flags
from mprun.precision.apply import forward_backward
from mprun.precision.execution import choose_fp32_fallback
from mprun.precision.nested import to_dtype
from mprun.precision.policy import policy as policy_of
from mprun.precision.policy import torch_dtype
from mprun.recipe import Recipe
from mprun.records.layer_values import in_rounding, without_formats
from mprun.records.listing import RUNS, resolved_last
from mprun.records.result import Result
from mprun.records.run_record import Summary, read_summary
from mprun.train import checkpoint
from mprun.train.assemble import Plan, make_plan, recipe_of
from mprun.train.assemble.parts import build_arithmetic, build_caster, initial_summary
from mprun.train.assemble.recipe_loading import forget_changed, record_of, source_of
from mprun.train.assemble.speed_trial import with_fastest
from mprun.train.data import Batch
from mprun.train.init_from import fill, model_to_fill, weights_of
from mprun.train.loop import StopRequestedError
from mprun.train.loss_terms import LossTerms
from mprun.train.signals import SignalReceivedError
from mprun.train.user_code import described, model_of
from mprun.watch.updates import own_random_numbers


@dataclass(frozen=True)
class PlannedRun:
    """A plan with the configuration it is made from."""

    command: str
    composed: Composed
    plan: Plan

    @cached_property
    def summary(self) -> Summary:
        """The summary that a record of the run would start with."""
        return initial_summary(self.plan, self.composed.resolved)

    @property
    def warnings(self) -> list[str]:
        """Those of the plan, and one for each field that only a run uses."""
        return [*self.plan.warnings, *unused_fields(self.composed, self.command)]

    def described(self, *names: str) -> dict[str, Any]:
        """Fields of the summary as plain values."""
        return {key: value for key, value in asdict(self.summary).items() if key in names}

    @contextmanager
    def executing(self) -> Iterator[None]:
        """Inside, the plan's steps can run: with its backend flags, and errors in one sentence.

        The `__cause__` of a `RunFailedError` is the error of the model's code.
        """
        try:
            with self.plan.backend_flags():
                yield
        except MprunError:  # it is a sentence for the user already
            raise
        except StopRequestedError:
            raise SignalReceivedError from None
        except NotMeasurableError as error:
            raise UsageError(f"the model cannot be measured: {error}") from None
        except Exception as error:
            reason = described(error, self.plan.policy.name)
            raise RunFailedError(
                f"mprun {self.command} cannot run the model's step: {reason}"
            ) from error


def unused_fields(composed: Composed, command: str) -> list[str]:
    """A warning for each field that the user set and that only a run uses."""
    reason = f"has no effect: mprun {command} does not detect exceptions"
    return [f"{key} {reason}" for key in composed.given if key.startswith("debug.")]


def plan_or_resume(composed: Composed, reload: bool = False) -> tuple[Plan, dict[str, Any] | None]:
    """The plan of a run, and the checkpoint that it resumes from, or None.

    With `reload`, a recipe's file that was changed since it ran in this process runs again.
    """
    if reload:
        forget_changed()
    folder = composed.config.run.resume
    saved = None if folder is None else checkpoint.load(Path(folder))
    plan = make_plan(composed.config, composed.given, saved["choices"] if saved else None)
    # a resumed run repeats its choices: other kernels would give other bits
    return (plan if saved else with_fastest(plan)), saved


def plan_run(composed: Composed, command: str) -> PlannedRun:
    """Plan a run, which cannot be one to resume, for a command that inspects it."""
    if composed.config.run.resume is not None:
        raise UsageError(
            f"mprun {command} starts a new run: leave out run.resume; train.init_from takes a "
            "run's weights"
        )
    return PlannedRun(command, composed, make_plan(composed.config, composed.given))


FLOAT32_MODE = "fp32"  # The policy of the passes that others are compared with


def policy_in(plan: Plan, short: str) -> Policy:
    """The plan's policy with another 16-bit dtype, fp16 or bf16; mixed for a float32 mode."""
    old = plan.policy
    stored_low = old.casting == "none" and old.is_low  # else ops are cast, as in the mixed modes
    policy = policy_of(f"{short}_{'true' if stored_low else 'mixed'}")
    output = policy.output_dtype if old.output_dtype == "float32" else policy.compute_dtype
    casting = old.casting if plan.op_lists else policy.casting  # the run's own lists decide
    return replace(policy, casting=casting, output_dtype=output)


class PolicyProbe:
    """A model like the plan's, in another precision; float32 ignores layers and op lists."""

    def __init__(self, plan: Plan, policy: Policy) -> None:
        is_float32 = policy.name == FLOAT32_MODE
        # The rounding of updates is the run's, and no part of a probe. Nor are product formats.
        layers = {n: in_rounding(x, "nearest") for n, x in without_formats(plan.layers).items()}
        self._plan = replace(
            plan,
            policy=policy,
            execution="native",
            op_lists=None if is_float32 else plan.op_lists,
            layers={} if is_float32 else layers,
            fp32_fallback=choose_fp32_fallback(
                plan.config.speed.name, policy, "native", plan.device
            ),
        )
        self._loss = LossTerms(plan.recipe)
        self.loss = 0.0
        """The mean loss of the last pass, unscaled."""
        self._scale = StaticLossScale(1.0, plan.device)  # `gradients` sets it for each pass
        self._precision = Precision(
            policy,
            device=plan.device,
            execution=build_arithmetic(self._plan),
            loss_scale=self._scale,
            layers=self._plan.layers,
            op_lists=build_caster(self._plan),
        )
        with own_random_numbers([self._scale.tensor]):  # drawing weights must not move the run's
            model = model_of(plan.recipe)
        self.model = self._precision.prepare(model, plan.device, plan.speed.torch_memory_format)

    def gradients(
        self,
        run: nn.Module,
        batch: Batch,
        scale: float = 1.0,
        before_backward: Callable[[Tensor], None] | None = None,
        inside: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext,
    ) -> dict[str, Tensor]:
        """The unscaled gradients of the run's next step, on a batch, in float64, by parameter.

        The weights and buffers of `run`, the run's model, are copied. `scale` is the loss scale;
        `before_backward` is called with the loss of each micro-batch; `inside` makes a region of
        the probe's model, with the run's weights, to compute in.
        """
        self.model.load_state_dict(run.state_dict())  # casts to the dtypes of the probe's policy
        self.model.train()
        self.model.zero_grad()
        self._scale.tensor.fill_(scale)
        # Dropout draws the same numbers as the run's next step, and the run draws them again
        own_numbers = own_random_numbers([self._scale.tensor])
        with own_numbers, backend_flags(self._plan.policy), inside(self.model):
            self._pass(batch, before_backward)
            return {
                name: p.grad.double() / scale  # float64: unscaling must not round or underflow
                for name, p in self.model.named_parameters()
                if p.grad is not None
            }

    def _pass(self, batch: Batch, before_backward: Callable[[Tensor], None] | None) -> None:
        recipe, dtype = self._plan.recipe, torch_dtype(self._plan.policy.input_dtype)
        forward = partial(recipe.forward, self.model)
        self._precision.begin_step(1)
        self.loss = 0.0
        for part in batch.parts:
            inputs, share = to_dtype(part.inputs, dtype), part.weight / batch.weight
            loss, _ = forward_backward(
                self._precision, forward, self._loss, inputs, part.content, share, before_backward
            )
            self.loss += loss.item()


# ---- the model of a run that ended ---------------------------------------------------------------


@dataclass(frozen=True)
class SavedModel:
    """The model of a run's last checkpoint, with what made it."""

    model: nn.Module
    """On the CPU, in evaluation mode, with the weights in the dtypes that the run stored."""
    config: Config  # Of the run: `config.train.lr`
    weights: dict[str, Tensor]  # By the names of `model.state_dict()`
    recipe: Recipe
    """Gives data, loss and metrics; `recipe.forward(model, inputs)` is the run's forward pass."""


def load(run: str | Path | Result, *, trust: bool = False) -> SavedModel:
    """The model, configuration, weights and recipe of a run: `mprun.load("last").model`.

    Args:
        run: its folder, what `mprun.run` returned, or "last" for the newest run below outputs/.
        trust: whether code that lies in the run's folder, or in its study's, may run.

    Raises:
        UsageError: there is no run or no checkpoint, or the recipe cannot be loaded: its file was
            changed since, or is not to be trusted.
    """
    folder = run.folder if isinstance(run, Result) else run
    if not isinstance(folder, str | Path):
        raise UsageError(f"{type(run).__name__} names no run; legal: a folder, a Result, 'last'")
    path = Path(resolved_last(str(folder), *RUNS))
    if not path.is_dir():
        raise UsageError(f"there is no run {path}")
    if read_summary(path).observed:
        raise UsageError(f"{path} was observed: it has no recipe and no checkpoint to load")
    # by the rules of `run.resume`
    given = [f"run.resume={quoted(as_text(str(path)))}", f"run.trust={str(trust).lower()}"]
    config = compose(given).config
    source_of(config)  # raises if the file was changed
    recipe = recipe_of(config, None if trust else record_of(path))
    model, weights = model_to_fill(recipe), weights_of(path)
    fill(model, weights)
    return SavedModel(model.eval(), config, weights, recipe)
