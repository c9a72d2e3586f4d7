"""Comparisons made by hand, with run folders that hold what their plots are drawn from."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from mprun.records.files import jsonable
from mprun.records.run_record import StepTimes, Substitution, Summary
from mprun.study.compare.comparison import (
    Comparison,
    Estimate,
    Interval,
    Outcome,
    Run,
    Skipped,
    StepPercentiles,
    Variant,
    Verdict,
)
from tests.summaries import example, set_fields

MODES = (
    *("fp32", "bf16_mixed", "half_sr", "tf32", "fp16_mixed", "bf16_true"),
    *("fp16_true", "bf16_sr", "half_sr_full", "bf16_mixed x2", "bf16_mixed+hmp", "bf16_mixed x4"),
)
EMULATED = ("tf32", "half_sr_full")
WORDS: tuple[Outcome, ...] = ("equivalent", "better", "worse", "inconclusive")

HOSTILE = "<script>alert('x')</script>\"&|$\\frac{1}{`[red]_x\x1b[31m\u202e ]]> <!-- {{ 7*7 }}"
"""A label that is markup in every language the report is written in."""


def lines(steps: int = 30, seed: int = 0) -> list[dict[str, Any]]:
    """Steps of a run whose loss falls, a validation at the end."""
    found: list[dict[str, Any]] = [
        {
            "kind": "step",
            "step": n,
            "epoch": 1,
            "loss": 2.0 / (1 + 0.3 * n) + 0.01 * math.sin(n + seed),
        }
        for n in range(1, steps + 1)
    ]
    return [*found, {"kind": "validation", "step": steps, "epoch": 1, "loss": 0.3, "accuracy": 0.9}]


def write_run(folder: Path, rows: list[dict[str, Any]]) -> None:
    """A run's folder with the file that a report reads."""
    folder.mkdir(parents=True)
    text = "".join(json.dumps(jsonable(row)) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


def summary(label: str, seed: int) -> Summary:
    """The summary of a run of 30 full batches."""
    found = example()
    set_fields(found, variant=label, precision=label.split(" ")[0], seed=seed, batch_size=128)
    found.execution = "emulated" if label in EMULATED else "native"
    found.step_time_ms = StepTimes(median=10.0, p10=9.0, p90=11.0, n=27, warmup=3)
    return found


def variant(label: str, index: int, folder: Path | None = None, seeds: int = 3) -> Variant:
    """A row with figures that differ with `index`; with run folders where `folder` is given."""
    runs = []
    for seed in range(seeds):
        path = (folder or Path("runs")) / f"{index}-{seed}"
        if folder is not None:
            write_run(path, lines(seed=seed))
        runs.append(Run(path, summary(label, seed)))
    native, many = label not in EMULATED, seeds > 1

    def estimate(value: float, half: float) -> Estimate:
        around = Interval(value - half, value + half) if many else None
        return Estimate(value, around, seeds)

    first = index == 0
    word: Outcome = "baseline" if first else WORDS[(index - 1) % 4]
    compared, timed = not first, not first and native
    time_ms, peak = 12.5 / (1 + 0.1 * index), (64 - 3 * index) * 2**20
    return Variant(
        label=label,
        variant_hash=f"{index:012x}",
        precision=label.split(" ")[0],
        execution="native" if native else "emulated",
        runs=tuple(runs),
        failed=(),
        step_time_ms=StepPercentiles(time_ms, time_ms * 0.9, time_ms * 1.2),
        step_time_ratio=estimate(1 / (1 + 0.1 * index), 0.03) if timed else None,
        samples_per_second=10_039.25 * (1 + 0.1 * index),
        throughput_ratio=estimate(1 + 0.1 * index, 0.05) if timed else None,
        no_time_verdict="",
        memory_bytes={
            "peak": peak,
            "parameters": peak // 8,
            "buffers": 0,
            "gradients": peak // 8,
            "optimizer_state": peak // 4,
            "activations": peak // 4,
            "temporary": peak // 4,
            "data": 2**25,
            "allocator_peak": None,
        },
        memory_ratio=(64 - 3 * index) / 64 if timed else None,
        metric=estimate(0.9711 - 0.0007 * index, 0.0023),
        difference=estimate(-0.0007 * index, 0.0016) if compared else None,
        equivalence=Interval(-0.0007 * index - 0.0012, -0.0007 * index + 0.0012)
        if compared and many
        else None,
        verdict=Verdict(word, f"what decided about {index}", 4 if word == "inconclusive" else None),
    )


def comparison(count: int, folder: Path | None = None, seeds: int = 3) -> Comparison:
    """A comparison of `count` variants."""
    return Comparison(
        recipe="mnist",
        metric="accuracy",
        split="test",
        higher_is_better=True,
        margin=0.005,
        is_relative=False,
        baseline=MODES[0],
        variants=tuple(variant(MODES[i], i, folder, seeds) for i in range(count)),
        skipped=(),
        data="MNIST (local)",
        hardware="cpu, Some CPU (AVX512), 2 cores",
        code="mprun 0.1.0, torch 2.11.0",
        notes=("A note.",),
    )


def of_losses(found: Comparison) -> Comparison:
    """The same of a regression: the metric a loss, differences shares of the baseline's."""
    return replace(
        found, metric="loss", higher_is_better=False, is_relative=True, margin=0.02, split="train"
    )


def hostile(folder: Path) -> Comparison:
    """A comparison of which every text was written by someone who means ill."""
    base = comparison(3, folder)
    variants = []
    for v in base.variants:
        label = f"{HOSTILE}{v.label}"
        runs = []
        for run in v.runs:
            found = copy.deepcopy(run.summary)
            set_fields(
                found, variant=label, recipe=HOSTILE, started_at=HOSTILE, mprun_version=HOSTILE
            )
            found.versions = {HOSTILE: HOSTILE}
            found.substitutions = [Substitution(op=HOSTILE, dtype=HOSTILE, reason=HOSTILE)]
            runs.append(Run(run.path, found))
        broken = copy.deepcopy(runs[0].summary)
        set_fields(broken, status="failed", error=HOSTILE)
        verdict = replace(v.verdict, reason=HOSTILE)
        failed = (Run(Path(HOSTILE.replace("/", "")), broken),)
        variants.append(replace(v, label=label, runs=tuple(runs), failed=failed, verdict=verdict))
    return replace(
        base,
        recipe=HOSTILE,
        baseline=variants[0].label,
        variants=tuple(variants),
        skipped=(Skipped(Path(HOSTILE.replace("/", "")), HOSTILE),),
        data=HOSTILE,
        hardware=HOSTILE,
        code=HOSTILE,
        notes=(HOSTILE,),
    )
