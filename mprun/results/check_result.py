"""What `mprun check` finds: the list of findings, the record of check.json, its lines. No torch.

Each mode has the same checks, in the order of `CHECKS`; a check that did not fit into the budget is
named as not done and is no success. A finding of severity error ends the command with status 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from msgspec import Meta

from mprun.console.fitted_table import FittedTable, text_column
from mprun.records.policy_columns import Count, Legal, NotNegative, Positive

SCHEMA_VERSION = 1
ERROR, WARNING = "error", "warning"
CHECKS = {
    "trains": "the loss is finite and falls by more than its noise",
    "agrees": "loss, gradients and curve differ from float32's by no more than roundings explain",
    "dtypes": "each part runs, and is stored, in the dtype that the mode says",
    "robust": "how far numbers are from overflow, and which results are noise",
    "fits": "the peak of memory, by category",
    "baseline": "what changed since mprun-baseline.json was written",
}
"""What is checked in each mode."""
SHOWN = 5
"""Findings on the terminal; all are in check.json."""
TARGETS = ("t4", "v100", "a100", "h100", "mps", "cpu-avx2")


@dataclass
class CheckSettings:
    """What a check may take, and what it is held against."""

    budget_s: Positive = 60.0
    """Seconds for all modes; what did not fit is named."""
    steps: Annotated[int, Meta(ge=6)] = 24
    """Training steps of each mode, on a few batches again and again."""
    memory_gib: Positive | None = None
    """The most that a step may take, in GiB; null: only the baseline's is compared."""
    headroom: NotNegative = 2.0
    """Doublings that the largest number must be away from overflow."""
    baseline: str = "mprun-baseline.json"
    """The file of the baseline."""
    targets: list[Annotated[str, Legal(*TARGETS)]] = field(default_factory=list)
    """Other hardware to answer for: [t4, v100, a100, h100, mps, cpu-avx2]."""
    junit: str | None = None
    """The file of a JUnit report, with a case for each mode and check."""
    samples: Count = 64
    """The most samples of a batch."""


class Kind(NamedTuple):
    """A kind of finding."""

    check: str
    """The check that reports it."""
    severity: str
    text: str
    """What it means."""
    example: str
    """Code that is found by it."""
    cure: str
    """What to do."""


KINDS = {
    "step_fails": Kind(
        "trains",
        ERROR,
        "the step raises an error in this mode",
        "h = x.float() @ self.weight.half()",
        "make both of one dtype: torch.zeros(..., dtype=x.dtype), x.to(self.weight.dtype)",
    ),
    "not_finite": Kind(
        "trains",
        ERROR,
        "the loss or a gradient is NaN or infinite",
        "torch.log(p) where p is 0 in float16",
        "compute this op in float32, or bound its input (clamp_min with a value of the format)",
    ),
    "loss_does_not_fall": Kind(
        "trains",
        ERROR,
        "the loss of the same batches falls by no more than its noise",
        "train.lr=1e-9",
        "raise the learning rate, or look at no_gradient and lost_update",
    ),
    "larger_error": Kind(
        "agrees",
        ERROR,
        "an error arises in this module that the roundings of its dtype do not explain",
        "y = x * 0.125 if x.dtype == torch.bfloat16 else x * self.scale",
        "compute in every dtype what float32 computes",
    ),
    "no_gradient": Kind(
        "agrees",
        ERROR,
        "a parameter has a gradient in float32 and none, or zeros, in this mode",
        "y = self.part(x.detach() if x.dtype == torch.float16 else x)",
        "keep the path: no detach, no .data, no cached cast",
    ),
    "far_from_float32": Kind(
        "agrees",
        ERROR,
        "the loss or a gradient of a step is further from float32's than repeated roundings spread",
        "loss / 0.98 in bfloat16",
        "look at this parameter's module in this mode: mprun diff of two runs",
    ),
    "other_curve": Kind(
        "agrees",
        ERROR,
        "the losses leave float32's by more than starts that differ by roundings do",
        "weight decay that acts in one mode",
        "compare whole runs: mprun sweep precision=fp32,MODE seeds=5",
    ),
    "wrong_derivative": Kind(
        "agrees",
        WARNING,
        "in float64 too, a gradient is not the derivative of the loss",
        "a backward of a torch.autograd.Function without its factor",
        "test it by torch.autograd.gradcheck; a stop-gradient that is meant needs no cure",
    ),
    "scale_changes_gradient": Kind(
        "agrees",
        ERROR,
        "a loss scale of a power of two changes the unscaled gradient",
        "p.register_hook(lambda g: g.clamp(-1, 1))",
        "clip after unscaling: train.clip_norm, or scaler.unscale_(optimizer) before",
    ),
    "substituted": Kind(
        "dtypes",
        ERROR,
        "the run has another precision than the one asked for",
        "precision=fp8 on hardware without it, execution=native",
        "choose a mode that this hardware has",
    ),
    "higher_dtype": Kind(
        "dtypes",
        WARNING,
        "a layer with weights runs in float32 where the mode says 16 bits",
        "with torch.autocast('cpu', enabled=False): y = self.linear(x.float())",
        "leave autocast on, or say so: precision.layers={linear: float32}",
    ),
    "lower_dtype": Kind(
        "dtypes",
        ERROR,
        "an op that the mode keeps in float32 runs in 16 bits",
        "loss = -(log_p.bfloat16() * y).sum()",
        "leave out the cast: autocast decides, and sums and losses stay in float32",
    ),
    "cast_undone": Kind(
        "dtypes",
        WARNING,
        "a result is cast to fewer bits and back: a rounding that the mode does not ask for",
        "x = x.bfloat16().float()",
        "leave out both casts",
    ),
    "stored_in_16_bits": Kind(
        "dtypes",
        ERROR,
        "a parameter, buffer or optimizer state has 16 bits where the mode keeps float32",
        "self.register_buffer('positions', torch.arange(4096).bfloat16())",
        "make it in float32; a cast at its use is cheap",
    ),
    "values_of_16_bits": Kind(
        "dtypes",
        WARNING,
        "float32 weights or buffers of which every value has 16 bits: they were rounded before",
        "model.load_state_dict(torch.load('bf16.pt'))",
        "load the float32 checkpoint; for a fine-tuning of 16-bit weights it is meant",
    ),
    "lost_update": Kind(
        "dtypes",
        ERROR,
        "a step leaves most of a module's weights unchanged",
        "model.bfloat16() and AdamW(lr=1e-5)",
        "keep float32 weights (bf16_mixed), or round stochastically (bf16_sr)",
    ),
    "near_overflow": Kind(
        "robust",
        WARNING,
        "the largest number is less than check.headroom doublings from the format's largest",
        "logits of 40,000 in float16",
        "scale them down (1 / sqrt(d), a smaller loss scale), or take bfloat16",
    ),
    "overflow": Kind(
        "robust",
        ERROR,
        "a finite number of float32 is infinite in this format",
        "scores + mask * -1e9 in float16",
        "torch.finfo(scores.dtype).min, or float32 for this op",
    ),
    "vanishing_constant": Kind(
        "robust",
        WARNING,
        "a constant of the code is 0 in this format",
        "x / (norm + 1e-8) in float16",
        "an epsilon of the format (1e-4 in float16), or float32 for this op",
    ),
    "all_noise": Kind(
        "robust",
        ERROR,
        "a result is as large as its error",
        "torch.sin(positions.bfloat16()) at position 3,000; mean(x^2) - mean(x)^2",
        "compute its inputs in float32; subtract before squaring",
    ),
    "float32_is_wrong": Kind(
        "robust",
        ERROR,
        "float32's own loss differs from float64's",
        "E[x^2] - E[x]^2 of numbers around 10,000",
        "another formula: torch.var, log1p, expm1, logsumexp",
    ),
    "memory_grew": Kind(
        "fits",
        WARNING,
        "the peak of a step is larger than the baseline's",
        "a list that keeps outputs of every layer",
        "look at mprun memory; if it is meant: mprun check --update",
    ),
    "over_memory": Kind(
        "fits",
        ERROR,
        "the peak of a step is larger than check.memory_gib",
        "batch_size=4096",
        "a smaller batch, train.accumulate, or a mode with fewer bytes",
    ),
    "changed": Kind(
        "baseline",
        ERROR,
        "loss, gradients or outputs differ from the baseline's by more than roundings explain",
        "a new initialization, another data order",
        "if it is meant: mprun check --update, and let the change be reviewed",
    ),
    "casts_changed": Kind(
        "baseline",
        WARNING,
        "ops run in another dtype than in the baseline",
        "another autocast list of a new PyTorch",
        "if it is meant: mprun check --update",
    ),
    "no_baseline": Kind(
        "baseline",
        WARNING,
        "the baseline has no such mode or recipe",
        "a new mode",
        "mprun check --update",
    ),
    "target_refuses": Kind(
        "dtypes",
        ERROR,
        "this configuration does not run on the target",
        "float64 on MPS",
        "choose another mode for it",
    ),
    "target_differs": Kind(
        "dtypes",
        WARNING,
        "the target computes this configuration in another way",
        "bfloat16 on a T4, which has no bfloat16 hardware",
        "float16 with a loss scale there: precision=fp16_mixed",
    ),
}
"""Every kind of finding."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong in one mode."""

    kind: str
    """A key of `KINDS`."""
    module: str
    """A name of `named_modules()`; empty for the model itself."""
    text: str
    """What was measured, with figures."""
    op: str = ""
    line: str = ""
    """The line of code: `file.py:12 (forward)`."""
    at: float = 0.0
    """How far: a measured size by which findings of one kind are ordered, largest first."""

    @property
    def check(self) -> str:
        """The check that found it."""
        return KINDS[self.kind].check

    @property
    def severity(self) -> str:
        """error or warning."""
        return KINDS[self.kind].severity

    def __str__(self) -> str:
        where = self.module or "the model"
        op = f", {self.op}" if self.op else ""
        line = f" at {self.line}" if self.line else ""
        return f"{self.kind}: {where}{op}{line}: {self.text}"


@dataclass
class ModeChecks:
    """The checks of one mode."""

    label: str
    precision: str
    findings: list[Finding] = field(default_factory=list)
    done: dict[str, float] = field(default_factory=dict)
    """Check to its seconds, of those that were done."""
    not_done: dict[str, str] = field(default_factory=dict)
    """Check to the reason."""
    figures: dict[str, float | str | None] = field(default_factory=dict)
    """Measured: `loss_first`, `loss_last`, `headroom`, `peak_bytes` and the like."""

    def of(self, check: str) -> list[Finding]:
        """The findings of a check."""
        return [x for x in self.findings if x.check == check]

    def status(self, check: str) -> str:
        """ok, error, warning, or `-` for a check that was not done."""
        found = {x.severity for x in self.of(check)}
        done = "ok" if check in self.done else "-"
        return next((x for x in (ERROR, WARNING) if x in found), done)


@dataclass(frozen=True)
class CheckRecord:
    """The content of check.json."""

    schema_version: int
    recipe: str
    hardware: str
    versions: dict[str, str | None]
    seconds: float
    budget_s: float
    modes: list[ModeChecks]
    notes: list[str] = field(default_factory=list)

    @property
    def findings(self) -> list[tuple[str, Finding]]:
        """Label of the mode and finding, errors first."""
        pairs = [(mode.label, x) for mode in self.modes for x in mode.findings]
        return sorted(pairs, key=lambda pair: pair[1].severity != ERROR)

    @property
    def has_errors(self) -> bool:
        """Whether the command fails."""
        return any(x.severity == ERROR for _, x in self.findings)


def check_parts(record: CheckRecord) -> Iterator[FittedTable | str]:
    """What the terminal shows: the answer, a row for each mode, findings."""
    findings = record.findings
    errors = sum(x.severity == ERROR for _, x in findings)
    counts = f"{errors} errors, {len(findings) - errors} warnings"
    modes = ", ".join(mode.label for mode in record.modes)
    answer = "failed" if errors else "passed"
    yield f"{answer}: {record.recipe} in {modes}: {counts} ({record.seconds:.0f} s)"
    table = FittedTable("", text_column("mode"), *(text_column(x) for x in CHECKS))
    for mode in record.modes:
        table.add_row(mode.label, *(mode.status(check) for check in CHECKS))
    yield table
    for label, x in findings[:SHOWN]:
        yield f"{x.severity} in {label}: {x}"
        yield f"  fix: {KINDS[x.kind].cure}"
    if len(findings) > SHOWN:
        yield f"({len(findings) - SHOWN} more in check.json)"
    left = {x: why for mode in record.modes for x, why in mode.not_done.items()}
    for check, why in left.items():
        yield f"not done: {check} ({why})"
    yield from record.notes
