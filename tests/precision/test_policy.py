"""The policy table: what each mode's row says, and rows that are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mprun.assemble.dtype_choices import build_policy
from mprun.config import compose
from mprun.precision import Policy


def policy(name: str) -> Policy:
    return build_policy(compose([f"precision={name}"]).config)


def test_modes_differ_exactly_where_their_rows_differ() -> None:
    fp32, bf16 = policy("fp32").columns(), policy("bf16_mixed").columns()
    differing = {k: (fp32[k], bf16[k]) for k in fp32 if fp32[k] != bf16[k]}
    assert differing == {
        "compute_dtype": ("float32", "bfloat16"),
        "casting": ("none", "autocast"),
    }


@pytest.mark.representative(0, 2, 5)
@pytest.mark.parametrize(
    ("name", "change", "legal"),
    [
        ("fp32", {"compute_dtype": "bfloat16"}, "legal is float32"),
        ("bf16_mixed", {"compute_dtype": "float16"}, "legal is bfloat16"),
        ("bf16_mixed", {"output_dtype": "float16"}, "legal is float32, bfloat16"),
        ("fp32", {"param_dtype": "bfloat16"}, "legal is float32"),
        ("fp32", {"tf32": True}, "precision.tf32=true"),
        ("bf16_mixed", {"partials_dtype": "float16"}, "precision.partials_dtype=float16"),
    ],
)
def test_a_row_that_is_not_carried_out_is_refused(
    name: str, change: dict[str, object], legal: str
) -> None:
    with pytest.raises(ValueError, match=legal):
        replace(policy(name), **change)  # type: ignore[arg-type]
