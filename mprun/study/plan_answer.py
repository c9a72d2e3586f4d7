"""What other programs take from a run: its plan as an answer for their loops, its weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mprun.config import compose
from mprun.config.reference import as_text, quoted
from mprun.config.schema import Config, OptimizerConfig
from mprun.config.validate import loss_scale_kind
from mprun.errors import UsageError
from mprun.precision import OpLists
from mprun.precision.policy import policy
from mprun.recipe import Recipe
from mprun.records.listing import RUNS, resolved_last
from mprun.records.mode_names import SHIPPED_MODES
from mprun.records.result import Result
from mprun.records.run_record import read_summary
from mprun.records.training_answer import ListsAnswer, ScaleAnswer, TrainingAnswer
from mprun.study.study import Study
from mprun.train.assemble import Plan, make_plan, recipe_of
from mprun.train.assemble.optimizer import class_of, import_path, options_of
from mprun.train.assemble.recipe_loading import record_of, source_of
from mprun.train.init_from import fill, model_to_fill, weights_of, write_pretrained

# The scale where the configuration names no value; 65536 is GradScaler's own initial scale
INITIAL = {"none": 1.0, "static": 1024.0, "dynamic": 65536.0}


def plan_answer(plan: Plan, notes: tuple[str, ...]) -> TrainingAnswer:
    """What a plan trains in.

    Args:
        plan: of the run.
        notes: where the answer comes from, a line each.
    """
    config, row = plan.config, plan.policy
    # A mode of the user's own has no name that another program could look up: all columns are given
    shipped = policy(row.name).columns() if row.name in SHIPPED_MODES else None
    changes = {k: v for k, v in row.columns().items() if shipped and v != shipped[k]}
    if plan.op_lists is not None:
        changes.pop("casting", None)  # the lists say it
    own = plan.recipe.makes_optimizer
    return TrainingAnswer(
        title=f"{row.name} for recipe {config.recipe.name}",
        notes=notes,
        device=plan.device.type,
        execution=plan.execution,
        mode=row.name,
        columns=row.columns(),
        is_shipped=shipped is not None,
        changes=changes,
        lists=None if plan.op_lists is None else _lists(plan.op_lists),
        layers=dict(plan.layers),
        scale=_scale(config, plan.layers),
        optimizer=None if own else import_path(config.train.optimizer),
        optimizer_args={} if own else _options(config.train.optimizer),
        lr=plan.lr,
        clip_norm=config.train.clip_norm,
        left_out=tuple(_left_out(plan)),
        compile=plan.speed.compile,
    )


def advised_answer(
    study: Study, overrides: Sequence[str], notes: tuple[str, ...]
) -> TrainingAnswer:
    """What the trials of a study's variant, given by its overrides, trained in."""
    config = compose([*overrides, *study.plan.of_trials], study.config_dir).config
    return plan_answer(make_plan(config, (), load=study.load, untrusted=study.untrusted), notes)


def _lists(lists: OpLists) -> ListsAnswer:
    def named(kind: str) -> tuple[str, ...]:
        return tuple(sorted(name for name, rule in lists.rules.items() if rule == kind))

    return ListsAnswer(named("lower"), named("fp32"), named("promote"), lists.first_input)


def _scale(config: Config, layers: Mapping[str, str]) -> ScaleAnswer:
    kind, scale = loss_scale_kind(config, layers.values()), config.loss_scale
    value = 1.0 if kind == "none" else scale.value or INITIAL[kind]
    return ScaleAnswer(
        kind, value, scale.growth_factor, scale.backoff_factor, scale.growth_interval
    )


def _options(config: OptimizerConfig) -> dict[str, Any]:
    """The arguments without lr; of a named class without those that are 0 by its own default."""
    kind = class_of(config)
    options, default = options_of(config, kind), inspect.signature(kind).parameters
    if config.target is not None:
        return options
    # Short code; but AdamW's own default of weight_decay is 0.01, so a 0 there must be written
    return {k: v for k, v in options.items() if v or default[k].default}


def _left_out(plan: Plan) -> Iterator[str]:
    train = plan.config.train
    if plan.batch.accumulate > 1:
        yield f"train.accumulate={plan.batch.accumulate}"
    if train.scheduler != "none" or plan.recipe.makes_schedule:
        name = "the recipe's own" if plan.recipe.makes_schedule else train.scheduler
        yield f"train.scheduler={name}"
    if train.warmup_steps:
        yield f"train.warmup_steps={train.warmup_steps}"


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
    """The model, configuration and weights of a run.

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
    recipe, config = _recipe_of(path, trust)
    model, weights = model_to_fill(recipe), weights_of(path)
    fill(model, weights)
    return SavedModel(model.eval(), config, weights, recipe)


def write_folder(run: Path, weights: Mapping[str, Tensor], target: Path, trust: bool) -> None:
    """Let the model of a run write its weights into a folder.

    Args:
        run: the run's folder.
        weights: of its last checkpoint.
        target: a new or empty folder.
        trust: whether code that lies in the run's folder may run.

    Raises:
        UsageError: the recipe cannot be loaded, or its model cannot write itself.
    """
    recipe, _ = _recipe_of(run, trust)
    write_pretrained(model_to_fill(recipe), weights, target)


def _recipe_of(run: Path, trust: bool) -> tuple[Recipe, Config]:
    """The recipe of a run and its configuration, by the rules of `run.resume`."""
    given = [f"run.resume={quoted(as_text(str(run)))}", f"run.trust={str(trust).lower()}"]
    config = compose(given).config
    source_of(config)  # raises if the file was changed
    return recipe_of(config, None if trust else record_of(run)), config
