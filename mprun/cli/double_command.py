"""`mprun double`: is a doubled batch worth it?

    mprun double recipe=mnist precision=bf16_mixed
    mprun double recipe=fashion_mnist precision=half_sr double.until_oom=true    (CUDA)

The base batch and twice its size with each learning-rate rule, after equal epochs, paired by seed
and judged on validation data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mprun.cli.study_commands import Request, carry_out, held_out, judged, request, seeds_of, tell
from mprun.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from mprun.assemble import DataCache
    from mprun.config import Composed
    from mprun.experiments.sweep import Sweep
    from mprun.experiments.trials import Outcome

SEEDS = 10
BASE = "base"


def double_command(words: list[str]) -> int:
    """Run `mprun double` with what follows these words; the exit status.

    Raises:
        UsageError: anything wrong with the overrides, or a folder that holds something already.
    """
    asked = request("double", words, "double", refused=("compare.baseline", "compare.split"))
    from mprun.assemble import DataCache
    from mprun.experiments.sweep import read_sweep

    load = DataCache()
    if asked.settings.double.until_oom:
        return _until_oom(asked, load)
    resume = asked.resume
    sweep = read_sweep("double", resume) if resume is not None else _new(asked, load)
    outcomes, status = carry_out(sweep, "double", load=load)
    if status is not None:
        return status
    return _judge(asked, sweep, outcomes)


def _judge(asked: Request, sweep: Sweep, outcomes: list[Outcome]) -> int:
    from mprun.cli.compare_command import check, compared, report
    from mprun.experiments.double import double

    how = judged(asked, sweep, outcomes)
    comparison = compared([sweep.folder], how)
    report(comparison, how, sweep.folder)
    found = double(comparison)
    tell(f"\n{found.answer}: {found.reason}")
    check(comparison, how.fail_if.value)
    return EXIT_OK


def _new(asked: Request, load: DataCache) -> Sweep:
    from mprun.assemble import make_plan
    from mprun.config import compose
    from mprun.experiments.double import RULES
    from mprun.experiments.sweep import new_sweep

    for word in asked.words:
        if word.lstrip("+").startswith("batch"):
            raise UsageError(
                f"'{word}': mprun double chooses the batch; train.batch_size is its base"
            )
    composed = compose([*asked.words, "batch=double"], asked.config_dir)
    _check_length(composed)
    chosen = make_plan(composed.config, composed.given, load=load)
    samples, doubled = len(chosen.splits.train), chosen.batch.effective
    if doubled > samples:
        raise UsageError(
            f"the training set has {samples} samples: a batch of {doubled} is no larger than all "
            f"of them; legal: train.batch_size up to {samples // 2}"
        )
    variants = {BASE: [*asked.words, "batch=base"]} | {
        f"double-{rule}": [*asked.words, "batch=double", f"batch.lr_rule={rule}"] for rule in RULES
    }
    seeds, held = seeds_of(asked, SEEDS), held_out(composed, load)
    return new_sweep("double", variants, seeds, asked.folder, asked.config_dir, held)


def _check_length(composed: Composed) -> None:
    train = composed.config.train
    given = {"train.max_steps": train.max_steps, "train.max_time_s": train.max_time_s}
    ends = [f"{key}={value}" for key, value in given.items() if value is not None]
    if ends or train.epochs is None:
        found = ends[0] if ends else "train.epochs=null"
        raise UsageError(
            f"{found}: mprun double compares after equal epochs; legal: train.epochs=N with "
            "train.max_steps=null and train.max_time_s=null"
        )


def _until_oom(asked: Request, load: DataCache) -> int:
    from mprun.assemble import make_plan
    from mprun.config import compose
    from mprun.experiments.batch_trials import BatchTrials
    from mprun.experiments.largest_batch import largest_that_fits

    composed = compose(asked.words, asked.config_dir)
    chosen = make_plan(composed.config, composed.given, load=load)
    if chosen.device.type != "cuda":
        raise UsageError(
            "double.until_oom=true needs device=cuda: a CPU swaps, or is killed, before PyTorch "
            "can say that memory is out; mprun memory counts what a batch needs without running it"
        )
    tried = BatchTrials(asked.words, asked.config_dir, load)
    start, limit = chosen.batch.micro, len(chosen.splits.train)
    found = largest_that_fits(tried.fits, start, limit, asked.settings.double.headroom)
    for line in tried.told:
        tell(line)
    end = " (all of the training set)" if found.is_limited_by_data else ""
    tell(
        f"largest batch found: {found.found}{end}; recommended: train.batch_size="
        f"{found.recommended}, proved by {tried.last_steps} steps"
    )
    return EXIT_OK
