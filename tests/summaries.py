"""A summary to test readers and tables with."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec

from mprun.records.run_record import SCHEMA_VERSION, Summary

T = TypeVar("T")


def example() -> Summary:
    """A completed bf16_mixed run on the generated set."""
    row = {
        "param_dtype": "float32",
        "compute_dtype": "bfloat16",
        "output_dtype": "float32",
        "casting": "autocast",
        "op_lists": "none",
        "layers": {},
        "rounding": "nearest",
        "rounding_scope": "update",
        "overflow": "infinity",
        "accum_dtype": "float32",
        "momentum_dtype": "float32",
        "variance_dtype": "float32",
        "partials_dtype": "float32",
        "tf32": False,
    }
    fields = {
        "schema_version": SCHEMA_VERSION,
        "status": "completed",
        "error": None,
        "started_at": "2024-02-29T12:00:00+00:00",
        "mprun_version": "0.1.0",
        "git_commit": None,
        "versions": {"python": "3.12.0", "torch": "2.11.0", "torchvision": None},
        "hardware": {
            "device": "cpu",
            "name": "Some CPU (AVX512)",
            "cores": 2,
            "memory_bytes": 2**34,
            "accelerated": {"bfloat16": True},
        },
        "recipe": "mnist",
        "seed": 7,
        "precision": "bf16_mixed",
        "variant": "bf16_mixed x2",
        "variant_hash": "0123456789ab",
        "requested": row,
        "effective": row,
        "execution": "native",
        "substitutions": [],
        "backend": {
            "memory_format": "contiguous",
            "optimizer_impl": "forloop",
            "compile": False,
            "threads": 2,
        },
        "data": {
            "name": "generated glyphs",
            "source": "generated",
            "train_samples": 48_000,
            "validation_samples": 12_000,
            "test_samples": 10_000,
        },
        "batch": {"micro": 64, "accumulate": 2, "effective": 128, "base": 64, "lr_rule": "none"},
        "batch_size": 128,
        "epochs": 1,
        "steps": 375,
        "skipped_steps": 0,
        "step_time_ms": {"median": 12.5, "p10": 11.25, "p90": 14.75, "n": 365, "warmup": 10},
        "data_time_ms": {"median": 0.25, "p90": 0.5},
        "samples_per_second": 10_039.2,
        "wall_time_s": 6.25,
        "memory_bytes": {
            "peak": 3 * 2**20,
            "parameters": 2**20,
            "buffers": 0,
            "gradients": 2**20,
            "optimizer_state": 2**20,
            "activations": 0,
            "temporary": 0,
            "data": 2**25,
            "allocator_peak": None,
        },
        "loss_scale": {"kind": "none", "initial": 1.0, "final": 1.0},
        "fp_exceptions": None,
        "warnings": [],
        "metric": {"name": "accuracy", "higher_is_better": True},
        "history": [
            {
                "epoch": 1,
                "train": {"loss": 0.5, "accuracy": 0.875},
                "validation": {"loss": 0.25, "accuracy": 0.9375},
            }
        ],
        "train": {"loss": 0.5},
        "test": {"loss": 0.2812, "accuracy": 0.9219},
    }
    return msgspec.convert(fields, Summary)


def set_fields(record: T, **changes: Any) -> T:
    """Change fields of a record in place; a mapping changes the named fields of a nested one."""
    kinds = _types(type(record))
    for name, value in changes.items():
        assert name in kinds, name
        present = getattr(record, name)
        nested = isinstance(value, dict) and hasattr(present, "__dataclass_fields__")
        if nested:
            value = {**vars(present), **value}
        if isinstance(value, dict | list):
            value = msgspec.convert(msgspec.to_builtins(value), kinds[name])
        setattr(record, name, value)
    return record


@cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def check_partials(summary: Summary) -> None:
    """A kernel of this machine that sums in 16 bits is in the record, and a warning names it."""
    dtype = summary.effective.partials_dtype
    assert dtype == "float32" or any(f"accumulates in {dtype}" in x for x in summary.warnings)
