"""`mprun`, `mprun compare` and `mprun check` as functions: the same arguments, a `Result` back.

No progress is shown. A mistake raises the error whose text the command prints. A recipe's file that
was changed is read again; what it imports is not.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields as fields_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mprun.cli.arguments import with_last
from mprun.cli.compare_command import COMPARE, compared, parse
from mprun.cli.compare_command import check as check_condition
from mprun.cli.train_command import TRAIN
from mprun.errors import UsageError, printable
from mprun.inspect.check import QUESTION as CHECK
from mprun.inspect.check.check_result import CheckSettings, write_reports
from mprun.records.result import Result

if TYPE_CHECKING:
    from mprun.records.console.fitted_table import FittedTable

    Runs = str | Path | Result | Iterable[str | Path | Result]

PLAIN = re.compile(r"[\w./-]+")  # Texts that Hydra's grammar reads without quotation marks


def run(*overrides: str, **fields: object) -> Result:
    """Train one recipe in one precision, as `mprun` does.

        result = mprun.run("recipe=my.py", "train.lr=0.01", precision="bf16_mixed", seed=0)
        result.record.test.accuracy

    Args:
        overrides: as on the command line: `"recipe=my.py"`, `"train.lr=0.01"`.
        fields: the same by name: `seed=0`; with a dot in the name `**{"train.lr": 0.01}`.

    Returns:
        The run's summary (`record`), its folder (`folder`) and its tables; a notebook shows its
        losses too.

    Raises:
        UsageError: an override, the recipe or the data cannot be used; nothing was started.
        RunFailedError: the run failed; the reason is in its record.
        KeyboardInterrupt: a signal stopped it; its record is complete.
    """
    from mprun.config import compose
    from mprun.study.planned_run import plan_or_resume
    from mprun.train.run import run as carry_out
    from mprun.train.signals import SignalReceivedError, StopSignals

    for text in overrides:
        if not issubclass(type(text), str):  # a mistake such as run({"seed": 0})
            kind = type(text).__name__
            raise UsageError(f"an override of type {kind}; legal: texts such as 'recipe=my.py'")
    composed = compose(with_last(TRAIN, [*overrides, *_overrides(fields)]))
    stop = StopSignals()
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with stop if is_main else nullcontext():  # no other thread may catch signals
            plan, saved = plan_or_resume(composed, reload=True)
            summary, folder = carry_out(plan, composed.resolved, stop, saved=saved)
    except SignalReceivedError:
        raise KeyboardInterrupt(f"stopped by {stop.name} before the run started") from None
    if summary.status != "completed":  # a loop over runs has to end, too
        again = f"mprun.run({f'run.resume={folder}'!r})"
        raise KeyboardInterrupt(f"stopped by {stop.name}; resume with: {again}")
    return _run_result(folder)


def compare(*runs: Runs, **settings: object) -> Result:
    """Compare runs, as `mprun compare` does.

        mprun.compare("outputs/a", "outputs/b", margin=0.01)

    Args:
        runs: results of `mprun.run`, folders, globs, or lists of them; also `"compare.KEY=VALUE"`.
        settings: those of compare: `margin=0.01`. Only with `dir=` a report is written.

    Returns:
        The comparison (`record`), the answer and the table; a notebook shows the plots too.

    Raises:
        UsageError: there is no run, the runs cannot be compared, or a setting is not legal.
        ConditionMetError: `fail_if` is met.
    """
    from mprun.study.report import answer
    from mprun.study.report import comparison_report as shown

    given = {f"compare.{name}": value for name, value in settings.items()}
    paths, how = parse(with_last(COMPARE, [*map(str, _flat(runs)), *_overrides(given)]))
    if how.json is not None:
        raise UsageError("compare.json is of the command mprun compare; here take .record")
    comparison = compared(paths, how)
    check_condition(comparison, how.fail_if)
    if how.dir and how.report:
        from mprun.study.report.exports import write_report  # imports matplotlib

        write_report(comparison, Path(how.dir))
    sentences = map(printable, answer.headline(comparison))
    notes = map(printable, shown.short_notes(comparison))
    terms = "\n".join(map(printable, answer.terms(comparison)))
    parts: list[FittedTable | str] = [*sentences, shown.short_table(comparison), *notes, terms]

    def plots() -> Mapping[str, str]:
        from mprun.study.report.exports import pictures  # imports matplotlib

        return pictures(comparison)

    return Result(comparison, parts, draw=plots)


def check(
    *given: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[Any], Any] | None = None,
    update: bool = False,
    **fields: object,
) -> Result:
    """Check a recipe, or a model, in precision modes, as `mprun check` does.

        mprun.check("recipe=my.py", precision="fp32,bf16_mixed", budget_s=60)
        mprun.check(model, (inputs, target), F.cross_entropy, precision="fp16_mixed")

    Args:
        given: overrides as on the command line; or a model, a batch, and the loss if there is one,
            then overrides. The model may be in any dtype and on any device; each mode gets a copy,
            and nothing of the caller's changes. The batch is a tensor, a tuple or a mapping, whose
            items are the model's arguments; with a loss, the last item of a tuple is the target.
        loss: of the output and the target (the batch, where it is no tuple) the mean, a scalar. It
            may read the model (`model.aux_loss`): it gets that of the copy. None: the output brings
            its own.
        optimizer: makes an optimizer of a model; None: AdamW at 1e-3, or as `train.*` says.
        update: write the baseline instead of comparing with it.
        fields: settings of check (`budget_s=60`), and overrides whose names have no dot
            (`precision="fp32,bf16_mixed"`).

    Returns:
        The findings (`record`, a `CheckRecord` with `findings`); `status` is 1 where there is an
        error. A file is written only for `junit=FILE` or `update=True`.

    Raises:
        UsageError: an override, the recipe or one of the objects cannot be used.
    """
    from mprun.config.settings import take
    from mprun.inspect.check.check import check_modes, plan_check
    from mprun.train.data.random_numbers import untouched

    objects = [x for x in given if not isinstance(x, str)]
    if objects and loss is None and len(objects) > 2:
        *objects, loss = objects
    names = {f.name for f in fields_of(CheckSettings)}
    texts = [x for x in given if isinstance(x, str)]
    modes: Any = fields.pop("precision", None)
    if modes is not None:  # several are a list of overrides, which no quotation marks enclose
        several = modes if isinstance(modes, Iterable) and not isinstance(modes, str) else [modes]
        texts.append(f"precision={','.join(map(str, several))}")
    texts += _overrides({f"check.{k}" if k in names else k: x for k, x in fields.items()})
    taken, overrides = take(with_last(CHECK, texts), CheckSettings)
    settings = taken.own(CheckSettings)
    if objects and len(objects) != 2:
        raise UsageError(f"check got {len(objects)} objects; legal: model, batch, and loss")
    if not objects and not (loss is None and optimizer is None):
        raise UsageError("check: loss and optimizer belong to a model; write check(model, batch)")
    made_of = (*objects, loss, optimizer) if objects else None
    with untouched():  # the caller's random numbers are as before
        modes = plan_check(overrides, None, settings, made_of)
        result = check_modes(modes, settings, update)
    write_reports(result, settings.junit, {})
    return result


def _overrides(fields: Mapping[str, object]) -> list[str]:
    from mprun.config.reference import override_text

    texts = {k: "" if isinstance(x, bool | None) else str(x) for k, x in fields.items()}
    for name, value in fields.items():
        if isinstance(value, Mapping) and "." not in name:
            raise UsageError(
                f"{name}={value!r}: {name} takes no mapping; write its fields with a dot: "
                f"**{ {f'{name}.{key}': x for key, x in value.items()} }"
            )
        is_list = isinstance(value, list) or ("," in texts[name] and "=" not in texts[name])
        if name == "precision" and is_list:
            raise UsageError(
                f"precision={value!r}: a run has one precision; call mprun.run for each, or write "
                "in a shell `mprun sweep recipe=... precision=fp32,bf16_mixed` (seeds and "
                "verdicts), or `mprun -m recipe=... precision=fp32,bf16_mixed`"
            )
    return [
        f"{k}={x if PLAIN.fullmatch(x) else override_text(fields[k])}" for k, x in texts.items()
    ]


def _flat(runs: Iterable[Runs]) -> Iterator[str | Path]:
    """The folders of results, and names as they are."""
    for one in runs:
        if isinstance(one, Result):
            if one.folder is None:
                raise UsageError("this Result is not of a run; legal: those of mprun.run, folders")
            yield one.folder
        elif isinstance(one, str | Path):
            yield one
        elif issubclass(type(one), Iterable):
            yield from _flat(one)
        else:
            kind = type(one).__name__
            raise UsageError(f"a run of type {kind}; legal: results of mprun.run, folders, lists")


def _run_result(folder: Path) -> Result:
    from mprun.config.settings import CompareSettings
    from mprun.records.run_record import read_summary
    from mprun.study.report import tables

    def losses() -> Mapping[str, str]:
        from mprun.study.report.exports import pictures  # imports matplotlib

        return pictures(compared([folder], CompareSettings()), ["loss"])

    summary = read_summary(folder)
    parts: list[FittedTable | str] = [
        "\n".join(tables.header(summary)),
        *tables.closing(summary),
        *(f"warning: {text}" for text in summary.warnings),
        f"record: {folder}",
    ]
    return Result(summary, parts, folder=folder, draw=losses)
