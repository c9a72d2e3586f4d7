"""Checks of a run: a slow dtype, steps taken, a falling loss, the dtype of accumulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mprun.errors import RunFailedError
from mprun.precision.arithmetic import Arithmetic
from mprun.precision.partials import TERMS, sum_of_ones
from mprun.precision.policy import dtype_name
from mprun.precision.products import recorded_name
from mprun.records.run_record import Status, Summary, page_fault_share
from mprun.train.callbacks import Callback

SKIPPED_SHARE = 0.1  # A larger share of skipped steps gets a warning: their data trained nothing


PAGE_FAULT_SHARE = 0.05  # A larger share of a step that goes into page faults gets a warning


def slow_dtype_warning(summary: Summary) -> str | None:
    """A sentence if float32 is faster than the mode's dtype on this machine, or None."""
    dtype = summary.requested.compute_dtype
    if summary.execution == "emulated":  # computes in float32; why it was chosen was reported
        return None
    if summary.hardware.accelerated.get(dtype, True):
        return None
    return (
        f"{dtype} matmuls are slower than float32 on this machine: "
        "this run shows accuracy, not speed (mprun doctor says why)"
    )


def page_fault_warning(summary: Summary) -> str | None:
    """A sentence if page faults take more than a twentieth of a step, or None."""
    share, allocator = page_fault_share(summary), summary.backend.allocator
    if share is None or share <= PAGE_FAULT_SHARE:
        return None
    # glibc's is the only allocator that `speed=auto` has settings for
    cure = "speed=auto makes it" if allocator == "glibc" else "set the allocator to"
    return (
        f"about {share:.0%} of the time of a step goes into getting memory from the system "
        f"({summary.page_faults_per_step:,.0f} page faults a step, "
        f"{summary.hardware.page_fault_us:.2g} us each), because the allocator ({allocator}) gives "
        f"memory back after use: {cure} keep its memory"
    )


def check_steps_taken(summary: Summary) -> None:
    """Raise `RunFailedError` if a run ended without a single optimizer step.

    Its weights are those it started with, so a test of them makes no sense.
    """
    steps, skipped = summary.steps, summary.skipped_steps
    if steps > skipped:
        return
    if not steps:
        raise RunFailedError(
            "no step was taken: train.max_time_s ended the run before the first one; give it more "
            "time"
        )
    raise RunFailedError(
        f"no step was taken: all {steps} were skipped, {_why_skipped(summary)}; the weights are "
        f"those the run started with; {_against_skipping(summary)}"
    )


def skipped_warning(summary: Summary) -> str | None:
    """A sentence if more than a tenth of the steps were skipped, or None."""
    steps, skipped = summary.steps, summary.skipped_steps
    if skipped <= steps * SKIPPED_SHARE:
        return None
    return (
        f"{skipped} of {steps} steps ({skipped / steps:.0%}) were skipped and trained nothing, "
        f"{_why_skipped(summary)}; {_against_skipping(summary)}"
    )


def _why_skipped(summary: Summary) -> str:
    scale, exceptions = summary.loss_scale, summary.fp_exceptions
    if exceptions is not None and exceptions.action == "skip":
        return "dropped by debug.fp_exceptions=skip or with gradients that were not finite"
    return (
        f"because gradients were not finite at the {scale.kind} loss scale "
        f"({scale.initial:g} at first, {scale.final:g} at the last step)"
    )


def _against_skipping(summary: Summary) -> str:
    """The remedy for a kind of loss scale."""
    remedies = {
        "dynamic": "start from a smaller loss_scale.value, or train for more steps, since each "
        "skipped one lowers the scale; ",
        "static": "take a smaller loss_scale.value, or loss_scale=dynamic; ",
    }
    remedy = remedies.get(summary.loss_scale.kind, "")
    return f"{remedy}debug.fp_exceptions=halt names the op if the scale is not the cause"


MIN_JUDGED = 12  # Of fewer steps than this, a run that time cut short shows no trend of its loss


def check_loss_falls(
    losses: Sequence[float], planned_steps: int | None, every: int = 1
) -> str | None:
    """Raise `RunFailedError` unless the last third's mean loss is below the first third's.

    The losses are of one of `every` so many steps; `planned_steps` are those that the run would
    take if time did not run out, None if only time ends it. A warning if time left too few steps to
    judge.
    """
    # thirds: means of many noisy losses, and the slow middle of a curve counts for neither
    steps, third = len(losses) * every, len(losses) // 3
    if steps < min(planned_steps or MIN_JUDGED, MIN_JUDGED):
        return (
            f"whether the loss falls is not judged: train.max_time_s left {steps} steps, and "
            f"{MIN_JUDGED} are needed; give it more time, or a smaller preset.max_batch_size"
        )
    if third == 0:
        raise RunFailedError(f"the smoke check needs 3 steps or more, the run took {len(losses)}")
    first, last = sum(losses[:third]) / third, sum(losses[-third:]) / third
    if not last < first:  # true for NaN too
        raise RunFailedError(
            f"the loss does not fall: mean {first:.4f} over the first {third * every} steps, "
            f"{last:.4f} over the last {third * every}"
        )
    return None


@dataclass
class AccumulationCheck(Callback):
    """Records the dtype in which the run's kernels accumulated products, if not float32."""

    summary: Summary
    arithmetic: Arithmetic
    device: torch.device
    warn: Callable[[str], None]

    def on_end(self, status: Status) -> None:
        if status == "failed":  # kernels may not run any more
            return
        lowest = float(TERMS)  # what float32 accumulation reaches
        for op, dtype in sorted(self.arithmetic.products, key=str):
            # 16-bit accumulation stops where a 1 is less than half a step of the sum
            reached = sum_of_ones(op, dtype, self.device)
            short = dtype_name(dtype)
            if reached < TERMS:
                self.warn(
                    f"{recorded_name(op)} accumulates in {short} on this machine, not in float32: "
                    f"a sum that should be {TERMS:,} comes out as {reached:,.0f}"
                )
            if reached < lowest:
                lowest = reached
                self.summary.effective = self.summary.effective.with_partials(short)
