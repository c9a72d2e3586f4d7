"""A guard that keeps single matrix products out of a format that loses them.

A format of 8 bits or fewer is chosen for a whole training, but a single product of a single step
may not tolerate it. The guard judges both factors of each product before it is computed, and where
one passes a threshold, computes the product in the layer's own dtype instead. For each factor x,
with q its rounding to nearest, also where random bits round it:

    underflow   the share of the numbers other than 0 that become 0
    error       the mean over rows of   sum of (x - q)^2 over lost numbers / sum of x^2

A row lies along the dimension that is summed. A number is lost if it moved by more than half a step
of the format's mantissa, |x - q| > 2^-(M + 1) |x|. The thresholds are those of NVIDIA's
AutoswitchGemm (Transformer Engine, "Debugging with precision debug tools"), whose error is absolute
and has the mantissa's share: docs/reference/guard.md says why this one differs. The trade-off: both
measures are read from the device for each product, and a lost number need not matter for the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from mprun.precision.formats import BlockFormat, quantise
from mprun.records.run_record import GuardedGemm, GuardThresholds, number

ACTIONS = ("off", "log", "promote")


class Factor(NamedTuple):
    """A factor of a product."""

    name: str  # input, weight or gradient
    values: Tensor  # float32 [M, K]; K is summed
    format: BlockFormat
    rounded: Tensor | None  # To nearest; None where the product rounds it stochastically


class Loss(NamedTuple):
    """What a factor loses by its rounding."""

    underflow: float  # Share of the numbers other than 0 that become 0
    error: float
    """Lost squares over all squares, mean of rows; infinity where a number is none any more."""


# By the bits of a format's numbers, without its scales. Four bits lose many numbers of every
# tensor: in healthy models up to 81 % (gradients behind a ReLU), with an error of up to 0.07; those
# of 8 bits are NVIDIA's.
THRESHOLDS = {8: Loss(0.05, 1e-4), 4: Loss(0.9, 0.2)}
# Of the largest row: smaller ones do not count for the error. It is half of float32's last bit, so
# beside that row float32 cannot hold them either. The gradient of a first query in causal attention
# is such a row, 0 but for noise.
MIN_ROW = 2.0**-24


def thresholds(underflow: float | None = None, error: float | None = None) -> dict[int, Loss]:
    """The defaults, or for all formats what is given."""
    return {
        bits: Loss(
            default.underflow if underflow is None else underflow,
            default.error if error is None else error,
        )
        for bits, default in THRESHOLDS.items()
    }


def losses(x: Tensor, q: Tensor, half_step: float) -> Tensor:
    """Underflow and error of a factor, float32 [2] of `Loss`, on its device.

    Zeros and rows below `MIN_ROW` do not count; 0 where `x` is not finite.

    Args:
        x, q: float32 [M, K], K is summed; and rounded to the format.
        half_step: of the format: the share of itself by which it moves a number that fits it.
    """
    present = x != 0
    underflow = (present & (q == 0)).sum() / present.sum().clamp_min(1)
    # Over the largest of the row, so that no square overflows or vanishes.
    size = x.abs().amax(1, keepdim=True)
    counts = ((size > 0) & (size >= MIN_ROW * size.amax())).squeeze(1)
    size = torch.where(size > 0, size, 1.0)
    moved = (x - q).abs()
    lost = torch.where(moved > half_step * x.abs(), moved / size, 0.0).square().sum(1)
    whole = (x / size).square().sum(1)
    # `whole` is 1 or more where a row has a number, whose largest is 1; the bound is for rows of 0
    shares = torch.where(counts, lost / whole.clamp_min(1.0), 0.0)
    error = shares.sum() / counts.sum().clamp_min(1)
    # `q` alone is not finite: a number overflowed in the format
    error = torch.where(torch.isfinite(q).all(), error, torch.inf)
    return torch.where(torch.isfinite(x).all(), torch.stack([underflow, error]), 0.0)


class GemmFinding(NamedTuple):
    """A product of a step that passed a threshold."""

    step: int
    module: str
    product: str  # forward, grad_input or grad_weight
    factors: tuple[str, ...]  # Those that passed
    underflow: float  # Of the factor with the largest one
    error: float


# Gives the findings of all processes for those of this one
Share = Callable[[list[GemmFinding]], list[GemmFinding]]


class GemmGuard:
    """Judges every product, promotes those that pass a threshold if `action` says so, counts them.

    Outside steps, in evaluation, products are judged and promoted alike, and not counted.

    Args:
        action: off (nothing is judged), log or promote.
        limits: thresholds by the bits of a format's numbers.
        share: gives the findings of all processes in a step, which each counts alike.
    """

    def __init__(
        self,
        action: str = "off",
        limits: Mapping[int, Loss] | None = None,
        share: Share = lambda own: own,
    ) -> None:
        self.action = action
        self._limits, self._share = limits or {}, share
        self._rows: dict[tuple[str, str], GuardedGemm] = {}
        self._found: list[GemmFinding] = []
        """In this step, not counted yet."""
        self._counted: set[tuple[str, str]] = set()
        """Rows that have counted this step."""
        self._step, self._in_step = 0, False
        self._hear: Callable[[GemmFinding], None] = lambda finding: None

    def __deepcopy__(self, memo: object) -> GemmGuard:
        return self  # a copied model is judged by the guard of its original

    def __reduce__(self) -> tuple[Any, ...]:
        return GemmGuard, (self.action, self._limits)  # a stored one begins anew

    @property
    def rows(self) -> list[GuardedGemm]:
        """The products that passed a threshold so far, in the order of their first step."""
        return [*self._rows.values()]

    @property
    def thresholds(self) -> dict[str, GuardThresholds]:
        """Of formats, by the bits of their numbers."""
        return {str(bits): GuardThresholds(**x._asdict()) for bits, x in self._limits.items()}

    def listen(self, hear: Callable[[GemmFinding], None]) -> None:
        """From now on, call `hear` with the findings of a step when it ends."""
        self._hear = hear

    def begin_step(self, step: int) -> None:
        """Training step number `step` begins: the findings until it ends count."""
        self._step, self._in_step = step, True
        self._found, self._counted = [], set()

    def end_step(self) -> None:
        """Its gradients are complete."""
        if self.action == "off" or not self._in_step:
            return
        self._in_step = False
        # Of this process first, so that others get one row for each product
        own, self._found = self._found, []
        for finding in merged(self._share(merged(own))):
            self._count(finding)
            self._hear(finding)

    def resume_step(self) -> None:
        """Another pass of the same step follows."""
        self._in_step = True

    def promotes(self, module: str, product: str, factors: Sequence[Factor]) -> bool:
        """Judge both factors of a product; whether to compute it in the dtype of its layer.

        `product` is forward, grad_input or grad_weight.
        """
        if self.action == "off":
            return False
        with torch.no_grad():
            # Both factors in one transfer: it waits for the device
            read = torch.stack([_of(x) for x in factors]).tolist()
        judged = {x.name: Loss(*values) for x, values in zip(factors, read, strict=True)}
        limits = {x.name: self._limits[x.format.element.bits] for x in factors}
        pairs = [(name, loss, limits[name]) for name, loss in judged.items()]
        passed = tuple(n for n, x, y in pairs if x.underflow > y.underflow or x.error > y.error)
        if not passed:
            return False
        if self._in_step:
            worst = [max(values) for values in zip(*judged.values(), strict=True)]
            self._found.append(GemmFinding(self._step, module, product, passed, *worst))
        return self.action == "promote"

    def _count(self, finding: GemmFinding) -> None:
        key = finding.module, finding.product
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = GuardedGemm(
                module=finding.module,
                product=finding.product,
                steps=0,
                first_step=finding.step,
                underflow=0.0,
                error=0.0,
                factors=[],
            )
        row.steps += key not in self._counted
        self._counted.add(key)
        row.underflow = max(row.underflow, finding.underflow)
        row.error = max(number(row.error), finding.error)
        row.factors = [*dict.fromkeys([*row.factors, *finding.factors])]

    def state_dict(self) -> dict[str, Any]:
        """Plain values for `load_state_dict`; none where nothing is judged."""
        gemms = [asdict(row) for row in self._rows.values()]
        return {} if self.action == "off" else {"gemms": gemms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        if self.action != "off":
            rows = msgspec.convert(state["gemms"], list[GuardedGemm])
            self._rows = {(row.module, row.product): row for row in rows}


NO_GUARD = GemmGuard()


def _of(factor: Factor) -> Tensor:
    rounded = factor.rounded
    if rounded is None:
        rounded = quantise(factor.values, factor.format)
    return losses(factor.values, rounded, factor.format.half_step)


def merged(findings: Sequence[GemmFinding]) -> list[GemmFinding]:
    """One finding for each product of a step: all its factors that passed, the worst measures."""
    of_product: dict[tuple[str, str], GemmFinding] = {}
    for x in findings:
        before = of_product.setdefault((x.module, x.product), x)
        of_product[x.module, x.product] = x._replace(
            factors=tuple(dict.fromkeys([*before.factors, *x.factors])),
            underflow=max(before.underflow, x.underflow),
            error=max(before.error, x.error),
        )
    return [*of_product.values()]


def guard_of(
    action: GemmGuard | str,
    underflow: float | None = None,
    error: float | None = None,
    share: Share = lambda own: own,
) -> GemmGuard:
    """The guard of an action: off, log or promote; a guard is taken as it is.

    `underflow` and `error` are thresholds for all formats; None: those of `THRESHOLDS`.

    Raises `ValueError` for another action.
    """
    if isinstance(action, GemmGuard):
        return action
    if action not in ACTIONS:
        raise ValueError(f"guard={action!r}; legal: {', '.join(ACTIONS)}")
    if action == "off":
        return NO_GUARD
    return GemmGuard(action, thresholds(underflow, error), share)
