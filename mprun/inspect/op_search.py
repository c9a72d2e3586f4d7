"""Which ops of a model do not tolerate the lower dtype, and the smallest list that spares them.

Each op is measured *alone*: it is lower and everything else is float32. Harm is 1 where that does
as much as is tolerated, and infinite where a loss is NaN. Harm alone does not choose a set: if two
ops overflow, the loss is NaN until both are moved. So `smallest_set` measures sets. In the end no
name can be left out. Another, smaller set may exist: to exclude that takes 2^n measurements.

The products of linear layers (GEMMs) are searched in the same way: *alone*, a product has the
format and everything else is float32; kept high, it is bfloat16 and the others have the format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from mprun.errors import NotMeasurableError, first_line
from mprun.inspect.cast_probe import LOSS_SCALES, CastProbe
from mprun.inspect.op_trace import CallStack
from mprun.inspect.passes import Batch, CastPlan, Forward, Loss, Passes, is_out_of_memory, ready
from mprun.inspect.search_result import (
    Effect,
    OpSearch,
    Samples,
    SearchOpsSettings,
    Selection,
    SensitivityRow,
)
from mprun.inspect.tolerance import DEFAULT, SLACK_DB, Deviation, Tolerance
from mprun.precision import Arithmetic, NativeArithmetic, OpListCaster, OpLists, op_lists
from mprun.precision.apply import call
from mprun.precision.caster import AutocastCaster, NoCaster
from mprun.precision.gemms import HIGH, LinearGemms, model_gemms
from mprun.precision.op_lists.lists import CONVOLUTIONS, RECURRENT, known, shipped_lists
from mprun.precision.policy import torch_dtype
from mprun.records.console import ReportPart, report_nothing
from mprun.records.layer_values import PRODUCTS, with_high_products
from mprun.train.assemble import Plan, build_arithmetic, build_caster, build_loss_scale, build_parts
from mprun.train.assemble.planned_memory import as_native
from mprun.train.loop import Limits, Trainer, TrainingComponents
from mprun.train.loss_terms import LossTerms
from mprun.train.recipe_quantities import quantities_of
from mprun.watch.op_watcher import OpRecorder, RecordedOp

Names = tuple[str, ...]


# ---- the choice ----------------------------------------------------------------------------------


def smallest_set(alone: Mapping[str, float], harm: Callable[[Names], float]) -> Names:
    """A set to keep high whose harm is at most 1, from which nothing can be left out.

    Names are added, the most harmful alone first, until that is enough, and dropped where the
    others are enough. Without a set that is enough, it is all names.

    Args:
        alone: name to its harm alone, in the order of the model's calls: of two equally harmful
            names the earlier is added first, because it may be the cause of the other.
        harm: measures a set; NaN counts as too much.
    """
    high: Names = ()
    for name in sorted(alone, key=lambda n: -alone[n]):
        if harm(high) <= 1:
            break
        high = (*high, name)
    before = None
    while high != before:  # again: without one name, another may be needless
        before = high
        for name in reversed(before):  # the least harmful alone first
            rest = tuple(n for n in high if n != name)
            high = rest if harm(rest) <= 1 else high
    return high


# ---- ops -----------------------------------------------------------------------------------------

# Ops that are on the lower list unless they need float32
HEAVY = (
    *("addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "einsum", "linear"),
    *("linalg_multi_dot", "matmul", "mm", "mv", "tensordot", "bilinear", "conv_tbc"),
    *(*CONVOLUTIONS, *RECURRENT, "scaled_dot_product_attention"),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_native_multi_head_attention"),
)
# Rules of ops that a list can move; those that only compare and those in place are not moved
MOVABLE = ("listed lower", "listed fp32", "promote", "first input")
# Kernels that compute nothing; a call that runs no others is left alone
COPIES = frozenset(("clone", "copy_", "_unsafe_view"))


class OpCandidates:
    """The ops of a model that lists can move. A search starts with everything lower:

        heavy ops      matmuls, convolutions, attention and recurrent layers, which 16-bit units
                       speed up, are on the lower list
        followers      every other op runs in the dtype of its first input, or where the model joins
                       several, in the widest (HMP's rules): behind a heavy op the lower dtype
        entrances      an op that would still run in float32 (its input is the model's, a float32
                       table, or the result of a cast in the model's code) is on the lower list

    An op on no list runs in float32 behind one that was moved there: the large numbers of an `exp`
    pass through the `sum` behind it without naming that too.

    Args:
        model, inputs: the model, and the inputs of one batch; some forward passes are run on them.
        dtype: the lower one, bfloat16 or float16.
        arithmetic: computes the ops; PyTorch's kernels by default.
        forward: gives the model's output for the inputs.

    Raises:
        NotMeasurableError: the model fails in the lower dtype and no single op is to blame.
    """

    kind, slack_db = "op", SLACK_DB

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        dtype: torch.dtype,
        arithmetic: Arithmetic | None = None,
        forward: Forward = call,
    ) -> None:
        self._dtype, self._arithmetic = dtype, arithmetic or NativeArithmetic()
        self._device_type = next(model.parameters()).device.type
        self.lower: Names = HEAVY
        """Ops on the lower list when everything is lower."""
        self.names = Counter(self._movable_ops(model, lambda: forward(model, inputs)))

    def lists(self, fp32: Collection[str] = ()) -> OpLists:
        """These ops on the fp32 list, the others lower."""
        lower = [n for n in self.lower if n not in fp32]
        return op_lists(lower, tuple(fp32), promoted())

    def kept(self, names: Collection[str]) -> CastPlan:
        """These in float32."""
        return self._plan(self.lists(names))

    def alone(self, name: str) -> CastPlan:
        """This one lower."""
        return self._plan(op_lists([name], [n for n in self.names if n != name], promoted()))

    def unavoidable(self, probe: CastProbe) -> Deviation:
        """Everything in float32, with weights of the lower dtype's precision."""
        return probe.unavoidable(self._dtype)

    def _caster(self, lists: OpLists, watcher: CallStack | None = None) -> OpListCaster:
        return OpListCaster(lists, self._dtype, self._device_type, watcher=watcher)

    def _plan(self, lists: OpLists) -> CastPlan:
        return CastPlan(self._caster(lists), arithmetic=self._arithmetic)

    def _movable_ops(self, model: nn.Module, run: Callable[[], object]) -> list[str]:
        """The op of each call in a forward pass that lists can move.

        Entrances are put on the lower list. Ops that cannot be computed in the lower dtype run in
        float32 here, if that is enough.
        """
        failing: Names = ()
        while True:
            watcher, ops = CallStack(), list[RecordedOp]()
            recorder = OpRecorder(ops.append, watcher.current)
            caster = self._caster(self.lists(failing), watcher)
            try:
                with ready(model), recorder.following(model), recorder, caster.region():
                    run()
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                if not watcher.failed or watcher.failed in failing:
                    raise NotMeasurableError(
                        f"with every op in {self._dtype}, {watcher.failed or 'an op'} fails: "
                        f"{first_line(error)}"
                    ) from None
                failing = (*failing, watcher.failed)
                continue
            called = (op for op in ops if op.phase == "forward" and op.call is not None)
            calls = [list(group) for _, group in groupby(called, key=lambda op: op.call.number)]
            made = [(group[0].call.name, dtype) for group in calls if (dtype := _moves(group))]
            wide = (name for name, dtype in made if dtype == torch.float32)
            entrance = next((n for n in wide if n not in (*self.lower, *failing)), None)
            if entrance is None:
                return [name for name, _ in made]
            self.lower = (*self.lower, entrance)


def _moves(ops: Sequence[RecordedOp]) -> torch.dtype | None:
    """The dtype of the floating result of a call that lists can move; None for another call."""
    if ops[0].call.rule not in MOVABLE or ops[0].call.name not in known():
        return None
    computing = [op for op in ops if not op.is_cast and not op.is_view]
    takes = any(v.dtype.is_floating_point for op in computing for v in op.inputs)
    results = ([v for v in op.outputs if v.dtype.is_floating_point] for op in reversed(computing))
    result = next((values[0] for values in results if values), None)  # others are statistics
    if not takes or result is None or COPIES.issuperset(op.name for op in computing):
        return None
    return result.dtype


def promoted() -> list[str]:
    """HMP's third list: ops that join several tensors."""
    rules = shipped_lists("hmp", "cpu").rules
    return [name for name, kind in rules.items() if kind == "promote"]


# ---- products of linear layers -------------------------------------------------------------------


def with_high(gemms: Mapping[str, LinearGemms], high: Collection[str]) -> dict[str, LinearGemms]:
    """The formats of layers, without those of GEMMs (`layer.product`); only layers with some."""
    kept = {
        layer: of_layer._replace(**{p: HIGH for p in PRODUCTS if f"{layer}.{p}" in high})
        for layer, of_layer in gemms.items()
    }
    return {layer: of_layer for layer, of_layer in kept.items() if any(g.formats for g in of_layer)}


class GemmCandidates:
    """The GEMMs of a model's linear layers that have a format, by what stays high together.

    `gemms` are the formats of each layer that the mode converts; `per` is gemm for each by itself,
    layer for those of a layer together. Others get autocast to bfloat16 of `device_type`.
    """

    # SQNR of a gradient: 10 dB, as for 16 bits, would leave nothing of NVFP4's gradients
    slack_db = 6.0

    def __init__(
        self, gemms: Mapping[str, LinearGemms], per: str = "gemm", device_type: str = "cpu"
    ) -> None:
        self.kind = "GEMM" if per == "gemm" else "layer"
        self._gemms = gemms
        self._bfloat16 = AutocastCaster(device_type, torch.bfloat16)
        self._groups: dict[str, list[str]] = {}
        for layer, of_layer in gemms.items():
            for product in PRODUCTS:
                if getattr(of_layer, product).formats:
                    gemm = f"{layer}.{product}"
                    name = gemm if per == "gemm" else layer
                    self._groups.setdefault(name, []).append(gemm)
        self.names = {name: len(group) for name, group in self._groups.items()}

    def alone(self, name: str) -> CastPlan:
        """This one in its format, everything else in float32."""
        others = [other for other in self.names if other != name]
        return CastPlan(NoCaster(), gemms=with_high(self._gemms, self._of(others)))

    def kept(self, names: Collection[str]) -> CastPlan:
        """These in bfloat16, the others in their formats."""
        return CastPlan(self._bfloat16, gemms=with_high(self._gemms, self._of(names)))

    def unavoidable(self, probe: CastProbe) -> Deviation:
        """Everything in float32, with weights of the format's precision."""
        weights = {f"{name}.weight" for name in self._gemms}
        steps = [of.forward.right.half_step for of in self._gemms.values() if of.forward.right]
        return probe.with_moved(weights, max(steps, default=0.0))

    def layers(self, mode: str, names: Collection[str]) -> dict[str, str]:
        """`precision.layers` of a run in the mode with these in bfloat16.

        Empty if no GEMM keeps its format: such a run is refused.
        """
        low = self._of(name for name in self.names if name not in names)
        values = {
            layer: with_high_products(mode, [p for p in PRODUCTS if f"{layer}.{p}" not in low])
            for layer in self._gemms
        }
        high = {gemm.rpartition(".")[0] for gemm in self._of(names)}
        return {layer: value for layer, value in values.items() if low and layer in high}

    def _of(self, names: Iterable[str]) -> set[str]:
        return {gemm for name in names for gemm in self._groups[name]}


# ---- the search ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fp32List(Selection):
    """The smallest list of ops to keep in float32, measured."""

    lists: OpLists  # For an `OpListCaster`

    @property
    def fp32(self) -> Names:
        """Names of ops to keep in float32; the most harmful first."""
        return self.high


class Sensitivity:
    """Measures candidates one by one, and sets of them: `sensitivity(model, ...)` gives one.

    Args:
        probe: measures any cast plan, and knows which parameters are not judged.
        candidates: what can be kept high.
        report: is called before each measurement.
    """

    def __init__(
        self,
        probe: CastProbe,
        candidates: OpCandidates | GemmCandidates,
        report: ReportPart = report_nothing,
    ) -> None:
        self.probe, self.candidates, self._report = probe, candidates, report
        self.ops: list[Effect] = []
        """The effect of each candidate, in the order of their first calls."""
        self.unavoidable = candidates.unavoidable(probe)
        """Everything in float32, with weights of the lower precision."""
        self._known: dict[frozenset[str], Deviation] = {}
        self.lower = self.kept(())
        """Everything lower."""

    def kept(self, names: Names) -> Deviation:
        """The distance from float32 with `names` high and the others lower; each set once."""
        key = frozenset(names)
        if key not in self._known:
            self._report(f"kept high: {', '.join(names) or 'nothing'}", len(self._known))
            self._known[key] = self.probe.measure(self.candidates.kept(names))
        return self._known[key]

    def measure(self) -> None:
        """Measure the effect of each candidate."""
        every = self.candidates.names
        for name, calls in every.items():
            self._report(f"{self.candidates.kind} {name}", len(self.ops), len(every))
            alone = self.probe.measure(self.candidates.alone(name))
            self.ops.append(Effect(name, calls, alone))

    def beside(self, asked: Tolerance) -> Tolerance:
        """What is asked, and at least what weights of the lower precision cost by themselves."""
        return asked.beside(self.unavoidable, self.candidates.slack_db)

    def smallest(self, asked: Tolerance = DEFAULT) -> Selection:
        """The smallest set that was found that keeps to the tolerance that is `asked`."""
        tolerance = self.beside(asked)

        def harm(names: Names) -> float:
            return tolerance.harm(self.kept(names))

        alone = {effect.name: tolerance.harm(effect.alone) for effect in self.ops}
        names = smallest_set(alone, harm)
        return Selection(names, harm(names), self.kept(names))

    def smallest_ops(self, tolerance: Tolerance = DEFAULT) -> Fp32List:
        """The smallest list of ops in float32 that keeps to the tolerance."""
        assert isinstance(self.candidates, OpCandidates)
        kept = self.smallest(tolerance)
        return Fp32List(**vars(kept), lists=self.candidates.lists(kept.high))


def sensitivity(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Batch],
    dtype: torch.dtype = torch.float16,
    *,
    arithmetic: Arithmetic | None = None,
    loss_scales: Sequence[float] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Sensitivity:
    """The effect of each op of a model in a 16-bit dtype, measured on loss and gradients.

        result = mprun.numerics.sensitivity(model, F.cross_entropy, batches, torch.float16)
        lists = result.smallest_ops().lists  # for mprun.Precision(..., op_lists=lists)

    The model is not changed. About two forward and backward passes are run for each op and each
    batch, and the float32 gradients of each batch are kept in memory.

    Args:
        model: parameters in float32.
        loss: `loss(output, target)`, a scalar; it is computed from float32 outputs.
        batches: pairs of inputs and target, on the model's device. Inputs are a tensor, a tuple of
            arguments, or a mapping of named ones. Take validation data, never the test set.
        dtype: float16 or bfloat16.
        arithmetic: computes the ops; PyTorch's kernels by default.
        loss_scales: tried in turn until gradients are finite; by default powers of two from 2^16
            down to 1 for float16, and 1 for bfloat16.
        report: is called with a short text about what is measured next.

    Raises:
        ValueError: no batches; no parameters to train, or 16-bit ones; a loss or gradient that is
            not finite in float32; another dtype.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"dtype={dtype}: legal are torch.float16, torch.bfloat16")
    passes = Passes(model, loss, batches)
    scales = LOSS_SCALES.get(dtype, (1.0,)) if loss_scales is None else loss_scales
    candidates = OpCandidates(model, passes.batches[0][0], dtype, arithmetic)
    measured = Sensitivity(
        CastProbe(passes, scales), candidates, lambda text, done=0, total=None: report(text)
    )
    measured.measure()
    return measured


# ---- of a run ------------------------------------------------------------------------------------

SCALE_STEP = 16.0  # Loss scales that are tried are this factor apart: five from 2^16 to 1


def search(low: Plan, float32: Plan, settings: SearchOpsSettings, report: ReportPart) -> OpSearch:
    """Train a few steps in float32, measure each candidate, and search the smallest set."""
    policy, of_ops = low.policy, low.policy.gemms == "none"
    # a plan with formats would round in its layers; they are here put on by the search
    built = build_parts(low if of_ops else as_native(low))
    samples, passes = _passes(low, built, settings.batches)
    _load_trained(built, float32, settings.warmup_steps, report)
    probe = CastProbe(passes, loss_scales(low))
    candidates: OpCandidates | GemmCandidates
    if of_ops:
        dtype, arithmetic = torch_dtype(policy.compute_dtype), build_arithmetic(low)
        inputs, forward = passes.batches[0][0], passes.forward
        candidates = OpCandidates(built.model, inputs, dtype, arithmetic, forward)
        given = CastPlan(build_caster(low), arithmetic=arithmetic)
        given_name = policy.casting if low.op_lists is None else low.config.op_lists.name
    else:
        gemms = model_gemms(built.model, {}, policy.gemms, policy.hadamard)
        candidates = GemmCandidates(gemms, settings.per, low.device.type)
        given, given_name = candidates.kept(candidates.names), "bf16_mixed"
    measured = Sensitivity(probe, candidates, report)
    report("measuring the casts of the configuration")
    given_deviation = probe.measure(given)
    asked = Tolerance(settings.tolerance, settings.gradient_db)
    measured.measure()
    answer = measured.smallest(asked)
    tolerance = measured.beside(asked)
    rows = [SensitivityRow(**vars(x), harm_alone=tolerance.harm(x.alone)) for x in measured.ops]
    record = OpSearch(
        kind=candidates.kind,
        low=policy.compute_dtype if of_ops else policy.gemms,
        high="float32" if of_ops else "bfloat16",
        measured_on=samples,
        tolerance=tolerance,
        unjudged_parameters=list(probe.rounding.undetermined),
        zero_gradients=list(probe.rounding.zero),
        reference=probe.rounding.reference,
        unavoidable=measured.unavoidable,
        everything_lower=measured.lower,
        given=given_deviation,
        given_name=given_name,
        rows=rows,
        answer=answer,
    )
    if isinstance(candidates, OpCandidates):
        return replace(record, lower=list(candidates.lower))
    return replace(record, layers=candidates.layers(policy.gemms, answer.high))


def _passes(low: Plan, built: TrainingComponents, count: int) -> tuple[Samples, Passes]:
    """Passes on batches of validation data of the training's size, smaller if there is less."""
    held_out = not built.validation.is_empty
    source = built.validation if held_out else built.train
    batches = source.some(count, low.batch.micro)
    samples = Samples("validation" if held_out else "train", len(batches), batches[0].size)
    pairs = [(batch.inputs, batch.content) for batch in batches]
    named, loss = quantities_of(low.recipe), LossTerms(low.recipe)
    return samples, Passes(built.model, loss, pairs, low.recipe.forward, named)


def _load_trained(built: TrainingComponents, float32: Plan, steps: int, report: ReportPart) -> None:
    """Give the model the weights of a training: drawn weights are only its start."""
    report(f"training {steps} steps in float32")
    # validation data are for the search alone, and would take time after each epoch
    without = replace(float32.splits, validation=float32.splits.validation.first(0))
    with float32.backend_flags():  # inside the flags of the mode: float32 is IEEE here
        trained = build_parts(replace(float32, splits=without))
        if steps:
            Trainer(trained, Limits(None, steps, None)).fit()
    report("measuring float32")
    built.model.load_state_dict(trained.model.state_dict())


def loss_scales(plan: Plan) -> tuple[float, ...]:
    """The loss scales that a plan's may take, the largest first."""
    scale = build_loss_scale(plan.config, {}, torch.device("cpu"))
    scales = [1.0 if scale.tensor is None else scale.tensor.item()]
    while scale.kind == "dynamic" and scales[-1] >= SCALE_STEP:
        scales.append(scales[-1] / SCALE_STEP)
    return tuple(scales)
