"""The report of an observed training, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mprun.numerics.audit import Audit
from mprun.records.run_record import Summary, page_fault_share

if TYPE_CHECKING:
    from mprun.integrations.observation import NonfiniteStep


def report_text(
    summary: Summary,
    audit: Audit | None,
    nonfinite: NonfiniteStep | None,
    notes: Sequence[str] = (),
) -> str:
    """The figures, the audit, and what could not be looked at."""
    lines = [*_failure(summary), *_figures(summary)]
    if nonfinite is not None:
        lines.append(f"not finite at step {nonfinite.step}: {', '.join(nonfinite.names)}")
        if nonfinite.file is not None:
            lines.append(f"    mprun replay {nonfinite.file}")
    if audit is not None:
        lines += ["", "audit", *(f"  {line}" for line in str(audit).splitlines())]
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _failure(summary: Summary) -> Iterator[str]:
    if summary.status == "failed":
        yield f"FAILED: {summary.error}"


def _figures(summary: Summary) -> Iterator[str]:
    row = summary.effective
    yield f"{summary.recipe} in {summary.precision}: {summary.steps} steps, {summary.status}"
    yield (
        f"precision   parameters {row.param_dtype}, computation {row.compute_dtype} "
        f"({row.casting}), rounding {row.rounding}"
    )
    step, data = summary.step_time_ms, summary.data_time_ms
    if step.median is not None and step.p10 is not None and step.p90 is not None:
        yield (
            f"step time   {step.median:.2f} ms (10 % below {step.p10:.2f}, 10 % above "
            f"{step.p90:.2f}; {step.n} steps, {step.warmup} of warm-up left out)"
        )
    if data.median is not None:
        yield f"data wait   {data.median:.2f} ms"
    if summary.samples_per_second is not None:
        yield f"throughput  {summary.samples_per_second:,.0f} samples/s"
    share = page_fault_share(summary)
    if share is not None:
        yield f"page faults {summary.page_faults_per_step:,.0f} per step, {share:.1%} of its time"
    if summary.skipped_steps:
        yield f"skipped     {summary.skipped_steps} steps, by the loss scale"
    memory = {k: v for k, v in vars(summary.memory_bytes).items() if v}
    yield "memory      " + ", ".join(f"{k} {_size(v)}" for k, v in memory.items())


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"
