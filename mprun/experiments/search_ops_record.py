"""The outcome of a search as plain values: what search_ops.json holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mprun.experiments.proof import Proof
from mprun.experiments.search_ops import Searched
from mprun.numerics.op_sensitivity import Found, Row
from mprun.numerics.tolerance import Tolerance


def as_dict(searched: Searched) -> dict[str, Any]:
    """Everything but the proof; docs/search_ops.md explains the fields."""
    rows, given = searched.rows, searched.given
    tolerance = searched.tolerance.beside(rows.unavoidable)
    return {
        "dtype": str(rows.choice.dtype).removeprefix("torch."),
        "measured_on": {
            "split": searched.samples.split,
            "batches": searched.samples.batches,
            "batch_size": searched.samples.batch_size,
        },
        "tolerance": {"loss": tolerance.loss, "gradient_db": tolerance.gradient_db},
        "unjudged_parameters": list(rows.unjudged),
        "zero_gradients": list(rows.zero),
        "reference": rows.reference._asdict(),
        "unavoidable": {"measure": rows.unavoidable._asdict()},
        "everything_lower": {"measure": rows.lower._asdict(), "time_ratio": 1.0},
        "float32": {"time_ratio": searched.float32_time_ratio},
        "given": {
            "name": given.name,
            "measure": given.measure._asdict(),
            "time_ratio": given.time_ratio,
        },
        "ops": _rows(rows.ops, tolerance),
        "modules": _rows(rows.modules, tolerance),
        "search": {
            "ops": _found(searched.ops, searched.ops_time_ratio),
            "modules": searched.modules and _found(searched.modules, searched.modules_time_ratio),
        },
        "always": list(rows.choice.always),
        "lower": list(rows.choice.lower),
        "answer": "modules" if searched.answer is searched.modules else "ops",
    }


def _rows(rows: Sequence[Row], tolerance: Tolerance) -> list[dict[str, Any]]:
    return [
        {
            "name": row.name,
            "calls": row.calls,
            "harm_alone": tolerance.harm(row.alone),
            "alone": row.alone._asdict(),
            "kept": row.kept._asdict(),
            "time_ratio": row.time_ratio,
        }
        for row in rows
    ]


def _found(found: Found, time_ratio: float | None) -> dict[str, Any]:
    return {
        "fp32": list(found.fp32),
        "is_within": found.search.is_within,
        "harm": found.search.harm,
        "measure": found.measure._asdict(),
        "float32_share": found.float32_share,
        "time_ratio": time_ratio,
        "steps": [step._asdict() for step in found.search.steps],
    }


def proof_dict(proof: Proof) -> dict[str, Any]:
    """The trainings and what they show."""
    difference, equivalence, verdict = proof.paired
    return {
        "steps": proof.steps,
        "split": proof.split,
        "metric": proof.metric.name,
        "is_relative": proof.metric.is_relative,
        "margin": proof.metric.margin,
        "values": [arm.value for arm in proof.found],
        "float32_values": [arm.value for arm in proof.float32],
        "skipped_steps": [arm.skipped for arm in proof.found],
        "failures": [arm.failure for arm in proof.found],
        "difference": difference.value,
        "interval": difference.interval,
        "equivalence_interval": equivalence,
        "verdict": verdict.word,
        "reason": verdict.reason,
        "more_seeds": verdict.more_seeds,
        "step_time_ratio": proof.step_time_ratio,
    }
