"""The first minutes on an accelerator: everything that a machine without one could not show.

    python -m benchmarks.first_hour --out FOLDER [--budget-s 480] [--parts NAME ...] [--toy]
    python -m benchmarks.first_hour --prepare FOLDER [--python 3.12]

Each piece is a process of its own with a time limit, so that a crash, a hang or a wrong answer of
one ends no other; what the budget does not reach is listed as such. Needs no network: `--prepare`
fills a folder with the wheels that such a machine lacks, and mprun's own. Parts, in the order of
how much they tell:

    steps       two recipes in every mode: time of a step, of the host alone, launches and
                synchronizations, seconds of the first step and of compiling, over bf16_mixed
    float8      one layer in 8 bits over bfloat16, by its size
    compile     the first step with an empty cache of compiled code, and with what that left
    tests       tests/gpu: every mode beside the CPU, synchronizations, clocks, memory, bits,
                float8, graphs, one process of ddp and fsdp2
    machine     mprun doctor: rates per format, which modes are native
    commands    do the commands that measure answer there?
    optimizers  benchmarks.optimizers, of one large tensor and of 150 small ones
    speed       recipes that fill the card, mode by mode, in turns with a raw loop
    observe     what watching a loop adds to its step

Writes FOLDER/first_hour.json after every piece and FOLDER/first_hour.md at the end, and prints what
to mend first. `--toy` takes small sizes, to try this on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

import mprun
from benchmarks.alternate import alternate
from benchmarks.raw_loop import Case, compare, of_full_batches, planned
from mprun import observe
from mprun.inspect.step_roofline import layer_us
from mprun.optim import engines
from mprun.precision import backend_flags, devices
from mprun.precision._torch import compiling_s
from mprun.train.assemble import Plan, build_parts
from mprun.train.loop import Limits, Trainer
from mprun.train.machine.doctor_result import Shape
from mprun.train.machine.machine import hardware

ROOT = Path(__file__).resolve().parent.parent
RESULT = "RESULT "
MAX_RATIO = 1.03
"""Of mprun's step to the raw loop's, at the lower end of the interval."""
CASES = {
    "fashion_mnist, batch 256": Case(("recipe=fashion_mnist", "train.batch_size=256"), 50, 8),
    "char_gpt 12 x 768, 1024 x 16": Case(
        (
            *("recipe=char_gpt", "recipe.model.layers=12", "recipe.model.heads=12"),
            *("recipe.model.width=768", "recipe.model.context=1024", "train.batch_size=16"),
        ),
        8,
        8,
    ),
    "resnet50 224, batch 128": Case(
        (
            *("recipe=resnet", "recipe.model.name=resnet50", "recipe.model.image_size=224"),
            "train.batch_size=128",
        ),
        8,
        8,
    ),
}
STEPS = ("char_gpt 12 x 768, 1024 x 16", "fashion_mnist, batch 256")
"""Cases of the part `steps`."""
FIRST, MEASURED = 3, 10
"""Steps before those that are measured, and their number."""
SLOWEST = 1.05
"""A mode that moves fewer bytes than bf16_mixed should not be slower by more than this."""
FEATURES = (1024, 2048, 4096, 8192)
"""Of the layers of the part `float8`, with twice as many samples."""
TOY_CASES = {"linear": Case(("recipe=linear",), 5, 4)}
MODES = (
    *("fp32", "tf32", "bf16_mixed", "fp16_mixed", "bf16_true", "bf16_sr", "half_sr"),
    *("fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_hp"),
)
TOY_MODES = ("fp32", "bf16_sr")


@dataclass
class Hour:
    """What was measured, and the time that is left."""

    out: Path
    device: str
    toy: bool
    end: float
    workplace: Path
    results: dict[str, Any] = field(default_factory=dict)
    mend: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """Further variables of the pieces."""

    @property
    def left_s(self) -> float:
        """Seconds of the budget."""
        return self.end - time.monotonic()

    def run(self, words: Sequence[str], limit_s: float) -> tuple[str, str]:
        """How a Python process ended (ok, failed, too long, no time left), and what it printed."""
        limit_s = min(limit_s, self.left_s)
        if limit_s < 5:
            return "no time left", ""
        try:
            ended = subprocess.run(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=limit_s,
                cwd=self.workplace,
                env={**os.environ, "COLUMNS": "120", **self.environment},
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raw = late.stdout or b""
            return "too long", raw.decode(errors="replace") if isinstance(raw, bytes) else raw
        return ("ok" if ended.returncode == 0 else "failed"), ended.stdout

    def rows(self, what: str, words: Sequence[str], limit_s: float) -> list[dict[str, Any]]:
        """The JSON objects that a process prints after RESULT, and how it failed, if it did."""
        state, said = self.run(words, limit_s)
        lines = [x for x in said.splitlines() if x.startswith(RESULT)]
        found: list[dict[str, Any]] = [json.loads(x.removeprefix(RESULT)) for x in lines]
        return found if state == "ok" else [*found, {"failed": self.note(what, state, said)}]

    def own(self, *words: str) -> list[str]:
        """The words of a process that measures one thing: see `_is_one`."""
        given = ["-m", "benchmarks.first_hour", *words, "--device", self.device]
        return [*given, *(["--toy"] if self.toy else [])]

    def note(self, what: str, state: str, said: str) -> str:
        """Put a failure on the list of what to mend; its last line."""
        last = next((x.strip() for x in reversed(said.splitlines()) if x.strip()), "")
        text = f"{state}: {last[:200]}"
        if state != "no time left":
            self.mend.append(f"{what} {text}")
            with (self.out / "logs.txt").open("a", encoding="utf-8") as log:
                log.write(f"## {what}: {state}\n{said[-4000:]}\n\n")
        return text

    def save(self) -> None:
        """Write what is known so far."""
        content = {
            "date": str(date.today()),
            "device": self.device,
            "hardware": hardware(torch.device(self.device), []).name,
            "torch": str(torch.__version__),
            "python": sys.version.split()[0],
            "mprun": mprun.__version__,
            "toy": self.toy,
            "parts": self.results,
            "mend_first": self.mend,
        }
        text = json.dumps(content, indent=1)
        (self.out / "first_hour.json").write_text(text, encoding="utf-8")


def steps(hour: Hour) -> Any:
    """A step in every mode, and what the host adds to it."""
    table: dict[str, Any] = {}
    for case in TOY_CASES if hour.toy else STEPS:
        modes = TOY_MODES if hour.toy else MODES
        rows = hour.rows(f"steps of {case}", hour.own("--one-steps", case, *modes), 150)
        base = next((row["ms"] for row in rows if row.get("mode") == "bf16_mixed"), None)
        for row in rows:
            name = f"{case}, {row.pop('mode', 'end')}"
            row["over bf16_mixed"] = row["ms"] / base if base and "ms" in row else None
            if row.get("synchronizations"):
                hour.mend.append(f"{name}: {row['synchronizations']} synchronizations a step")
            is_ours = any(f", {mode}" in name for mode in ("bf16_sr", "bf16_true", "half_sr"))
            if is_ours and (row["over bf16_mixed"] or 0) > SLOWEST:
                hour.mend.append(f"{name}: {row['over bf16_mixed']:.2f} times bf16_mixed's step")
            table[name] = row
    return table


def float8(hour: Hour) -> Any:
    """A layer in 8 bits over bfloat16, both compiled."""
    if hour.toy:
        return {"left out": "a CPU has no products in 8 bits"}
    rows = hour.rows("float8", hour.own("--one-float8"), 120)
    for row in rows:
        for mode in ("fp8_tensorwise", "fp8_rowwise"):
            if row.get("features", 0) >= 4096 and row.get(mode, 0) > 1:
                hour.mend.append(f"{mode} at {row['features']} features: {row[mode]:.2f}")
    return {str(row.pop("features", "end")): row for row in rows}


def compiling(hour: Hour) -> Any:
    """The first step with an empty cache of compiled code, and with a filled one."""
    case = next(iter(TOY_CASES if hour.toy else STEPS))
    modes = ("bf16_sr",) if hour.toy else ("bf16_sr", "fp8_rowwise")
    table: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        hour.environment = {
            name: f"{folder}/{name}" for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        }
        for cache in ("empty", "filled"):
            for row in hour.rows(f"compile, {cache}", hour.own("--one-steps", case, *modes), 90):
                names = ("first_step_s", "compile_s", "failed")
                kept = {name: row[name] for name in names if name in row}
                table[f"{row.get('mode', 'end')}, {cache} cache"] = kept
        hour.environment = {}
    return table


def machine(hour: Hour) -> Any:
    """The rates of the machine, as doctor measures them."""
    words = ["-m", "mprun", "doctor", f"device={hour.device}", "doctor.json=true"]
    state, said = hour.run([*words, f"doctor.budget_s={1 if hour.toy else 10}"], 120)
    if state != "ok":
        return {"failed": hour.note("mprun doctor", state, said)}
    found = json.loads(said[said.index("{") :])
    return {
        "rates": found["rates"],
        "modes": {row["name"]: row["execution"] for row in found["modes"]},
    }


def tests(hour: Hour) -> Any:
    """The outcome of each test of tests/gpu."""
    report = hour.out / "tests.xml"
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", f"--junitxml={report}"]
    words += ["-k", "bits or clock"] if hour.toy else ["-m", ""]
    state, said = hour.run(words, 420)
    if not report.exists():
        return {"failed": hour.note("tests/gpu", state, said)}
    rows = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        broken = [x for kind in ("failure", "error") for x in case.findall(kind)]
        outcome = "failed" if broken else "skipped" if case.findall("skipped") else "passed"
        why = next((x.get("message", "") for x in (*broken, *case.findall("skipped"))), "")
        rows[name] = {"outcome": outcome, "why": why.splitlines()[0][:200] if why else ""}
        if broken:
            hour.mend.append(f"test {name}: {rows[name]['why']}")
    return rows


def commands(hour: Hour) -> Any:
    """Whether the commands that measure answer, and the first line of each."""
    small = ["data.source=generated", f"device={hour.device}", "train.max_steps=50"]
    asked = {
        "memory": ["memory", "recipe=fashion_mnist", "precision=bf16_mixed", *small[:2]],
        "trace": ["trace", "recipe=mnist", "precision=bf16_mixed", *small[:2]],
        "numerics": ["numerics", "recipe=mnist", *small[:2]],
        "search-ops": ["search-ops", "recipe=mnist", "precision=bf16_mixed", *small[:2]],
        "double": ["double", "recipe=mnist", "precision=bf16_mixed", *small],
        "sweep": ["sweep", "recipe=mnist", "precision=fp32,bf16_mixed", "seeds=2", *small],
        "advise": ["advise", "recipe=mnist", *small],
    }
    names = ("memory", "trace") if hour.toy else tuple(asked)

    def one(name: str) -> tuple[str, Any]:
        began = time.monotonic()
        state, said = hour.run(["-m", "mprun", *asked[name]], 180)
        if state != "ok" or "Traceback (most recent call last)" in said:
            return name, {"failed": hour.note(f"mprun {name}", state, said)}
        first = said.strip().splitlines()[0][:160] if said.strip() else ""
        return name, {"seconds": round(time.monotonic() - began, 1), "first line": first}

    with ThreadPoolExecutor(1 if hour.toy else 4) as pool:
        return dict(pool.map(one, names))


def speed(hour: Hour) -> Any:
    """mprun's step beside a raw loop's, in turns."""
    rows: dict[str, Any] = {}
    for case in TOY_CASES if hour.toy else CASES:
        for mode in TOY_MODES if hour.toy else MODES:
            row = hour.rows(f"speed of {case}, {mode}", hour.own("--one-speed", case, mode), 120)[
                -1
            ]
            rows[f"{case}, {mode}"] = row
            if row.get("low", 0) > MAX_RATIO and not hour.toy:
                hour.mend.append(
                    f"speed of {case}, {mode}: {row['mprun_ms']:.4g} ms, raw {row['raw_ms']:.4g} ms"
                )
            hour.results["speed"] = rows
            hour.save()
    return rows


def observed(hour: Hour) -> Any:
    """A watched loop's step beside the same loop unwatched."""
    return {"12 layers": hour.rows("observe", hour.own("--one-observe"), 120)[-1]}


def optimizers(hour: Hour) -> Any:
    """The lines of benchmarks.optimizers."""
    lines = []
    for size, tensors in ((100_000 if hour.toy else 10_000_000, 1), (64, 150)):
        words = ["--size", str(size), "--tensors", str(tensors)]
        state, said = hour.run(["-m", "benchmarks.optimizers", *words], 150 if hour.toy else 60)
        if state != "ok":
            lines.append(hour.note("benchmarks.optimizers", state, said))
        lines.append(f"{tensors} x {size}")
        lines += [x for x in said.splitlines() if " ratio " in x and not x.startswith("{")]
    return lines


PARTS: Mapping[str, Callable[[Hour], Any]] = {
    "steps": steps,
    "float8": float8,
    "compile": compiling,
    "tests": tests,
    "machine": machine,
    "commands": commands,
    "optimizers": optimizers,
    "speed": speed,
    "observe": observed,
}


def one_steps(name: str, modes: Sequence[str], device: str) -> None:
    """Measure the steps of a case in each mode, in this process."""
    case = {**CASES, **TOY_CASES}[name]
    overrides = (*case.overrides, "data.source=generated", "data.eval_limit=512")
    for mode in modes:
        before_s = compiled_s()
        plan = planned(case._replace(overrides=overrides), mode, device)
        row: dict[str, Any] = {"mode": mode, "execution": plan.execution}
        try:
            with backend_flags(plan.policy):
                row |= measured_steps(plan)
        except Exception as error:  # the other modes follow
            row["failed"] = f"{type(error).__name__}: {error}"[:200]
        row["compile_s"] = compiled_s() - before_s
        print(RESULT + json.dumps(row), flush=True)


def compiled_s() -> float:
    """Seconds of compiling in this process."""
    return compiling_s() + sum(engines.FIRST_LAUNCH_S.values())


def measured_steps(plan: Plan) -> dict[str, Any]:
    """Time of a step, of the host in it, launches and synchronizations: medians."""
    trainer = Trainer(parts := build_parts(of_full_batches(plan)), Limits(None, None, None))
    batch = parts.layout.weighted(next(parts.train.epoch(parts.order.draw(), skip=0)).trained)
    device, on_cuda = plan.device, plan.device.type == "cuda"
    parts.model.train()

    def step() -> tuple[float, float]:
        devices.synchronize(device)
        began = time.perf_counter()
        trainer.optimizer_step(batch)
        host_s = time.perf_counter() - began
        devices.synchronize(device)
        return time.perf_counter() - began, host_s

    first_s = step()[0]
    for _ in range(FIRST):
        step()
    times = [step() for _ in range(MEASURED)]
    row = {"ms": median(x for x, _ in times) * 1e3, "host_ms": median(x for _, x in times) * 1e3}
    with torch.profiler.profile() as profile:
        step()
    names = [event.name for event in profile.events()]
    row["launches"] = sum(1 for x in names if "LaunchKernel" in x)
    if on_cuda:
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.optimizer_step(batch)
    if on_cuda:
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing" in str(x.message) for x in caught)
    return {**row, "synchronizations": waits, "first_step_s": first_s}


def one_float8(device: str) -> None:
    """Measure layers of each size in bfloat16 and in 8 bits, compiled, in this process."""
    for features in FEATURES:
        shape = Shape(2 * features, features, features)
        base = layer_us(shape, None, torch.device(device))
        row = {"features": features, "bfloat16_us": base}
        for mode in ("fp8_tensorwise", "fp8_rowwise"):
            row[mode] = layer_us(shape, mode, torch.device(device)) / base
        print(RESULT + json.dumps(row), flush=True)


def prepare(folder: Path, python: str) -> None:
    """Fill a folder with wheels for a Linux machine with PyTorch and without a network."""
    pip = [sys.executable, "-m", "pip"]
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in (28, 27, 24, 17)]
    chosen = [*platforms, "--platform=manylinux2014_x86_64", f"--python-version={python}"]
    lacking = ["hydra-core", "omegaconf<2.4", "msgspec", "torchao"]
    quiet = ["-q", "--no-deps"]
    download = [*pip, "download", *quiet, "--only-binary=:all:", "--implementation=cp", *chosen]
    subprocess.run([*download, "-d", str(folder), *lacking], check=True)
    # No wheel of this one exists, and mprun's own has its compiled kernels
    own = ["antlr4-python3-runtime==4.9.3", str(ROOT)]
    subprocess.run([*pip, "wheel", *quiet, "-w", str(folder), *own], check=True)
    print(f"there: python3 -m pip install --no-index --no-deps {folder.name}/*.whl")


def one_speed(name: str, mode: str, device: str) -> None:
    """Measure a case in a mode, in this process."""
    case = {**CASES, **TOY_CASES}[name]
    overrides = (*case.overrides, "data.source=generated", "data.eval_limit=512")
    plan = planned(case._replace(overrides=overrides), mode, device)
    with backend_flags(plan.policy):
        row: dict[str, Any] = dict(compare(plan, case.steps, case.blocks))
    row |= {"n": case.blocks, "execution": plan.execution}
    row["peak_bytes"] = devices.peak_bytes(plan.device)
    print(RESULT + json.dumps(row))


def one_observe(device: str, toy: bool) -> None:
    """Measure what watching a loop adds to a step, in this process."""
    where, side, rows = torch.device(device), 64 if toy else 4096, 16 if toy else 8192
    steps, blocks = (3, 4) if toy else (10, 10)
    x = torch.randn(rows, side, device=where)

    def model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        layers = [m for _ in range(12) for m in (torch.nn.Linear(side, side), torch.nn.GELU())]
        made = torch.nn.Sequential(*layers).to(where)
        return made, torch.optim.AdamW(made.parameters(), lr=1e-4, fused=True)

    def train(made: torch.nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> Any:
        while True:
            began = time.perf_counter()
            for _ in range(steps):
                with torch.autocast(where.type, torch.bfloat16):
                    loss = made(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if run is not None:
                    run.log(loss=loss)
            devices.synchronize(where)
            yield (time.perf_counter() - began) / steps

    watched = model()
    with tempfile.TemporaryDirectory() as folder, observe(*watched, out=f"{folder}/run") as run:
        ratio = alternate(train(*model(), None), train(*watched, run), blocks)
    row = {"plain_ms": ratio.base_ms, "observed_ms": ratio.other_ms, "ratio": ratio.ratio}
    print(RESULT + json.dumps({**row, "low": ratio.low, "high": ratio.high, "n": blocks}))


def cell(value: Any) -> str:
    """A value in a table."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "/").replace("\n", " ")[:120]


def page(hour: Hour) -> str:
    """The results as Markdown: what to mend comes first."""
    name = hardware(torch.device(hour.device), []).name
    toy = " (toy sizes: no figure means anything)" if hour.toy else ""
    lines = [f"# The first hour on {name}{toy}", ""]
    lines += [f"Python {sys.version.split()[0]}, PyTorch {torch.__version__}, {date.today()}.", ""]
    lines += ["## Mend first", "", *([f"- {x}" for x in hour.mend] or ["Nothing failed."]), ""]
    for part, found in hour.results.items():
        lines += [f"## {part}", "", *_table(found), ""]
    return "\n".join(lines)


def _table(found: Any) -> list[str]:
    if isinstance(found, dict) and found and all(isinstance(x, dict) for x in found.values()):
        columns = list(dict.fromkeys(key for row in found.values() for key in row))
        head = ["| | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 1)]
        rows = [[name, *(cell(row.get(key)) for key in columns)] for name, row in found.items()]
        return [*head, *(f"| {' | '.join(row)} |" for row in rows)]
    if isinstance(found, dict):
        return [f"- {name}: {cell(value)}" for name, value in found.items()]
    return [f"    {line}" for line in found] if isinstance(found, list) else [cell(found)]


def workplace(scratch: Path) -> Path:
    """Where the pieces run: the checkout, or a copy without mprun where that is installed.

    Python imports from the folder that it runs in; the installed package has compiled kernels.
    """
    if Path(mprun.__file__).resolve().is_relative_to(ROOT):
        return ROOT
    for name in ("benchmarks", "tests", "conf", "recipes", "examples", "docs"):
        shutil.copytree(ROOT / name, scratch / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, scratch / name)
    return scratch


def _is_one(given: argparse.Namespace) -> bool:
    """Whether one measurement was asked for; it is done."""
    if given.prepare is not None:
        prepare(given.prepare.resolve(), given.python)
    elif given.one_speed is not None:
        case, mode = given.one_speed
        one_speed(case, mode, given.device)
    elif given.one_steps is not None:
        one_steps(given.one_steps[0], given.one_steps[1:], given.device)
    elif given.one_float8:
        one_float8(given.device)
    elif given.one_observe:
        one_observe(given.device, given.toy)
    else:
        return False
    return True


def main() -> None:
    """Carry out the parts, or one measurement of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget-s", type=float, default=480)
    parser.add_argument("--prepare", type=Path, metavar="FOLDER")
    parser.add_argument("--python", default="3.12", help="of the machine that is prepared for")
    parser.add_argument("--device", default=str(devices.find("auto")))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--one-speed", nargs=2, metavar=("CASE", "MODE"), help="print one result")
    parser.add_argument("--one-steps", nargs="+", metavar="CASE MODE", help="print results")
    parser.add_argument("--one-float8", action="store_true", help="print results")
    parser.add_argument("--one-observe", action="store_true", help="print one result")
    given = parser.parse_args()
    if _is_one(given):
        return
    if given.out is None:
        parser.error("--out FOLDER is missing")
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        end = time.monotonic() + given.budget_s
        hour = Hour(out, given.device, given.toy, end, workplace(Path(scratch)))
        for name in given.parts:
            began = time.monotonic()
            try:
                hour.results[name] = PARTS[name](hour)
            except Exception as error:  # one part must not end the others
                hour.mend.append(f"part {name}: {type(error).__name__}: {error}")
                hour.results[name] = {"failed": f"{type(error).__name__}: {error}"}
            took = time.monotonic() - began
            print(f"{name}: {took:.0f} s, {hour.left_s:.0f} s left", flush=True)
            hour.save()
    text = page(hour)
    (out / "first_hour.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
