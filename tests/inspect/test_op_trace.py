"""A step taken apart: each rule by name, casts counted and weighed, which of them are redundant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import mprun.inspect.op_trace
import mprun.inspect.trace
from mprun.config import compose
from mprun.inspect.op_trace import CallStack, LabelledCaster
from mprun.inspect.trace import (
    CastRecord,
    TraceRow,
    casts_of,
    totals_of,
    trace,
    trace_step,
    typical,
)
from mprun.precision import AutocastCaster, Caster, OpListCaster, Precision, disable_casts, op_lists
from mprun.precision.op_lists.lists import shipped_lists
from mprun.train.assemble import Plan, build_arithmetic, build_parts, make_plan
from mprun.train.loop import Trainer, TrainingComponents
from mprun.watch.op_watcher import OpRecorder, RecordedOp

pytestmark = pytest.mark.usefixtures("native_is_fast")

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
X = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))

SMALL = ["data.source=generated", "data.train_limit=32", "data.eval_limit=8", "train.batch_size=8"]
RECIPES = {
    "linear": [
        *("recipe=linear", "recipe.model.in_features=24", "recipe.model.out_features=16"),
        *("recipe.model.samples=8", "train.batch_size=8"),
    ],
    "mnist": ["recipe=mnist", "recipe.model.units=16", *SMALL],
    "fashion_mnist": ["recipe=fashion_mnist", "recipe.model.image_size=28", *SMALL],
}
MODES = {
    "hmp": ["op_lists=hmp"],
    "native": ["op_lists=native"],
    "bf16_mixed": ["precision=bf16_mixed"],
    "fp16_mixed": ["precision=fp16_mixed", "speed=plain"],
    "fp32": ["precision=fp32"],
}


def planned(recipe: str, *words: str) -> Plan:
    return make_plan(compose([*RECIPES[recipe], "device=cpu", *words]).config, ())


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many steps a trace takes in all: one that shows that the step can run, one more before
    those that are timed, two of them, and two that are traced."""
    warmup, repeats = 1, 2
    monkeypatch.setattr(mprun.inspect.trace, "WARMUP", warmup)
    monkeypatch.setattr(mprun.inspect.trace, "REPEATS", repeats)
    return 1 + warmup + 2 * repeats


def stepping(chosen: Plan) -> tuple[TrainingComponents, Callable[[], object]]:
    """What a plan runs on, and its step on the first batch, not traced."""
    parts = build_parts(chosen)
    trainer = Trainer(parts, chosen.limits)
    batch = next(parts.train.epoch(parts.order.draw()))
    return parts, lambda: trainer.optimizer_step(batch)


# ---- casts, counted ------------------------------------------------------------------------------


def counted_by_the_profiler(chosen: Plan) -> int:
    """Casts of a step that is not traced; copies that name no dtype only move memory about."""
    _, step = stepping(chosen)
    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        step()
    copies = (event for event in seen.events() if event.name == "aten::_to_copy")
    casts = (event for event in copies if event.concrete_inputs[1] is not None)
    return sum(not is_a_kernel_s_own(event) for event in casts)


def is_a_kernel_s_own(event: Any) -> bool:
    """Whether a cast belongs to the inside of an op, as no caster's does.

    A Python number that the op has (`x.add_(y, alpha=2)`), or anything that an op of the backward
    pass casts: casters leave that pass alone.
    """
    number, around = event.input_shapes[0] == [], list[str]()
    while event.cpu_parent is not None:
        event = event.cpu_parent
        around.append(event.name)
    inside = any(name.startswith("aten::") and name != "aten::to" for name in around)
    backward = any(name.startswith("autograd::engine") for name in around)
    return inside and (backward or number)


@pytest.mark.representative("linear-hmp", "mnist-native", "fashion_mnist-fp16_mixed", "linear-fp32")
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_casts_are_as_many_as_the_profiler_counts(recipe: str, mode: str) -> None:
    chosen = planned(recipe, *MODES[mode])
    assert build_arithmetic(chosen).substitutions == ()
    found, _ = trace_step(chosen)
    assert len(casts_of(found)) == counted_by_the_profiler(chosen)
    assert (len(casts_of(found)) == 0) == (mode == "fp32")


@pytest.mark.representative(0, 3)
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "words",
    [
        ["op_lists=hmp", "train.accumulate=2"],
        ["precision=bf16_mixed", "train.accumulate=2", "train.clip_norm=1"],
        ["op_lists=hmp", "precision.layers={2: fp32}"],
        ["precision=bf16_mixed", "precision.layers={2: fp32}"],
        ["precision=bf16_true", "precision.layers={2: fp32}"],
    ],
    ids=" ".join,
)
def test_options_that_change_casts_change_the_trace_alike(words: list[str]) -> None:
    chosen = planned("mnist", *words)
    found, _ = trace_step(chosen)
    assert len(casts_of(found)) == counted_by_the_profiler(chosen) > 0


@pytest.mark.usefixtures("short")
def test_the_casts_of_a_linear_step_are_those_counted_by_hand() -> None:
    found, _ = trace_step(planned("linear", *MODES["hmp"]))
    # In: inputs, weight and bias. Out: the output. Back: its gradient, and the parameters' two.
    samples, inputs, outputs = 8, 24, 16
    parameters = outputs * inputs + outputs
    elements = samples * inputs + parameters + samples * outputs + samples * outputs + parameters
    assert len(casts_of(found)) == 7
    assert sum(c.bytes for c in casts_of(found)) == elements * (4 + 2)
    kinds = [(row.phase, cast.from_dtype, cast.to_dtype) for row in found for cast in row.casts]
    assert kinds == [
        *[("forward", "float32", "bfloat16")] * 3,
        ("other", "bfloat16", "float32"),
        ("backward", "float32", "bfloat16"),
        *[("backward", "bfloat16", "float32")] * 2,
    ]


# ---- tracing changes nothing ---------------------------------------------------------------------


@pytest.mark.representative("op_lists=hmp", "precision=half_sr_full")
@pytest.mark.parametrize(
    "words",
    [["op_lists=hmp"], ["precision=bf16_mixed"], ["precision=half_sr"], ["precision=half_sr_full"]],
    ids=" ".join,
)
def test_weights_after_traced_steps_are_those_without(
    words: list[str], short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[TrainingComponents] = []

    def keeping(*args: Any) -> TrainingComponents:
        made.append(build_parts(*args))
        return made[-1]

    monkeypatch.setattr(mprun.inspect.op_trace, "build_parts", keeping)
    chosen = planned("mnist", *words)
    trace_step(chosen)
    (traced,) = made
    parts, step = stepping(chosen)
    first = {name: x.clone() for name, x in parts.model.state_dict().items()}
    for _ in range(short):
        step()
    theirs = parts.model.state_dict()
    for name, ours in traced.model.state_dict().items():
        assert torch.equal(ours, theirs[name]), name
        assert not torch.equal(ours, first[name]), f"{name} was not trained"


@pytest.mark.usefixtures("short")
def test_an_emulated_step_shows_the_model_s_ops_and_not_those_that_emulate() -> None:
    def ran(*words: str) -> list[tuple[str, str, str]]:
        found, _ = trace_step(planned("mnist", *words))
        both = ("forward", "backward")
        return [(row.phase, row.module, row.op) for row in found if row.phase in both]

    assert ran("precision=half_sr_full") == ran("precision=half_sr", "speed=plain")


# ---- rules ---------------------------------------------------------------------------------------


class Kept(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cos()


class EveryRule(nn.Module):
    """An op for each rule of op lists, `kept` being a layer with a dtype of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(X.clone())
        self.kept = Kept()

    def forward(self, x: Tensor) -> Tensor:
        low = x.mm(self.weight)
        wide = torch.softmax(low, 1)
        both = torch.add(low, wide)
        both.mul_(low)
        first = torch.hypot(low, both)
        asked = first.float()
        with disable_casts():
            off = torch.exp(asked)
        return self.kept(off)  # type: ignore[no-any-return]


class EveryRuleOfAutocast(EveryRule):
    def forward(self, x: Tensor) -> Tensor:
        low = x.mm(self.weight)
        wide = F.mse_loss(low, low.sigmoid(), reduction="none")
        both = torch.cat([low, wide])
        both.mul_(2)
        asked = both.double()
        with disable_casts():
            off = torch.exp(asked)
        return self.kept(off)  # type: ignore[no-any-return]


def hmp_like(calls: CallStack) -> Caster:
    lists = op_lists(["mm"], ["softmax"], ["add"], first_input=True)
    return OpListCaster(lists, BF16, watcher=calls)


def autocast(calls: CallStack) -> Caster:
    return LabelledCaster(AutocastCaster("cpu", BF16), shipped_lists("native", "cpu"), calls)


def traced(
    model: nn.Module, caster: Caster, calls: CallStack, layers: Mapping[str, str]
) -> list[TraceRow]:
    """The second training step of `model`."""
    precision = Precision(
        "bf16_mixed", device=CPU, execution="native", layers=layers, op_lists=caster
    )
    precision.prepare(model, CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    ops: list[RecordedOp] = []
    recorder = OpRecorder(ops.append, calls.current)
    for number in (1, 2):
        ops.clear()
        optimizer.zero_grad()
        with recorder.following(model, optimizer), recorder:
            precision.begin_step(number)
            output = precision.forward(model, X)
            precision.backward(precision.loss(lambda y, _: y.mean(), output, X))
            precision.step(optimizer)
    return trace(ops, layers)


def rules(rows: list[TraceRow], phase: str = "forward") -> list[tuple[str, str]]:
    return [(row.op, row.rule) for row in rows if row.phase == phase]


def test_each_rule_of_op_lists_is_named_once() -> None:
    calls = CallStack()
    found = traced(EveryRule(), hmp_like(calls), calls, {"kept": "fp32"})
    assert rules(found) == [
        ("mm", "listed lower"),
        ("softmax", "listed fp32"),
        ("add", "promote"),
        ("mul_", "in-place"),
        ("hypot", "first input"),
        ("float", "explicit"),
        ("exp", "disabled"),
        ("cos", "layer policy"),
    ]
    assert [row.module for row in found if row.phase == "forward"] == [""] * 7 + ["kept"]
    assert {rule for _, rule in rules(found, "backward")} == {"as forward"}
    assert rules(found, "other") == [("mean", "outside"), ("ones_like", "outside")]
    assert rules(found, "optimizer") == [("add_", "disabled")]


def test_each_row_has_the_dtypes_it_ran_in_and_the_casts_made_for_it() -> None:
    calls = CallStack()
    found = traced(EveryRule(), hmp_like(calls), calls, {"kept": "fp32"})
    down, up = ("float32", "bfloat16"), ("bfloat16", "float32")
    shown = {
        row.op: (row.dtypes_in, row.dtypes_out, [(c.from_dtype, c.to_dtype) for c in row.casts])
        for row in found
        if row.phase == "forward"
    }
    low, wide = ["bfloat16"], ["float32"]
    assert shown == {
        "mm": (low, low, [down, down]),
        "softmax": (wide, wide, [up]),
        "add": (wide, wide, [up]),
        "mul_": (wide, wide, [up]),
        "hypot": (low, low, [down]),
        "float": ([], [], [up]),
        "exp": (wide, wide, []),
        "cos": (wide, wide, []),
    }


def test_each_rule_of_autocast_is_named_once() -> None:
    calls = CallStack("autocast: ")
    model = EveryRuleOfAutocast()
    found = traced(model, autocast(calls), calls, {"kept": "fp32"})
    assert rules(found) == [
        ("mm", "autocast: lower"),
        ("sigmoid", "as it is"),
        ("mse_loss", "autocast: fp32"),
        ("cat", "autocast: promote"),
        ("mul_", "in-place"),
        ("double", "explicit"),
        ("exp", "disabled"),
        ("cos", "layer policy"),
    ]


def test_lists_that_leave_the_rest_to_pytorch_say_as_it_is() -> None:
    calls = CallStack()
    caster = OpListCaster(op_lists(["mm"], [], first_input=False), BF16, watcher=calls)
    model = nn.Sequential(nn.Tanh(), nn.Linear(4, 4))
    found = traced(model, caster, calls, {})
    assert rules(found) == [("tanh", "as it is"), ("linear", "listed lower")]


def test_the_cast_at_the_border_of_a_layer_is_its_policy_s() -> None:
    calls = CallStack()
    caster = OpListCaster(op_lists(["linear"], []), BF16, watcher=calls)
    model = nn.Sequential(nn.Linear(4, 4), Kept())
    found = traced(model, caster, calls, {"1": "fp32"})
    forward = [row for row in found if row.phase == "forward"]
    assert [(row.module, row.rule, len(row.casts)) for row in forward] == [
        ("0", "listed lower", 3),
        ("1", "layer policy", 1),
        ("1", "layer policy", 0),
    ]


# ---- labels are what autocast does ---------------------------------------------------------------

VIDEO = (1, 1, 4, 4, 4)
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "mm": lambda x: torch.mm(x, x),
    "@": lambda x: x @ x,
    "linear": lambda x: F.linear(x, x),
    "bmm": lambda x: torch.bmm(x.view(1, 4, 4), x.view(1, 4, 4)),
    "baddbmm": lambda x: torch.baddbmm(*[x.view(1, 4, 4)] * 3),
    "conv2d": lambda x: F.conv2d(x.view(1, 1, 4, 4), x.view(1, 1, 4, 4)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "prod": lambda x: x.prod(),
    "mse_loss": lambda x: F.mse_loss(x, x * 2),
    "huber_loss": lambda x: F.huber_loss(x, x * 2),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(4)),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "inverse": lambda x: torch.linalg.inv(x),
    "max_pool3d": lambda x: F.max_pool3d(x.repeat(4, 1, 1).view(VIDEO), 2),
    "softmax": lambda x: F.softmax(x, 1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "gelu": lambda x: F.gelu(x),
    "exp": lambda x: x.exp(),
    "sum": lambda x: x.sum(),
    "*": lambda x: x * x,
    "max_pool2d": lambda x: F.max_pool2d(x.view(1, 4, 4), 2),
}


def labelled(run: Callable[[], Tensor]) -> tuple[str, torch.dtype]:
    """The rule of the last op that computed something, and what dtype autocast gave."""
    calls, ops = CallStack("autocast: "), list[RecordedOp]()
    recorder = OpRecorder(ops.append, calls.current)
    with recorder, autocast(calls).region():
        result = run()
    made = [op for op in ops if op.call is not None and not op.is_cast and not op.is_view]
    return made[-1].call.rule, result.dtype


def test_the_label_of_an_op_is_what_autocast_does_with_it() -> None:
    """Ops are `lower` that give bfloat16 for float32, and `fp32` those that do the reverse."""
    does = {(BF16, BF16): "autocast: lower", (FP32, FP32): "autocast: fp32"}
    kinds = []
    for name, op in OPS.items():
        results = [labelled(lambda op=op, d=d: op(X.to(d))) for d in (FP32, BF16)]  # type: ignore[misc]
        given = (results[0][1], results[1][1])
        assert given in ((BF16, BF16), (FP32, FP32), (FP32, BF16)), name
        assert [label for label, _ in results] == [does.get(given, "as it is")] * 2, name
        kinds.append(results[0][0])
    assert min(kinds.count(k) for k in ("autocast: lower", "autocast: fp32", "as it is")) > 5


@pytest.mark.parametrize("op", [torch.cat, torch.stack])
def test_what_is_labelled_promote_is_promoted_by_autocast(op: Callable[..., Tensor]) -> None:
    assert labelled(lambda: op([X, X.bfloat16()])) == ("autocast: promote", FP32)
    assert labelled(lambda: op([X.bfloat16(), X.bfloat16()])) == ("autocast: promote", BF16)


# ---- redundant casts -----------------------------------------------------------------------------


def flags(run: Callable[[], object]) -> list[str | None]:
    """Of each cast that `run` makes, in order."""
    ops: list[RecordedOp] = []
    with OpRecorder(ops.append):
        run()
    return [cast.redundant for cast in casts_of(trace(ops))]


def changed_between() -> None:
    x = X.clone()
    x.bfloat16()
    x.add_(1)
    x.bfloat16()


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda: (X.bfloat16(), X.bfloat16(), X.bfloat16()), [None, *["cast twice"] * 2]),
        (lambda: X.bfloat16().float(), [None, "cast back"]),
        (lambda: X.bfloat16().view(2, 8).t()[:3].float(), [None, "cast back"]),
        (lambda: X.bfloat16().float().bfloat16(), [None, "cast back", "cast back"]),
        (lambda: X.bfloat16().double(), [None] * 2),  # on to a third dtype
        (lambda: X.bfloat16().exp().float(), [None] * 2),  # other numbers
        (changed_between, [None] * 2),
        (lambda: (X.clone().bfloat16(), X.clone().bfloat16()), [None] * 2),  # equal numbers
        (lambda: (X[:2].bfloat16(), X[2:].bfloat16()), [None] * 2),  # parts of one storage
        (lambda: (X[:2].bfloat16(), X[::2].bfloat16()), [None] * 2),
        # memory that is freed and given out again
        (lambda: [bool(torch.full((16,), float(i)).bfloat16()[0]) for i in range(20)], [None] * 20),
    ],
)
def test_casts_of_one_tensor_to_one_dtype_and_casts_back_are_redundant(
    run: Callable[[], object], expected: list[str | None]
) -> None:
    assert flags(run) == expected


class TwoHeads(nn.Module):
    """Two ops that take the same input and the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(X.clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) * F.linear(x, self.weight)


@pytest.mark.parametrize("make", [hmp_like, autocast])
def test_an_input_of_two_ops_is_cast_twice_and_a_weight_of_two_once(
    make: Callable[[CallStack], Caster],
) -> None:
    calls = CallStack()
    found = traced(TwoHeads(), make(calls), calls, {})
    casts = [(r.op, [c.redundant for c in r.casts]) for r in found if r.phase == "forward"]
    assert casts == [("linear", [None, None]), ("linear", ["cast twice"]), ("mul", [])]
    assert totals_of(found, 1.0).redundant == {"cast twice": 1}


# ---- totals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_reads_one_dtype_and_writes_the_other(dtype: torch.dtype) -> None:
    ops: list[RecordedOp] = []
    with OpRecorder(ops.append):
        X[:3].to(dtype)
    (cast,) = casts_of(trace(ops))
    assert cast.bytes == 3 * 4 * (4 + dtype.itemsize)
    assert (cast.from_dtype, cast.to_dtype) == ("float32", str(dtype).removeprefix("torch."))


@pytest.mark.usefixtures("short")
def test_times_of_rows_are_positive_and_add_up_to_the_totals() -> None:
    rows, step_time_s = trace_step(planned("fashion_mnist", *MODES["hmp"]))
    totals = totals_of(rows, step_time_s * 1e3)
    assert all((row.time_ms > 0) or not row.kernels for row in rows)
    assert all(cast.time_ms > 0 for row in rows for cast in row.casts)
    casts_ms = sum(cast.time_ms for row in rows for cast in row.casts)
    # Sums of some fifty float64 numbers, in another order: a few last bits.
    rel = 1e-12
    assert totals.cast_time_ms == pytest.approx(casts_ms, rel=rel)
    ops_ms = sum(row.time_ms for row in rows)
    assert totals.time_ms == pytest.approx(ops_ms + casts_ms, rel=rel)
    assert totals.cast_share == pytest.approx(casts_ms / (step_time_s * 1e3), rel=rel)
    assert totals.casts == sum(len(row.casts) for row in rows) > 0
    assert totals.cast_bytes == sum(c.bytes for row in rows for c in row.casts)
    assert [row.began_ms for row in rows] == sorted(row.began_ms for row in rows)


def row(
    op: str = "mm", *, ms: float = 1.0, dtype: str = "float32", casts: tuple[float, ...] = ()
) -> TraceRow:
    return TraceRow(
        op=op,
        phase="forward",
        module="",
        rule="listed lower",
        dtypes_in=[dtype],
        dtypes_out=[dtype],
        kernels=[op],
        began_ms=0.0,
        time_ms=ms,
        cast_time_ms=sum(casts),
        casts=[CastRecord("float32", "bfloat16", 6, at, None) for at in casts],
    )


def test_totals_of_rows_made_by_hand() -> None:
    made = [row(ms=1), row(ms=2, dtype="bfloat16", casts=(0.25, 0.75)), row(ms=4)]
    casts = made[1].casts
    casts[1] = msgspec.structs.replace(casts[1], redundant="cast back")
    totals = totals_of(made, step_time_ms=20.0)
    assert (totals.casts, totals.cast_bytes) == (2, 12)
    assert totals.redundant == {"cast back": 1}
    # Products and sums of a few decimal fractions.
    figures = [totals.time_ms, totals.cast_time_ms, totals.cast_share]
    assert figures == pytest.approx([8.0, 1.0, 0.05], rel=1e-12)
    assert totals.by_dtype["float32"] == pytest.approx((2, 5.0), rel=1e-12)
    assert totals.by_dtype["bfloat16"] == pytest.approx((1, 2.0), rel=1e-12)


def test_the_typical_step_has_the_median_time_of_each_row_and_cast() -> None:
    times = [(1.0, 30.0, 0.5), (5.0, 10.0, 0.1), (3.0, 20.0, 0.9)]
    traces = [[row(ms=a), row(ms=b, casts=(c,))] for a, b, c in times]
    found = typical(traces)
    # Medians of three are numbers of the three: nothing is computed.
    assert [r.time_ms for r in found] == [3.0, 20.0]
    assert casts_of(found)[0].time_ms == 0.5


def test_the_typical_step_is_the_last_where_they_ran_different_ops() -> None:
    other = [row("exp", ms=100)]
    last = [row(ms=7)]
    assert [(r.op, r.time_ms) for r in typical([other, other, last])] == [("mm", 7)]
