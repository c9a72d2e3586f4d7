"""What the commands of the docs print, in small: for the form of each example, not its figures.

Either the command itself with little data and few steps, in this process, or, where a verdict must
come out as it does in the docs, the command's last part on records made here. An output may have
more lines than the example shows.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import runpy
import shlex
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from rich.console import Console

from docs.examples import RECIPES, Example
from mprun.cli.main import main
from mprun.inspect.machine_examination import conclusions, findings
from mprun.inspect.search_result import OpSearch, answer_sentence, outcome_table, rows_table
from mprun.records.run_record import AveragedScores, Conditions, Scores, TimeBudget
from mprun.study.advise import advise
from mprun.study.compare.comparison import EqualQuality, Estimate, Interval
from mprun.study.compare.notes import variant_notes
from mprun.study.compare.times import OVERLAPPED
from mprun.study.double import double
from mprun.study.report import tables
from mprun.train.machine.doctor_result import Format, Mode, renderables
from tests.inspect.test_search_result import CONTENT, measure, outcome, row
from tests.study import comparison, variant
from tests.study.compare.folders import write_run
from tests.summaries import example as example_summary
from tests.train.machine import WITH_BF16, measured

SMALL = [
    *("data.source=generated", "device=cpu", "data.train_limit=64", "data.eval_limit=16"),
    *("train.batch_size=16", "train.eval_batch_size=16"),
]
LINEAR = [
    *("recipe.model.in_features=8", "recipe.model.out_features=4", "recipe.model.samples=16"),
    *("train.batch_size=16", "device=cpu"),
]


def printed(*words: str, status: int = 0) -> str:
    """What a command prints, standard error included."""
    shown = io.StringIO()
    with redirect_stdout(shown), redirect_stderr(shown):
        assert main(list(words)) == status, shown.getvalue()
    return shown.getvalue()


def in_small(example: Example, *more: str) -> str:
    """What the command of an example prints with further overrides, which are not shown."""
    words = shlex.split(example.run)[1:]
    text = printed(*words, *more, status=int(example.status))
    for override in more:
        text = text.replace(f" {override}", "")
    return text


def shown(renderables: Iterable[Any]) -> str:
    """Tables and lines as text."""
    file = io.StringIO()
    for part in renderables:
        console = Console(file=file, width=300)
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))
    return file.getvalue()


def program(example: Example) -> str:
    """What the Python program above an example prints."""
    file = io.StringIO()
    text = example.program.replace("num_layers=64", "num_layers=2")  # 10 s
    with redirect_stdout(file):
        exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
    return file.getvalue()


# ---- studies -------------------------------------------------------------------------------------

FP32_MATMULS = [{"op": "aten.mm", "dtype": "float32", "reason": "slow"}]
MODES: dict[str, tuple[float, float, float, dict[str, Any]]] = {
    "fp32": (76.6, 0, 0, {}),
    "bf16_mixed": (24.9, 0.0012, 0.0035, {}),
    "bf16_sr": (23.2, -0.0011, 0.0070, {}),
    "bf16_true": (25.6, -0.0008, 0.0090, {}),
    "fp16_mixed": (91.8, -0.0008, 0.0028, {"substitutions": FP32_MATMULS}),
    "fp16_true": (78.0, -0.0700, 0.0030, {"substitutions": FP32_MATMULS}),
    "half_sr": (75.1, -0.0011, 0.0030, {"substitutions": FP32_MATMULS}),
    "half_sr_full": (94.6, -0.0001, 0.0020, {"execution": "emulated"}),
    "tf32": (198, -0.0009, 0.0028, {"execution": "emulated"}),
    "fp8_tensorwise": (74.3, -0.0032, 0.0110, {"execution": "emulated"}),
    "fp8_rowwise": (73.0, 0.0027, 0.0200, {"execution": "emulated"}),
    "fp8_rowwise_hp": (56.5, 0.0007, 0.0210, {"execution": "emulated"}),
    "mxfp8": (79.3, 0.0031, 0.0220, {"execution": "emulated"}),
    "nvfp4": (118, 0.0042, 0.0230, {"execution": "emulated"}),
}
"""Step time in ms, mean and spread of the difference to fp32's accuracy, other fields."""
PEAKS_MIB = {"fp32": 59, "bf16_mixed": 55}
DEVIATIONS = (-1.5, -1.0, -0.7, -0.4, -0.1, 0.1, 0.4, 0.7, 1.0, 1.5)
"""Of ten seeds: their mean is 0, their standard deviation nearly 1."""


def write_judged(folder: Path, mode: str, seed: int, accuracy: float, **changes: Any) -> None:
    """A run with a curve of validations, of whose averaged weights the accuracy is."""
    none, test = Scores(loss=None, accuracy=None), Scores(loss=1.0, accuracy=accuracy)
    averaged = asdict(AveragedScores(places=5, validation=none, test=test))
    write_run(folder, mode, seed, accuracy=accuracy, averaged=averaged, validations=6, **changes)
    rows = [{"kind": "validation", "step": 10 * k, "epoch": 1, "loss": 2 / k} for k in range(1, 7)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in rows))


def write_study(folder: str, names: Iterable[str] = (), **common: Any) -> None:
    """The runs of a sweep with ten seeds, in which each verdict occurs."""
    for name in names or MODES:
        step_ms, mean, spread, more = MODES[name]
        for seed, deviation in enumerate(DEVIATIONS[: 7 if "8" in name else None]):
            accuracy = 0.8938 + 0.02 * deviation**2 + mean + spread * deviation
            time_ms = step_ms * (1 + 0.02 * (seed % 3))
            write_judged(
                Path(folder, f"{name}-{seed}"),
                name,
                seed,
                accuracy,
                step_ms=time_ms,
                data_time_ms={"median": 0.0, "p90": 0.0},
                memory_bytes={"peak": PEAKS_MIB.get(name, 30) * 2**20},
                **{**common, **more},
            )


@cache
def own_study() -> str:
    """A sweep of a recipe in a file, on a CPU with bfloat16 instructions and without float16's."""
    names = ("fp32", "bf16_mixed", "fp16_mixed", "half_sr", "tf32")
    unknown = dict.fromkeys(field.name for field in fields(Conditions))
    steady: dict[str, Any] = {**unknown, "drift": 1.0}
    modes: Any = {"bf16_mixed": (24.9, -0.0001, 0.0002, {})}
    with patch.dict(MODES, modes), patch.dict(PEAKS_MIB, bf16_mixed=61):
        write_study("my_model", names, recipe="my_model", conditions=steady)
    with patch("mprun.study.report.exports.write_report", lambda *_: [Path("report.html")]):
        return compared("my_model", "compare.dir=outputs/2026-11-29/20-40-18")


def compared(folder: str, *words: str) -> str:
    """What a terminal of 100 columns shows, then what a wide one shows."""
    texts = []
    for columns in ("100", "1000"):
        with patch.dict(os.environ, COLUMNS=columns):
            texts.append(printed("compare", folder, *(words or ["compare.report=false"])))
    return "".join(texts)


@cache
def study() -> str:
    write_study("sweep")
    return compared("sweep")


def advice(_: Example) -> str:
    """The sentence of an advice."""
    ratio = Estimate(0.36, Interval(0.33, 0.39), 5)
    sooner = EqualQuality(9.0, 9.0, Estimate(1.0, None, 5), 1.0, 2.0, ratio, 0, 0.02)
    fast = replace(variant("bf16_mixed", time=(0.36, 0.33, 0.39)), equal_quality=sooner)
    return advise(comparison(fast), {}, "time").sentence


def doubling(_: Example) -> str:
    worse = [variant(f"{n}", "worse", throughput=(1.02, 1.003, 1.04)) for n in range(3)]
    found = double(comparison(*worse))
    return f"{found.answer}: {found.reason}\n"


# ---- a step --------------------------------------------------------------------------------------

FORMATS: dict[str, Format] = {
    "fp32": "float32",
    "tf32": "tf32",
    **dict.fromkeys(("bf16_mixed", "bf16_true", "bf16_sr"), "bfloat16"),
    **dict.fromkeys(("fp16_mixed", "fp16_true", "half_sr", "half_sr_full"), "float16"),
}


def doctor(_: Example) -> str:
    modes = [
        Mode(
            name=name,
            format=format_,
            execution="emulated" if name in ("tf32", "half_sr_full") else "native",
            why_emulated="a reason" if name in ("tf32", "half_sr_full") else None,
            accelerated=None,
            substituted=["matmul"] if format_ == "float16" and name != "half_sr_full" else [],
            loss_scale="dynamic" if format_ == "float16" else "none",
        )
        for name, format_ in FORMATS.items()
    ]
    found = measured(WITH_BF16, {"bfloat16": 4.09, "float16": 0.027}, modes)
    found = replace(found, findings=findings(found), conclusions=conclusions(found))
    return shown(renderables(found))


def memory(example: Example) -> str:
    """Without a search for the largest batch, then with the search for a small model."""
    run = re.sub(" memory.fits=.*", "", example.run)
    words = ["recipe=linear", *LINEAR, "precision=fp32,half_sr", "memory.fits=1MiB"]
    return in_small(replace(example, run=run), "memory.picture=false") + printed(
        "memory", *words, "memory.picture=false"
    )


def numerics(example: Example) -> str:
    words = ["numerics.steps=2", "numerics.warmup=1", "numerics.span=4", "numerics.plots=false"]
    text = in_small(example, *SMALL, *words, "numerics.top=99", "numerics.needed_db=10")
    # which layer is the worst differs from run to run, and so does its kind
    return (
        text + text.replace("(activation ", "(weight ") + text.replace("(weight ", "(activation ")
    )


def time_line(_: Example) -> str:
    """The line of times with each selection of what a run spends time on."""
    names = [field.name for field in fields(TimeBudget)]
    lines = []
    for shares in itertools.product((0.0, 1.0), repeat=len(names)):
        summary = example_summary()
        summary.time_budget_s = TimeBudget(**dict(zip(names, shares, strict=True)))
        summary.wall_time_s = 10.9
        lines.append(tables.time_line(summary))
    return "\n".join(lines)


def search_ops(_: Example) -> str:
    search = msgspec.convert(
        {
            **CONTENT,
            "everything_lower": measure(worst_parameter="places"),
            "rows": [row(name, 2.0, measure()) for name in ("pow", "mean")],
            "answer": outcome("pow"),
        },
        OpSearch,
    )
    return shown([answer_sentence(search), rows_table(search), outcome_table(search)])


def halted(example: Example) -> str:
    """A recipe of the docs, on generated images."""
    run = example.run.replace("--config-dir=mine", f"--config-dir={RECIPES / 'mine'}")
    return printed(*shlex.split(run)[1:], *SMALL, "train.max_steps=20", "train.lr=0.1", status=1)


def checked(example: Example) -> str:
    """A recipe of the docs, on generated images, in the same order of modes."""
    run = example.run.replace("--config-dir=mine", f"--config-dir={RECIPES / 'mine'}")
    return in_small(replace(example, run=run), "data.source=generated", "device=cpu")


def replayed(_: Example) -> str:
    """A loop of the docs, and its saved step."""
    script = str(RECIPES / "pairs.py")
    with redirect_stdout(io.StringIO()):
        runpy.run_path(script, run_name="__main__")
    return printed("replay", "runs/pairs/nonfinite_step_31.pt", script)


# ---- a recipe in a file --------------------------------------------------------------------------


def own_sweep(_: Example) -> str:
    """The comparison of two modes."""
    for mode, step_ms in (("fp32", 130.0), ("bf16_mixed", 65.0)):
        for seed in range(5):
            write_judged(
                Path("own", f"{mode}-{seed}"),
                mode,
                seed,
                0.96 + 0.001 * seed + 0.0001 * (seed % 2) * len(mode),
                step_ms=step_ms * (1 + 0.01 * (seed % 3)),
                memory_bytes={"peak": PEAKS_MIB[mode] * 2**20},
                recipe="spirals",
            )
    return compared("own")


def no_time_verdict() -> str:
    """The note of a comparison whose runs overlapped."""
    overlapped = replace(variant("bf16_mixed"), no_time_verdict=OVERLAPPED)
    return "".join(f"note: {text}\n" for text in variant_notes([overlapped]))


OUTPUTS: dict[str, Callable[[Example], str]] = {
    "answer": lambda _: own_study(),
    "modes": lambda _: own_study(),
    "sweep": lambda _: study(),
    "no-time-verdict": lambda _: no_time_verdict(),
    "advise-answer": advice,
    "double": doubling,
    "doctor": doctor,
    "time": time_line,
    "memory": memory,
    "check": checked,
    "numerics": numerics,
    "numerics-verbose": numerics,
    "trace": lambda example: in_small(example, *LINEAR),
    "search-ops": search_ops,
    "your-model-sweep": own_sweep,
    "halt": halted,
    "replay": replayed,
}  # fmt: skip
"""An example's name to its output; programs are run as they are."""


def output(example: Example) -> str:
    """An output of the example's command."""
    return program(example) if example.program else OUTPUTS[example.example](example)
