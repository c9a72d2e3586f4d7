"""The policy table: what each mode's row says, and rows that are refused."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mprun.config import compose
from mprun.config.schema import PrecisionConfig
from mprun.precision import Policy
from mprun.precision.policy import LETTERS
from mprun.precision.policy import policy as shipped
from mprun.records.mode_names import SHIPPED_MODES
from mprun.records.policy_columns import PolicyColumns
from mprun.records.run_record import PrecisionRow
from mprun.train.assemble.dtype_choices import build_policy


def policy(name: str) -> Policy:
    return build_policy(compose([f"precision={name}"]).config)


def test_every_row_of_a_policy_has_the_columns_of_the_table() -> None:
    table = {x.name for x in fields(PolicyColumns)}
    assert policy("fp32").columns().keys() == table
    assert {x.name for x in fields(PrecisionRow)} == table | {"op_lists", "layers"}
    section = {x.name for x in fields(PrecisionConfig)}
    assert section == table | {"name", "layers", "layers_file"}


LONG = ("float32", "float16", "bfloat16")


@given(
    params=st.sampled_from(LONG),
    compute=st.sampled_from(LONG),
    output=st.sampled_from(LONG),
    is_long=st.booleans(),
)
def test_a_text_of_dtypes_is_the_mode_that_has_them(
    params: str, compute: str, output: str, is_long: bool
) -> None:
    keys = LETTERS.values() if is_long else LETTERS
    text = ",".join(f"{k}={v}" for k, v in zip(keys, (params, compute, output), strict=True))
    legal = compute == params or params == "float32"
    if not legal or output not in ("float32", compute):
        with pytest.raises(ValueError, match="legal"):
            shipped(text)
        return
    found = shipped(text)
    assert (found.param_dtype, found.compute_dtype, found.output_dtype) == (params, compute, output)
    assert shipped(str(found)) == found
    if output == "float32":
        assert found == shipped(found.name)


@pytest.mark.parametrize("name", SHIPPED_MODES)
def test_the_text_of_a_shipped_mode_is_its_name(name: str) -> None:
    """Several modes have the same dtypes, so that their notation would be another mode's."""
    assert str(shipped(name)) == f"{shipped(name)}" == name
    assert shipped(str(policy(name))) == policy(name)


def test_the_text_of_a_changed_row_is_its_dtypes() -> None:
    changed = replace(shipped("bf16_mixed"), output_dtype="bfloat16")
    assert str(changed) == "p=fp32,c=bf16,o=bf16"
    assert shipped(str(changed)) == changed
    own = replace(shipped("bf16_mixed"), name="mine")  # its row, under a name of the user's
    assert str(own) == "p=fp32,c=bf16,o=fp32"
    assert str(replace(shipped("bf16_sr"), momentum_dtype="bfloat16")) == "p=bf16,c=bf16,o=fp32"


def test_jmps_notation() -> None:
    assert str(shipped("params=float32,compute=half,output=float32")) == "fp16_mixed"
    assert shipped("p=f32, c=bf16").name == "bf16_mixed"
    assert shipped("p=f16").name == "fp16_true"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("p=fp8,c=bf16", "'p=fp8'"),
        ("p=fp32,p=fp16", "'p=fp16'"),
        ("p=bf16,c=fp32", "p=fp32,c=bf16,o=fp32 (bf16_mixed)"),
        ("p=fp32,c=bf16,o=fp16", "legal is float32, bfloat16"),
    ],
)
def test_a_text_without_a_mode_names_the_legal_ones(text: str, names: str) -> None:
    with pytest.raises(ValueError, match=re.escape(names)):
        shipped(text)
