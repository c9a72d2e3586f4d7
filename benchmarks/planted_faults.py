"""Is the test suite blind? Plant one fault after another, and see whether a test fails.

    python -m benchmarks.planted_faults --workers 2              all faults: hours
    python -m benchmarks.planted_faults --tests COMMIT NAME ...  these, with the tests of a commit

A suite that passes says little unless it fails where the code is wrong. So each fault of a table
(DeMillo, Lipton, Sayward, "Hints on test data selection", 1978) changes one line as a person might
get it wrong: a sign, an off-by-one, a skipped cast, a dropped term, a forgotten reset. It is found
if a test fails; one that survives names a test to write. The faults were chosen from the code
alone: picked beside the tests, they would show what the tests look at.

The checkout is never changed: faults are planted in a copy of its tracked files, which Python finds
before the installed package (`conf/` and `recipes/` are the installed ones). The mirrored folder of
tests runs first, the whole suite only where that passes. A run beyond `--minutes` counts as found
("hangs"), so they must be ample for the whole suite. A suite that fails without a fault finds all
of them: `--sound` checks that first.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OWN_TEST = "tests/benchmarks/test_planted_faults.py"
"""It fails wherever a fault is planted."""
PASSED, USAGE_ERROR, NO_TESTS = 0, 4, 5
"""Exit statuses of pytest; all others are failures."""


class Fault(NamedTuple):
    """A line that is wrong: `after` in place of `before`, which occurs once in the file."""

    name: str
    file: str
    breaks: str
    before: str
    after: str


# A fault: name, file below mprun/, what breaks; then the text => what replaces it.
TABLE = r"""
ties precision/formats.py Ties go away from zero, not to even.
.add_((1 << (dropped - 1)) - 1) => .add_(1 << (dropped - 1))
kahan-tie precision/rounding.py The remainder of a tie does not fit into 16 bits.
nearest = (pattern + 0x8000) & -0x10000 => nearest = (pattern + 0x7FFF) & -0x10000
weight-format precision/gemms.py Gradients of weights have the format of those of inputs.
getattr(gemms, name), a.reshape => getattr(gemms, name.replace("weight", "input")), a.reshape
same-bits precision/gemms.py Gradients are rounded with the same random bits in every step.
key(self._seed, self._step, SITE, self._site) => key(self._seed, 0, SITE, self._site)
scale-tracker precision/loss_scale.py An overflow does not begin the count of good steps anew.
torch.where(skipped | grows, 0, tracker + 1) => torch.where(grows, 0, tracker + 1)
unscale-narrow precision/loss_scale.py Gradients are unscaled in 16 bits, where small ones vanish.
_replace_gradient(p, p.grad.float()) => _replace_gradient(p, p.grad)
buffers-whole precision/loss_scale.py A skipped step takes back good running statistics too.
torch.where(became & dropped, => torch.where(dropped,
copy-offset precision/emulate.py A view reads the float32 copy from its beginning.
low.stride(), low.storage_offset()) => low.stride(), 0)
frozen precision/layers.py Frozen parameters are trained once the model is converted.
nn.Parameter(new, requires_grad=tensor.requires_grad) => nn.Parameter(new)
stale-cast precision/op_lists/rules.py A weight that is written to keeps its old cast.
is not weight or entry[1] != write_count(weight): => is not weight:
region-off precision/op_lists/table.py A region inside `disable_casts` does not cast.
state.table, state.off = table, False => state.table = table
wide-partials precision/partials.py Partial sums stay float32 from the second block on.
acc = round_(acc + block_sum).float() => acc = acc + block_sum
site-reset precision/emulate.py A step's random bits depend on the steps before it.
self._step, self._last, self.site = step, step, 0 => self._step, self._last = step, step
tf32-bias precision/arithmetic.py The gradient of a convolution's bias is a sum of rounded numbers.
_with_bias_gradient(result, args) if func in CONVOLUTION_BACKWARD else result => result
dampening optim/optimizers.py The first step of SGD is dampened.
isinstance(step, Tensor) else step > 1 => isinstance(step, Tensor) else step > 0
infinite-decay optim/optimizers.py An infinite weight becomes NaN.
decay = w.nan_to_num(0.0, 0.0, 0.0) * h[5] => decay = w * h[5]
root-zero optim/formulas.py Small roots of second moments become 0, and are divided by.
torch.where(floor, codes.clamp(min=1), codes).to(DTYPE) => codes.to(DTYPE)
root-loaded optim/state.py A loaded root is taken for the second moment.
_taken(state, f"{second}_root", True) ** 2 => _taken(state, f"{second}_root", True)
block-bits optim/engines.py Every block of a tensor is rounded with the bits of the first one.
_indices(of_part, first + at - begin) => _indices(of_part, first)
master-narrow optim/masters.py Gradients of masters are unscaled in 16 bits.
p.grad.float() * factor => (p.grad * factor).float()
norm-narrow optim/state.py The norm of float16 gradients overflows.
torch.linalg.vector_norm(g, dtype=torch.float32) => torch.linalg.vector_norm(g)
group-options optim/base.py All groups of parameters take the options of the first one.
*self.hyper(self.param_groups[group], taken) => *self.hyper(self.param_groups[0], taken)
bonferroni study/compare/statistics.py Every p-value is multiplied by the number of tests.
p_values[index] * (len(p_values) - rank) => p_values[index] * len(p_values)
two-sided study/compare/verdicts.py The interval that decides on equivalence has the wrong level.
inside, off = 1 - 2 * equal.level, 1 - apart.level => inside, off = 1 - equal.level, 1 - apart.level
other-hardware study/compare/times.py Times on unlike hardware are compared.
for own, base in native if hardware(own) == hardware(base)] => for own, base in native]
same-speed study/compare/times.py A ratio that is open is called the same speed.
if low > 1 / SAME and high < SAME: => if low > 1 / SAME or high < SAME:
noisy-curve study/compare/equal_quality.py A crossing starts at a loss above the lowest so far.
min(row.loss, before.loss)) => row.loss)
whole-drift study/compare/times.py The median step lies the whole drift from the fast end.
1 / math.sqrt(factor) if => 1 / factor if
earlier-run study/compare/load.py Of two runs of one seed the earlier one counts.
earlier, last[key] = sorted( => last[key], earlier = sorted(
any-split study/compare/verdicts.py The test samples are used although some runs have none.
if has[name] == len(runs) => if has[name]
equal-shares train/loop.py Micro-batches of unlike weight count alike.
share=part.weight / weight, => share=1 / len(batch.parts),
skipped-ever train/loop.py Skipped steps add up over the run, not only those in a row.
_in_a_row + 1 if line.skipped else 0 => _in_a_row + line.skipped
evaluated-weight train/evaluation.py An evaluated loss is weighted by samples, not by what counts.
(part.size, part.weight) for part in own.parts => (part.size, part.size) for part in own.parts
host-random train/checkpoint.py Python's and NumPy's random numbers are not resumed.
devices.restore_host_random_states(own["host_rng"]) => pass
warm-up train/clock.py A run of exactly 100 steps has a short warm-up.
if steps < MANY_STEPS => if steps <= MANY_STEPS
shared-metric train/recipe_metrics.py Training and evaluation add to one metric.
metric = copy.deepcopy(entry.metric) => metric = entry.metric
evaluation-time train/stopwatch.py Training takes the time that evaluation needs.
self._step_s + evaluation_s >= self._ends_at => self._step_s >= self._ends_at
worst-epoch train/recorder.py Of a loss the worst epoch is kept as the best.
score = float(value) if self._metric.higher_is_better else -float(value) => score = float(value)
range-mixed train/init_from.py Weights that float16 casts harm get no warning.
"float16" in (policy.param_dtype, policy.compute_dtype) => policy.param_dtype == "float16"
skipped-last train/recorder.py Only the skipped steps of the last lines are counted.
summary.skipped_steps += sum( => summary.skipped_steps = sum(
"""
ROWS = re.findall(r"^(\S+) (\S+) (.+)\n(.+) => (.+)$", TABLE, re.MULTILINE)
FAULTS = {name: Fault(name, f"mprun/{file}", *rest) for name, file, *rest in ROWS}


def planted(fault: Fault, folder: Path = ROOT) -> str:
    """The text of the fault's file with the fault in it.

    Raises:
        ValueError: the text that it replaces does not occur exactly once.
    """
    text = (folder / fault.file).read_text(encoding="utf-8")
    if (count := text.count(fault.before)) != 1:
        raise ValueError(f"{fault.name}: {fault.before!r} occurs {count} times in {fault.file}")
    return text.replace(fault.before, fault.after)


def copy_checkout(to: Path, tests: str | None) -> None:
    """Copy the tracked files of the checkout; `tests` is the commit whose tests are taken."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    files = [Path(name) for name in listed.stdout.decode().split("\0") if name]
    files += [path.relative_to(ROOT) for path in ROOT.glob("mprun/precision/kernels/_prebuilt.*")]
    for file in files:
        if (ROOT / file).is_file() and not (tests and file.parts[0] == "tests"):
            (to / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, to / file)
    if tests:
        command = ["git", "archive", tests, "tests"]
        archive = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", to], input=archive, check=True)
    (to / OWN_TEST).unlink(missing_ok=True)


class Suite:
    """The tests of a copied checkout."""

    def __init__(self, folder: Path, workers: int, limit_s: float) -> None:
        self.folder, self._workers, self._limit_s = folder, workers, limit_s
        self._environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        self._environment["PYTHONDONTWRITEBYTECODE"] = ""  # the tests start mprun many times
        command = [sys.executable, "-c", "import mprun; print(mprun.__file__)"]
        used = subprocess.check_output(command, cwd="/", env=self._environment, text=True).strip()
        if not Path(used).resolve().is_relative_to(folder):
            sys.exit(f"the copy {folder} is not what Python imports: mprun is {used}")

    def first_failure(self, target: str, *options: str, limited: bool = True) -> str | None:
        """The first test below `target` that fails, or "hangs"; None if all pass."""
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-q"]
        command += ["-n", str(self._workers), "--dist", "worksteal", *options, target]
        log = self.folder / "pytest.log"  # a pipe would be held open by what a test left running
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(self._limit_s if limited else None)
            except BaseException as error:  # Ctrl-C too
                os.killpg(process.pid, signal.SIGKILL)  # its workers with it
                process.wait()
                if isinstance(error, subprocess.TimeoutExpired):
                    return "hangs"
                raise
        text = log.read_text(encoding="utf-8", errors="replace").strip()
        if status == USAGE_ERROR:
            sys.exit(f"pytest cannot run {target}: {text[-2000:]}")
        if status in (PASSED, NO_TESTS):
            return None
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.MULTILINE)
        return failed[1] if failed else f"pytest ended with {status}: {text[-200:]}"

    def finds(self, fault: Fault, exhaustive: bool) -> str | None:
        """The first test that fails with the fault; None if it survives."""
        path = self.folder / fault.file
        before, package = path.read_text(encoding="utf-8"), fault.file.split("/")[1]
        mirrored = f"tests/{package}"
        targets = [x for x in (mirrored, "tests") if (self.folder / x).is_dir()]
        try:
            path.write_text(planted(fault, self.folder), encoding="utf-8")
            failed = next(filter(None, map(self.first_failure, targets)), None)
            for target in targets if exhaustive else ():
                failed = failed or self.first_failure(target, "-m", "exhaustive", limited=False)
            return failed
        finally:
            path.write_text(before, encoding="utf-8")


def main() -> int:
    """Print a line per fault; 1 if any survived."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="of faults; all by default")
    parser.add_argument("--tests", metavar="COMMIT", help="take the tests of this commit")
    parser.add_argument("--exhaustive", action="store_true", help="ask exhaustive tests too")
    parser.add_argument("--sound", action="store_true", help="first: the suite passes unchanged")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=30.0, help="of a run, at most")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in FAULTS]:
        parser.error(f"no fault {', '.join(unknown)}; legal: {', '.join(FAULTS)}")
    for fault in FAULTS.values():
        planted(fault)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copy is removed
    chosen, found = [FAULTS[name] for name in args.names or FAULTS], 0
    with tempfile.TemporaryDirectory("-mprun", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        copy_checkout(folder, args.tests)
        suite = Suite(folder, args.workers, args.minutes * 60)
        if args.sound and (failed := suite.first_failure("tests")):
            sys.exit(f"without a fault: {failed}")
        for fault in chosen:
            began = time.monotonic()
            failed = suite.finds(fault, args.exhaustive)
            found += failed is not None
            result = f"found by {failed}" if failed else f"SURVIVED: {fault.breaks}"
            print(f"{fault.name:16} {time.monotonic() - began:5.0f} s  {result}", flush=True)
    print(f"found {found} of {len(chosen)}")
    return found < len(chosen)


if __name__ == "__main__":
    sys.exit(main())
