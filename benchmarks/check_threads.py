"""Five threads of other projects about gates of low precision, rebuilt small: what is said here.

    python -m benchmarks.check_threads [NAME ...]

golden_losses       Megatron-LM #5061: losses of each GPU type are stored, and an image changed the
                    fifth digit: 61 jobs failed in a day.
widened_tolerances  transformers PR #46036, sglang PR #35795, jax PR #20345: tolerances for
                    bfloat16 are widened by hand until a test passes.
flat_reference      ocannl #523: a run that did not train passed, for its reference hardly moved.
other_cpu           tabpfn-extensions PR #382: a test fails or not by the CPU that a runner has.
mixed_precision     transformers PR #27235: tests of mixed-precision training, never merged.

Each function answers what the gate of its thread says, of sound code and of a fault, and what
`mprun check` or `assert_explained` says of both. The status is 1 where an answer is not the right
one. Run it from the root of the checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mprun
from mprun.errors import EXIT_OPEN

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "check_models"
PATIENT = "check.budget_s=600"  # The answers must not depend on how busy the machine is
HERE = {"OMP_NUM_THREADS": "1"}
ELSEWHERE = {
    "OMP_NUM_THREADS": "2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
"""A CPU without AVX-512 and bfloat16 instructions."""


@dataclass
class Answer:
    """What two gates say of a thread's case."""

    thread: str
    before: list[str] = field(default_factory=list)
    """What the thread's gate says."""
    here: list[str] = field(default_factory=list)
    """What is said here."""
    wrong: list[str] = field(default_factory=list)
    """Answers of ours that are not right."""

    def expect(self, right: bool, text: str) -> None:
        """Note an answer, and whether it is right."""
        self.here.append(text)
        if not right:
            self.wrong.append(text)


# ---- a check in an environment of its own --------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """The end of a `mprun check`."""

    status: int
    findings: list[dict[str, Any]]
    output: str

    def __str__(self) -> str:
        found = ", ".join(
            dict.fromkeys(f"{x['kind']} {x['module']}".strip() for x in self.findings)
        )
        return f"status {self.status}, {found or 'no finding'}"


def checked(folder: Path, environment: dict[str, str], *words: str) -> Checked:
    """Run the command; `check.json` goes to a new folder in `folder`."""
    run = folder / f"run{len(list(folder.iterdir()))}"
    line = [sys.executable, "-m", "mprun", "check", *words, PATIENT, f"run.dir={run}"]
    ended = subprocess.run(
        line,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    file = run / "check.json"
    record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"modes": []}
    findings = [x for mode in record["modes"] for x in mode["findings"]]
    return Checked(ended.returncode, findings, ended.stdout + ended.stderr)


def recipe(name: str, fault: str = "none") -> list[str]:
    """The overrides of a model of `check_models`."""
    return [f"recipe={FOLDER / name}.py", f"recipe.model.fault={fault}"]


def golden(file: Path, mode: str) -> list[str]:
    """A mode's first losses with five decimals, as golden files have them."""
    losses = json.loads(file.read_text(encoding="utf-8"))["modes"][mode]["losses"]
    return [f"{value:.5f}" for value, _ in losses]


# ---- the threads ---------------------------------------------------------------------------------


def golden_losses() -> Answer:
    """One baseline on two machines, and a changed model."""
    answer = Answer("golden_losses")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one, two = folder / "one.json", folder / "two.json"
        words = [*recipe("cnn_batchnorm"), "precision=fp32,bf16_mixed"]
        checked(folder, HERE, *words, f"check.baseline={one}", "--update")
        checked(folder, ELSEWHERE, *words, f"check.baseline={two}", "--update")
        for mode in ("fp32", "bf16_mixed"):
            same = golden(one, mode) == golden(two, mode)
            answer.before.append(f"{mode}: golden losses of five digits {_verdict(same)}")
        other = checked(folder, ELSEWHERE, *words, f"check.baseline={one}")
        answer.expect(other.status == 0 and not other.findings, f"the other machine: {other}")
        # A change of the model itself, in both modes: the last layer starts from other weights.
        changed = checked(folder, ELSEWHERE, *words, f"check.baseline={one}", "seed=1")
        found = any(x["kind"] == "changed" for x in changed.findings)
        answer.expect(found, f"other first weights: {changed}")
    return answer


def _verdict(passed: bool) -> str:
    return "pass" if passed else "fail"


def sound_norm(x: Tensor, weight: Tensor, length: int = 64) -> Tensor:
    """RMSNorm as fused kernels compute it: in float32, rounded once."""
    wide = x.float()
    square = wide.square().sum(-1, keepdim=True) / length
    normal = wide * torch.rsqrt(square + 1e-6)
    return (normal * weight.float()).to(x.dtype)


def eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm of PyTorch's ops, each rounded."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def wrong_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The mean divides by two numbers less, as if they were padding: a factor of 0.984."""
    return sound_norm(x, weight, 62)


TOLERANCES = {"1e-3": 1e-3, "PyTorch's 1.6e-2": 1.6e-2, "the widened 5e-2": 5e-2}
"""Relative tolerances of a test in bfloat16."""


def widened_tolerances() -> Answer:
    """A sound kernel and one with a factor of 0.984, by tolerances and by what is explained."""
    answer = Answer("widened_tolerances")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=generator)
    weight = 1 + 0.1 * torch.randn(64, generator=generator)
    low = x.bfloat16(), weight.bfloat16()
    kernels = {"sound": sound_norm, "wrong": wrong_norm}
    for name, rtol in TOLERANCES.items():
        said = []
        for kind, kernel in kernels.items():
            near = torch.allclose(kernel(*low), eager_norm(*low), rtol=rtol, atol=1e-5)
            said.append(f"{kind} {_verdict(near)}")
        answer.before.append(f"{name}: {', '.join(said)}")
    for kind, kernel in kernels.items():
        try:
            mprun.assert_explained(kernel, x, weight, reference=eager_norm)
            passed, text = True, "pass"
        except AssertionError as error:
            passed, text = False, str(error).splitlines()[0]
        answer.expect(passed == (kind == "sound"), f"{kind}: {text}")
    return answer


def flat_reference() -> Answer:
    """A learning rate of 1e-9: the run agrees with its reference, which does not train either."""
    answer = Answer("flat_reference")
    words, low = recipe("vae"), "train.lr=1e-9"
    losses = {}
    for mode in ("fp32", "bf16_mixed"):
        with tempfile.TemporaryDirectory() as folder:
            where = f"run.dir={Path(folder) / mode}"
            run = mprun.run(*words, low, "train.max_steps=24", where, precision=mode)
            losses[mode] = run.record.train.loss
    near = abs(losses["bf16_mixed"] / losses["fp32"] - 1) < 0.05
    answer.before.append(f"within 5 % of the reference: {_verdict(near)}")
    flat = mprun.check(*words, low, PATIENT, precision="fp32,bf16_mixed")
    modes = [x.label for x in flat.record.modes if "more steps" in x.not_done.get("trains", "")]
    text = f"status {flat.status}, needs more steps: {', '.join(modes) or 'no mode'}"
    answer.expect(flat.status == EXIT_OPEN and len(modes) == 2, text)
    usual = mprun.check(*words, PATIENT, precision="fp32").record
    answer.expect(not usual.findings, f"at its own rate: {len(usual.findings)} findings")
    return answer


def _kinds(mode: Any) -> set[str]:
    return {x.kind for x in mode.findings}


def other_cpu() -> Answer:
    """A test of exact numbers in bfloat16, on CPUs with and without its instructions."""
    answer = Answer("other_cpu")
    code = (
        "import torch; torch.manual_seed(0); x, w = torch.randn(2, 64, 64).bfloat16();"
        "print((x @ w).float().sin().sum().item())"
    )
    numbers = []
    for environment in (HERE, ELSEWHERE):
        own = {**os.environ, **environment}
        line = [sys.executable, "-c", code]
        ended = subprocess.run(line, env=own, capture_output=True, text=True, check=True)
        numbers.append(ended.stdout.strip())
    same = numbers[0] == numbers[1]
    answer.before.append(f"the number that was recorded on the first CPU: {_verdict(same)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for fault, right in (("none", 0), ("expert_of_zeros", 1)):
            words = [*recipe("mixture_of_experts", fault), "precision=bf16_mixed"]
            ends = [checked(folder, environment, *words) for environment in (HERE, ELSEWHERE)]
            texts = list(dict.fromkeys(map(str, ends)))
            good = all(x.status == right for x in ends)
            answer.expect(good, f"{fault}, on both CPUs: {' / '.join(texts)}")
    return answer


def mixed_precision() -> Answer:
    """Training in both mixed modes, of a sound model and with a fault in each."""
    answer = Answer("mixed_precision")
    answer.before.append("no test")
    for fault, mode in (
        ("none", "bf16_mixed"),
        ("none", "fp16_mixed"),
        ("scale_of_other_heads", "bf16_mixed"),
        ("detached_feed_forward", "fp16_mixed"),
    ):
        record = mprun.check(*recipe("transformer", fault), PATIENT, precision=mode).record
        found = [f"{x.kind} {x.module}" for _, x in record.findings]
        right = bool(found) == (fault != "none")
        answer.expect(right, f"{fault} in {mode}: {', '.join(found[:3]) or 'no finding'}")
    return answer


THREADS: dict[str, Callable[[], Answer]] = {
    x.__name__: x
    for x in (golden_losses, widened_tolerances, flat_reference, other_cpu, mixed_precision)
}


def text_of(answer: Answer) -> str:
    """Markdown."""
    lines = [f"## {answer.thread}", ""]
    lines += [f"- there: {x}" for x in answer.before]
    lines += [f"- here: {x}{' (wrong)' if x in answer.wrong else ''}" for x in answer.here]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(THREADS))
    names = parser.parse_args(words).names or list(THREADS)
    if unknown := [x for x in names if x not in THREADS]:
        parser.error(f"no thread {unknown[0]}; legal: {', '.join(THREADS)}")
    wrong = 0
    for name in names:
        answer = THREADS[name]()
        wrong += len(answer.wrong)
        print(text_of(answer), end="\n\n", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
