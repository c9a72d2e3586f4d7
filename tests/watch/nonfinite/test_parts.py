"""The parts: value ranges, ops, lines, lineage, the report."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from mprun.records.files import jsonable
from mprun.watch.nonfinite import FpException, NonfiniteReport
from mprun.watch.nonfinite.fp_exception import DETAILED, TensorStats
from mprun.watch.nonfinite.nonfinite_watcher import NonfiniteWatcher, Origin, stats
from mprun.watch.op_watcher import (
    OpCall,
    is_library,
    op_spec,
    recomputed,
    value_range,
)
from tests.watch.nonfinite import exception

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
VALUES = st.floats(width=16, allow_nan=True, allow_infinity=True)  # exact in all but bfloat16


# ---- limits and statistics -----------------------------------------------------------------------


@given(st.lists(VALUES, min_size=1, max_size=70), st.sampled_from(FLOATS))
@settings(max_examples=100)
def test_limits_and_statistics_are_those_of_the_values(
    values: list[float], dtype: torch.dtype
) -> None:
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    found, told = value_range(x), stats("x", x)
    assert found is not None
    assert found.finite == bool(torch.isfinite(x).all())
    assert found.has_nan == bool(torch.isnan(x).any())
    exact = [v for v in x.double().tolist() if math.isfinite(v)]
    assert (told.nan, told.inf) == (int(x.isnan().sum()), int(x.isinf().sum()))
    expected = (min(exact), max(exact)) if exact else (None, None)
    assert (told.low, told.high) == expected
    assert told.max_abs == (max(map(abs, exact)) if exact else None)


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Sparse CSR")
    COMPRESSED = torch.tensor([[1.0, 0.0], [0.0, math.inf]]).to_sparse_csr()


@pytest.mark.parametrize(
    ("x", "finite"),
    [
        (torch.tensor([1.0, math.inf]).to_sparse(), False),
        (COMPRESSED, False),
        (torch.tensor([1 + 1j, complex(0, math.nan)]), False),
        (torch.tensor([1 + 1j]).conj(), True),
        (torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn), False),
        (torch.tensor([1.0, 2.0]).to(torch.float8_e5m2), True),
        (torch.randn(4, 6).t()[1::2], True),
        (torch.tensor(math.inf), False),
        (nn.Parameter(torch.tensor([math.nan])), False),
    ],
    ids=lambda x: str(x) if isinstance(x, bool) else f"{x.dtype} {x.layout}",
)
def test_every_kind_of_tensor_is_measured(x: Tensor, finite: bool) -> None:
    found = value_range(x)
    assert found is not None
    assert found.finite == finite


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([1, 2]),
        torch.tensor([True]),
        torch.ones(0),
        torch.ones(3, device="meta"),
    ],
    ids=["whole", "bool", "empty", "meta"],
)
def test_what_holds_no_floating_number_has_no_value_range(x: Tensor) -> None:
    assert value_range(x) is None
    assert stats("x", x) == TensorStats("x", str(x.dtype).removeprefix("torch."), tuple(x.shape))


# ---- ops -----------------------------------------------------------------------------------------


def call(func: Any, *args: Any, **kwargs: Any) -> OpCall:
    saved = {id(x): x.clone() for x in args if isinstance(x, Tensor)}
    return OpCall(func, args, kwargs, func(*args, **kwargs), {}, saved)


@pytest.mark.parametrize("op", [aten.mul.Tensor, aten.mul_.Tensor], ids=str)
def test_an_op_is_run_again_in_float64_on_what_was_there(op: Any) -> None:
    big = torch.tensor([300.0], dtype=torch.float16)
    made = call(op, big, big)
    (exact,) = recomputed(made) or ()
    assert (made.result.item(), exact.dtype, exact.item()) == (math.inf, torch.float64, 90000.0)
    assert (recomputed(made._replace(saved={})) is None) == (op is aten.mul_.Tensor)


def test_what_draws_random_numbers_is_not_run_again() -> None:
    made = call(aten.native_dropout.default, torch.ones(2), 0.5, True)
    state = torch.get_rng_state()
    assert recomputed(made) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_what_reads_a_workspace_of_its_dtype_is_not_run_again() -> None:
    """oneDNN's LSTM in float64, with the workspace of bfloat16, wrote outside of its memory."""
    assert not op_spec(aten.mkldnn_rnn_layer_backward.default).runs_again
    assert op_spec(aten.native_batch_norm_backward.default).runs_again


# ---- lines ---------------------------------------------------------------------------------------


def test_code_of_libraries_is_distinguished_from_the_user_s() -> None:
    import contextlib

    import mprun.recipes.mnist
    import mprun.train.loop

    for library in (nn.__file__, mprun.train.loop.__file__, contextlib.__file__, "<string>"):
        assert is_library(str(library))
    for own in (__file__, mprun.recipes.mnist.__file__, pytest.__file__, "<stdin>"):
        assert not is_library(str(own))


# ---- origins -------------------------------------------------------------------------------------


def test_views_share_their_origins_and_memory_given_out_again_has_none() -> None:
    watcher = NonfiniteWatcher(nn.Linear(1, 1), lambda x: None, lambda: None)
    origins = frozenset({Origin(exception())})
    for _ in range(100):
        x = torch.ones(1000)
        assert watcher.origins_of(x) == frozenset()
        watcher.spoil(x, origins)
        assert watcher.origins_of(x[3:].view(1, -1)) == origins
        del x
    watcher.begin_step(2)
    assert watcher._spoiled == {}


# ---- the report ----------------------------------------------------------------------------------


def test_an_exception_in_a_line() -> None:
    assert exception().text() == (
        "overflow: mul in fc (Linear), forward, model.py:3 (forward); inputs up to 300 (float16); "
        "the exact result is up to 9e+04, the limit of float16 is 65504; "
        "reached the loss and 1 more"
    )
    bare = exception(
        module="", module_kind="", location=None, reached=(), in_float64=None, inputs=()
    )
    assert bare.text() == "overflow: mul, forward"
    assert replace(bare, divided_by="div in norm, forward").text() == (
        "overflow: mul, forward; div in norm, forward, divides by it, which gives 0"
    )
    held = TensorStats("parameter fc.weight", "float16", (2, 3), -1.0, 1.0, 1, 2)
    outside = exception(kind="outside", outputs=(held,), in_float64=None)
    assert outside.text() == (
        "outside: parameter fc.weight holds 2 inf and 1 NaN, first read by mul in fc (Linear), "
        "forward, model.py:3 (forward); reached the loss and 1 more"
    )


def loaded(row: dict[str, Any]) -> FpException:
    report = NonfiniteReport()
    state = report.state_dict()
    report.load_state_dict({**state, "exceptions": [row]})
    return report.of(row["verdict"])[0]


def test_an_exception_goes_through_json_and_back() -> None:
    e = exception(divided_by="div in norm, forward", loss_scale=math.inf)
    row = json.loads(json.dumps(jsonable(e.as_dict()), allow_nan=False))
    assert row["inputs"][0]["max_abs"] == 300.0
    assert row["loss_scale"] == "inf"
    assert loaded(json.loads(json.dumps(e.as_dict()))) == e


def test_an_exception_that_an_earlier_mprun_recorded_is_read() -> None:
    """It had the ops before the exception, and the first wrong result."""
    row = {**exception().as_dict(), "before": [{"op": "add"}], "wrong": {"value": 0.0}}
    assert loaded(row) == exception()


def test_each_distinct_exception_is_kept_once_and_all_are_counted() -> None:
    found = NonfiniteReport()
    news = found.add_step(
        [exception(step=1), exception(step=1, op="add"), exception(verdict="absorbed")]
    )
    assert [e.op for e in news] == ["mul", "add"]
    assert found.add_step([exception(step=7)]) == ()
    assert found.counts == {"finding": 3, "expected": 0, "absorbed": 1}
    first = found.findings[0]
    assert (first.step, first.last_step, first.count) == (1, 7, 2)


def test_very_many_distinct_ones_are_counted_alone() -> None:
    found = NonfiniteReport()
    for i in range(DETAILED + 5):
        found.add(exception(op=f"op{i}"))
    assert (len(found.findings), found.left_out) == (DETAILED, 5)
    assert found.counts["finding"] == DETAILED + 5


def test_a_report_continues_from_a_checkpoint() -> None:
    found, other = NonfiniteReport(), NonfiniteReport()
    found.add_step([exception(), exception(), exception(verdict="expected")])
    other.load_state_dict(found.state_dict())
    assert other.state_dict() == found.state_dict()
    assert other.add_step([exception()]) == ()
