"""Ranges, combinations, and fields without effect."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import yaml

from mprun.config import Config, compose
from mprun.config.reference import leaves, range_text
from mprun.config.schema import BETAS, OPTIMIZERS, OptimizerConfig
from mprun.config.validate import check
from mprun.errors import UsageError
from mprun.recipes.linear import Linear
from mprun.records.run_config import OWN_TAGS
from mprun.train.assemble.dtype_choices import build_policy
from mprun.train.assemble.optimizer import build_optimizer
from mprun.train.machine.speed_choices import SpeedChoice
from tests.each import each

NUMBERS = {key: field.limits for key, field in leaves().items() if field.limits}


LINEAR = compose(["recipe=linear"]).config
OPTIMIZER_DEFAULTS = OptimizerConfig("sgd")
OPTIMIZER_FIELDS = {
    name: {x for argument in row.arguments for x in BETAS.get(argument, (argument,))}
    for name, row in OPTIMIZERS.items()
}


def with_value(key: str, value: float) -> Config:
    """The linear recipe's configuration with one value changed, its type unchecked."""
    config = deepcopy(LINEAR)
    section, _, name = key.rpartition(".")
    setattr(attrgetter(section)(config) if section else config, name, value)
    return config


def is_whole(key: str) -> bool:
    return "whole" in leaves()[key].legal


def edges(key: str) -> tuple[list[float], list[float]]:
    """The values at, or next to, the ends of a field's range: those inside, those outside."""
    allowed = NUMBERS[key]
    inside, outside = [], [-math.inf, math.inf, math.nan]
    for end, is_open, away in (
        (allowed.ge, False, -1),
        (allowed.gt, True, -1),
        (allowed.le, False, 1),
        (allowed.lt, True, 1),
    ):
        if end is None:
            continue
        value = int(end) if is_whole(key) else float(end)
        beyond = value + away if is_whole(key) else math.nextafter(value, away * math.inf)
        outside.append(value if is_open else beyond)
        inside.append(math.nextafter(value, -away * math.inf) if is_open else value)
    return inside, outside


def test_every_number_has_a_range_and_every_range_a_number() -> None:
    numbers = {key for key, field in leaves().items() if "number" in field.legal}
    assert set(NUMBERS) == numbers


@pytest.mark.parametrize("key", NUMBERS)
def test_a_range_ends_where_it_says(key: str) -> None:
    inside, outside = edges(key)
    for value in inside:
        check(with_value(key, value))
    for value in outside:
        with pytest.raises(UsageError) as caught:
            check(with_value(key, value))
        assert str(caught.value) == f"{key}={value}: legal is {range_text(NUMBERS[key])}"


@pytest.mark.parametrize("limit", ["epochs", "max_steps", "max_time_s"])
def test_one_limit_is_enough(limit: str) -> None:
    no_limit = replace(LINEAR.train, epochs=None)
    check(replace(LINEAR, train=replace(no_limit, **{limit: 1})))
    with pytest.raises(UsageError, match="the run would never end"):
        check(replace(LINEAR, train=no_limit))


@pytest.mark.representative("cosine")
@pytest.mark.parametrize("scheduler", ["linear", "cosine"])
def test_a_schedule_needs_planned_steps(scheduler: str) -> None:
    by_time = ["train.max_time_s=1", f"train.scheduler={scheduler}"]
    with pytest.raises(UsageError, match=f"{scheduler} needs a planned number of steps"):
        compose([*by_time, "train.epochs=null"])
    for limit in ("train.epochs=1", "train.max_steps=1"):
        assert compose([*by_time, "train.epochs=null", limit]).config.train.max_time_s == 1


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("run.dir", "a folder"),
        ("data.root", "a folder"),
        ("precision.layers_file", "a file"),
        ("train.init_from", "a folder or a file"),
    ],
)
@pytest.mark.parametrize("name", ["", "  ", "a\0b"])
def test_a_path_has_a_name(key: str, kind: str, name: str) -> None:
    config = deepcopy(LINEAR)
    section, field = key.split(".")
    setattr(getattr(config, section), field, name)
    with pytest.raises(UsageError, match=f"{key}=.*: legal is the name of {kind}, or null"):
        check(config)


@pytest.mark.parametrize("target", ["", "nope", ".Nope", "..a", "a..B", "a.B.", "a b.C", "a.1B"])
def test_a_target_is_an_import_path(target: str) -> None:
    with pytest.raises(UsageError, match=r"legal is the import path of a class, module\.Class"):
        compose([f"recipe.target='{target}'"])


# Fields without effect.

UNUSED = [
    (optimizer, field)
    for optimizer, used in OPTIMIZER_FIELDS.items()
    for field in vars(OPTIMIZER_DEFAULTS)
    if field not in {*used, "name"}
]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["data.source=real", "data.fallback=generated"],
            "data.fallback has no effect: it applies to data.source=auto, and data.source=real",
        ),
        (
            ["batch.lr_rule=linear"],
            "batch.lr_rule has no effect: the batch is not multiplied (batch.factor=1)",
        ),
    ],
)
def test_a_field_without_effect_is_told(overrides: list[str], sentence: str) -> None:
    assert compose(overrides).warnings == (sentence,)


def nothing_kept(mode: str) -> str:
    return f"precision={mode} keeps nothing in 16 bits"


ALWAYS = "a second moment in 16 or 8 bits is always rounded stochastically"
SGD, ADAMW = ([f"train.optimizer.name={name}"] for name in ("sgd", "adamw"))
LAYER, LOW_LAYER = "precision.layers={a: fp32}", "precision.layers={a: bf16}"


@each(
    "words,key,reason",
    [
        (["precision=fp32", LAYER], "rounding=stochastic", nothing_kept("fp32")),
        (["precision=bf16_mixed", LOW_LAYER], "rounding=kahan", nothing_kept("bf16_mixed")),
        ([*ADAMW, "precision.variance_dtype=float16"], "rounding=stochastic", ALWAYS),
        (
            ["precision=fp16_mixed", "loss_scale=none", "execution=native"],
            "overflow=saturate",
            nothing_kept("fp16_mixed"),
        ),
        ([*SGD, "precision=bf16_true"], "variance_dtype=float16", "sgd keeps no second moment"),
    ],
)
def test_a_precision_field_without_effect_is_told(words: list[str], key: str, reason: str) -> None:
    if key.startswith("overflow"):
        reason += ", and native kernels never saturate"
    sentence = f"precision.{key.split('=')[0]} has no effect: {reason}"
    assert compose(["recipe=linear", *words, f"precision.{key}"]).warnings == (sentence,)


@each(
    "words",
    [
        ["precision=bf16_true", "precision.rounding=kahan"],
        ["precision=fp32", LOW_LAYER, "precision.rounding=stochastic"],
        [*ADAMW, "precision.momentum_dtype=bfloat16", "precision.rounding=stochastic"],
        ["precision.momentum_dtype=float16", "train.optimizer.momentum=0.9"],
        ["precision=bf16_mixed", "precision.rounding=stochastic", "precision.rounding_scope=all"],
        *(
            ["precision=fp16_mixed", "loss_scale=static", "precision.overflow=saturate", word]
            for word in ("execution=emulated", "precision.partials_dtype=float16")
        ),
    ],
)
def test_a_precision_field_with_effect_is_not(words: list[str]) -> None:
    assert compose(["recipe=linear", *words]).warnings == ()


@pytest.mark.representative("sgd-alpha", "rmsprop-beta1", "adamw-momentum")
@pytest.mark.parametrize(("optimizer", "field"), UNUSED)
def test_a_parameter_the_optimizer_lacks_is_told(optimizer: str, field: str) -> None:
    name, parameter = f"train.optimizer.name={optimizer}", f"train.optimizer.{field}=0.5"
    sentence = f"train.optimizer.{field} has no effect: {optimizer} does not use it"
    assert compose([name, parameter]).warnings == (sentence,)
    assert compose([name, parameter, parameter]).warnings == (sentence,)


@pytest.mark.representative("*-eager")
@pytest.mark.parametrize("implementation", ["forloop", "eager"])
@pytest.mark.parametrize("optimizer", OPTIMIZER_FIELDS)
@pytest.mark.parametrize(
    "field", [k for k in vars(OPTIMIZER_DEFAULTS) if k not in ("name", "target", "args")]
)
def test_the_optimizers_use_what_the_table_says(
    optimizer: str, field: str, implementation: str
) -> None:
    policy = build_policy(compose([]).config)

    def defaults(config: OptimizerConfig) -> dict[str, object]:
        speed = SpeedChoice("contiguous", implementation)
        recipe, model = Linear(1, 1, 1), torch.nn.Linear(1, 1)
        return build_optimizer(config, recipe, model, 0.1, policy, speed, 0).defaults

    plain = replace(OPTIMIZER_DEFAULTS, name=optimizer)
    changed = replace(plain, **{field: 0.5})
    uses = defaults(plain) != defaults(changed)
    assert uses == (field in OPTIMIZER_FIELDS[optimizer])


@each(
    "overrides",
    [
        [],
        ["data.root=x", "data.fallback=generated"],
        ["data.source=real", "data.root=x"],
        ["batch=double", "batch.lr_rule=linear"],
    ],
)
def test_a_field_with_effect_is_not(overrides: list[str]) -> None:
    assert compose(overrides).warnings == ()


# ---- fields of logger: refused without its package -----------------------------------------------


def refusal(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        compose(["recipe=linear", "logger=mlflow", *words])
    assert "\n" not in str(caught.value)
    return str(caught.value)


NO_ADDRESS = ("runs.db", "./mlruns", "file:///tmp/x", "", "sqlite", "http://[x")
REFUSED = {
    **{f"uri='{uri}'": "legal: sqlite:///FILE, https://SERVER" for uri in NO_ADDRESS},
    **{f"tags={{{name}: x}}": "and is no tag of mprun's own" for name in OWN_TAGS},
    "tags={9a: x}": "legal is a name of letters",
    "project=''": "legal is a name of at most 128",
    f"run_name={'x' * 129}": "legal is a name of at most 128",
    "mode=onlin": "logger.mode is one of offline, online",
}


def test_what_no_logger_can_use_is_refused() -> None:
    for field, message in REFUSED.items():
        assert message in refusal(f"logger.{field}"), field


def test_a_password_does_not_get_into_a_record() -> None:
    message = refusal("logger.uri='postgresql://me:secret@host/db'")
    assert "secret" not in message
    assert "MLFLOW_TRACKING_PASSWORD" in message


def test_the_folder_of_a_resumed_run_does_not_decide_where_figures_go() -> None:
    resolved = compose(["recipe=linear", "logger=mlflow", "logger.uri='http://other'"]).resolved
    folder = Path("run")
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(resolved))
    with pytest.raises(UsageError, match=r"add run\.trust=true, else logger\.uri=null"):
        compose(["run.resume=run"])
    assert compose(["run.resume=run", "run.trust=true"]).config.logger.uri == "http://other"
    assert compose(["run.resume=run", "logger.uri=null"]).config.logger.uri is None
