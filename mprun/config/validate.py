"""Checks that types cannot express: combinations, names and paths, fields without effect.

Legal values that depend on the machine or on a recipe's class are checked in `assemble/`, where
those are known. The fields of `logger` are checked without the packages of the loggers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import attrgetter
from typing import Any
from urllib.parse import urlsplit

from omegaconf import MISSING

from mprun.config.reference import leaves
from mprun.config.schema import BETAS, DEVICES, OPTIMIZERS, Config, LoggerConfig, TrainConfig
from mprun.errors import UsageError, hint
from mprun.records.layer_values import computes_float16, layer_dtypes
from mprun.records.policy_columns import COMPENSATED, LOW_DTYPES, WIDE_DTYPES
from mprun.records.run_config import OWN_TAGS

STORE = r"databricks(://.*)?|(sqlite|https?|postgresql|mysql|mssql)(\+\w+)?://.*"
"""MLflow's stores; `mysql+pymysql` names a driver, too. That of plain files is on its way out."""
TAG_NAME = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"
LONGEST = 128
"""Characters of a project or of a run's name; W&B takes no longer ones."""


def check_logger_fields(config: LoggerConfig) -> None:
    """Raise `UsageError` for the first field that no logger can use."""
    for key in ("project", "run_name"):
        value = getattr(config, key)
        is_name = value is None or (value.strip() and value.isprintable())
        if not is_name or len(value or "") > LONGEST:
            raise UsageError(
                f"logger.{key}={value!r}: legal is a name of at most {LONGEST} characters without "
                "control characters, or null"
            )
    for name in config.tags:
        if name in OWN_TAGS or re.fullmatch(TAG_NAME, name) is None:
            raise UsageError(
                f"logger.tags.{name}: legal is a name of letters, digits and _.- that begins with "
                "a letter, of at most 64 characters, and is no tag of mprun's own: "
                f"{', '.join(OWN_TAGS)}"
            )
    if config.uri is not None:
        _check_uri(config.uri)


def _check_uri(uri: str) -> None:
    is_store = re.fullmatch(STORE, uri) and uri.isprintable()
    try:
        has_password = urlsplit(uri).password is not None
    except ValueError:  # brackets of an address that do not close
        is_store = has_password = False
    if not is_store:
        raise UsageError(
            f"logger.uri={uri!r} is not an MLflow store; legal: sqlite:///FILE, https://SERVER, "
            "another of its database URIs, or null for a file beside the runs"
        )
    if has_password:
        raise UsageError(
            "logger.uri has a password, and the configuration is recorded; legal is an address "
            "without one: set MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD"
        )


PATHS = {
    "run.dir": "a folder",
    "data.root": "a folder",
    "run.resume": "a folder",
    "precision.layers_file": "a file",
    "train.init_from": "a folder or a file",
    "op_lists.lower_file": "a file",
    "op_lists.fp32_file": "a file",
    "op_lists.promote_file": "a file",
}

NAMES = ("recipe.name", "precision.name", "op_lists.name", "logger.name", "preset.name")
"""Names that the terminal shows; in a resumed folder they may be someone else's."""

SATURATES = (
    "precision.overflow=saturate with a dynamic loss scale, which needs to see the overflows "
    "that saturation hides; legal: loss_scale=static, loss_scale=none"
)


def check(config: Config) -> None:
    """Raise `UsageError` for the first value or combination that cannot be used."""
    for key, field in leaves().items():
        field.check(attrgetter(key)(config))
    _check_training(config.train)
    module, _, name = config.recipe.target.rpartition(".")
    is_path = module and all(part.isidentifier() for part in (*module.split("."), name))
    if config.recipe.file is None and not is_path:
        raise UsageError(
            f"recipe.target={config.recipe.target}: legal is the import path of a class, "
            "module.Class"
        )
    if config.precision.tf32 and (config.precision.layers or config.precision.layers_file):
        raise UsageError(
            f"precision.layers with precision={config.precision.name}: TF32 is switched for the "
            "whole process, not for single modules; legal with every other mode"
        )
    if config.precision.overflow == "saturate" and loss_scale_kind(config) == "dynamic":
        raise UsageError(SATURATES)
    _check_op_lists(config)
    _check_coded_moments(config)
    if config.speed.compile not in (True, False, "auto"):  # its type, bool | str, takes any text
        raise UsageError(f"speed.compile={config.speed.compile}: legal is true, false or auto")
    check_logger_fields(config.logger)
    for key in NAMES:
        if not attrgetter(key)(config).isprintable():
            raise UsageError(
                f"{key}={attrgetter(key)(config)!r}: legal is a name without control characters"
            )
    _check_device(config.device)
    for key, kind in PATHS.items():
        check_name(key, attrgetter(key)(config), kind)


def check_name(key: str, value: str | None, kind: str) -> None:
    """Raise `UsageError` if the value of a key can be no name of "a folder" or "a file"."""
    if value is not None and (not value.strip() or "\0" in value):  # NUL ends a path in C
        raise UsageError(f"{key}={value!r}: legal is the name of {kind}, or null")


def _check_device(device: str) -> None:
    kind, colon, number = device.partition(":")
    if kind not in ("auto", *DEVICES) or (colon and not number.isdecimal()):
        raise UsageError(
            f"device={device}{hint(kind, ('auto', *DEVICES))}; legal: auto, {', '.join(DEVICES)}, "
            "and one of several as cuda:1"
        )


def _check_op_lists(config: Config) -> None:
    lists, precision = config.op_lists, config.precision
    by_lists = precision.casting == "op_lists"
    low, mixed = precision.compute_dtype, precision.param_dtype == "float32"
    if by_lists and (low not in LOW_DTYPES or not mixed or precision.gemms != "none"):
        raise UsageError(
            f"op_lists={lists.name} with precision={precision.name}: op lists choose between "
            "float32 parameters and a 16-bit dtype, without formats of products; legal: "
            "precision=bf16_mixed, precision=fp16_mixed"
        )
    if by_lists == (lists.name == "none"):
        raise UsageError(
            f"op_lists={lists.name} with precision.casting={precision.casting}; legal: "
            "precision.casting=op_lists with op_lists=hmp or other lists"
        )
    given = [key for key in ("lower_file", "fp32_file", "promote_file") if getattr(lists, key)]
    if given and not by_lists:
        raise UsageError(
            f"op_lists.{given[0]} with op_lists=none: a file replaces one of several lists; "
            "name the others, for example op_lists=hmp"
        )


def _check_coded_moments(config: Config) -> None:
    for moment in config.train.optimizer.stored_moments:
        if _is_coded(config, moment) and config.parallel.name == "fsdp2":
            raise UsageError(
                f"precision.{moment}_dtype=uint8 with parallel=fsdp2: codes of 8 bits have a scale "
                "for each 256 numbers of the whole parameter; legal: parallel=ddp, or "
                f"precision.{moment}_dtype=bfloat16"
            )


def _check_training(train: TrainConfig) -> None:
    if train.epochs is None and train.max_steps is None:
        if train.max_time_s is None:
            raise UsageError(
                "the run would never end: set train.epochs, train.max_steps or train.max_time_s"
            )
        if train.scheduler != "none":
            raise UsageError(
                f"train.scheduler={train.scheduler} needs a planned number of steps: "
                "set train.epochs or train.max_steps"
            )
    if train.min_lr > train.lr:
        raise UsageError(f"train.min_lr={train.min_lr}: legal is at most train.lr={train.lr}")


def loss_scale_kind(config: Config, layers: Iterable[str] = ()) -> str:
    """none, static or dynamic; `auto` is dynamic if the mode or a layer computes in float16.

    `layers` are dtypes or modes of layers beyond those of `precision.layers`.
    """
    kind = config.loss_scale.name
    if kind == "auto":
        named = {*config.precision.layers.values(), *layers}
        needs = config.precision.compute_dtype == "float16" or any(map(computes_float16, named))
        kind = "dynamic" if needs else "none"
    return kind


def without_effect(config: Config, given: Sequence[str]) -> Iterator[str]:
    """A sentence for each field in `given` that has no effect in this configuration."""
    reasons = dict(_reasons(config))
    for key in dict.fromkeys(given):  # one sentence for a field that is given twice
        field = "parallel.name" if key == "parallel" else key
        if field in reasons:
            yield f"{key} has no effect: {reasons[field]}"


NEUTRAL = {
    "parallel.name": "none",
    "precision.rounding": "nearest",
    "precision.momentum_dtype": "float32",
    "precision.variance_dtype": "float32",
    "batch.lr_rule": "none",
    "train.optimizer.name": "sgd",
}
"""The values of fields without effect that have no default in the schema."""


def without_inert(
    config: Config, resolved: Mapping[str, Any], unused: Iterable[str] = ()
) -> dict[str, Any]:
    """The configuration that identifies a variant, as plain values.

    Fields without effect, and the `unused`, have the default of the schema or of `NEUTRAL`.
    """
    normalized: dict[str, Any] = copy.deepcopy(dict(resolved))
    default = Config()
    for key in {**dict(_reasons(config)), **dict.fromkeys(unused)}:
        value = NEUTRAL.get(key, attrgetter(key)(default))
        if key == "train.eval_batch_size":  # nothing is evaluated; each recipe states its own
            value = config.train.batch_size
        section, _, name = key.rpartition(".")
        fields = reduce(lambda node, part: node[part], section.split("."), normalized)
        if value != MISSING:  # a field that a group sets has no default here
            fields[name] = value
    low = stored_low(config)
    if config.precision.rounding in COMPENSATED and low == {"momentum"}:
        normalized["precision"]["rounding"] = "stochastic"  # a moment has no remainder
    return normalized


LISTS = ("lower", "fp32", "promote", "cuda_lower", "cuda_fp32", "cuda_promote")
"""Fields of `op_lists` that name ops."""


def _reasons(config: Config) -> Iterator[tuple[str, str]]:
    if config.parallel.world_size == 1:
        one = "there is one process; torchrun --nproc-per-node=N -m mprun ... starts several"
        yield "parallel.name", one
        yield "precision.reduce_dtype", one
    source = config.data.source
    if source != "auto":
        yield "data.fallback", f"it applies to data.source=auto, and data.source={source}"
    if config.data.fallback == "none" and source == "real":
        yield "data.fallback", "data.source=real never falls back"
    yield from _precision_reasons(config)
    if config.op_lists.name == "none":
        for key in (*LISTS, "strict", "verbose", "unlisted"):
            yield f"op_lists.{key}", "op_lists=none casts no op by name"
    if config.batch.factor == 1:
        yield "batch.lr_rule", "the batch is not multiplied (batch.factor=1)"
    yield from _optimizer_reasons(config)


def _optimizer_reasons(config: Config) -> Iterator[tuple[str, str]]:
    if config.train.scheduler == "none":
        yield "train.min_lr", "without train.scheduler the learning rate does not fall"
    optimizer = config.train.optimizer
    arguments = OPTIMIZERS[optimizer.name].arguments
    used = {"name"}.union(*(BETAS.get(x, (x,)) for x in arguments))
    for name in vars(optimizer):
        if name not in used:
            yield f"train.optimizer.{name}", f"{optimizer.name} does not use it"


def _precision_reasons(config: Config) -> Iterator[tuple[str, str]]:
    kind = loss_scale_kind(config)
    for name in ("growth_factor", "backoff_factor", "growth_interval", "floor", "value"):
        if kind == "none" or (kind == "static" and name != "value"):
            yield f"loss_scale.{name}", f"the loss scale of this run is {kind}"
    optimizer, low = config.train.optimizer, stored_low(config)
    nothing = f"precision={config.precision.name} keeps nothing in 16 bits"
    if config.precision.rounding_scope == "update" and low <= {"variance"}:
        always = "a second moment in 16 or 8 bits is always rounded stochastically"
        yield "precision.rounding", always if low else nothing
    moments = optimizer.stored_moments
    yield from _overflow_reasons(config, low, nothing)
    if "momentum" not in moments:
        yield (
            "precision.momentum_dtype",
            "without train.optimizer.momentum no first moment is stored",
        )
    if "variance" not in moments:
        yield "precision.variance_dtype", f"{optimizer.name} keeps no second moment"


def _overflow_reasons(config: Config, low: set[str], nothing: str) -> Iterator[tuple[str, str]]:
    row = config.precision
    # whether 16-bit arithmetic may be emulated: float16 partials depend on the device
    partials = config.execution == "auto" and row.has_low_partials
    wanted = config.execution == "emulated" or row.rounding_scope == "all"
    may_emulate_low = row.compute_dtype in LOW_DTYPES and (wanted or partials)
    if "parameters" in low or may_emulate_low:
        return
    if not low:
        yield "precision.overflow", f"{nothing}, and native kernels never saturate"
    elif all(_is_coded(config, moment) for moment in low):
        yield "precision.overflow", "codes of 8 bits have scales, and never overflow"


def stored_low(config: Config) -> set[str]:
    """Which of "parameters", "momentum" and "variance" are stored in 16 bits between steps.

    The content of `precision.layers_file` is not known here; it may store parameters in 16 bits.
    """
    row = config.precision
    moments = config.train.optimizer.stored_moments
    low = {moment for moment in moments if getattr(row, f"{moment}_dtype") not in WIDE_DTYPES}
    layers = filter(None, (layer_dtypes(value, row.casting) for value in row.layers.values()))
    stored = {row.param_dtype, *(dtype for dtype, _ in layers)}
    if not stored <= {*WIDE_DTYPES} or row.layers_file is not None:
        low.add("parameters")
    return low


def _is_coded(config: Config, moment: str) -> bool:
    """Whether a moment, "momentum" or "variance", is stored in codes of 8 bits."""
    return bool(getattr(config.precision, f"{moment}_dtype") == "uint8")
