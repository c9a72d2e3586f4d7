"""The results of `mprun numerics` as plain values: the content of `numerics.json`.

Activations and gradients are those of the exact passes, in float32 and unscaled; weights and
updates those of the run. Each row also says what the run held: its dtypes, and how many numbers
were zero that are not zero in the exact pass.

All shares are of the values that are not zero. A zero in the exact pass is structural (an inactive
ReLU, padding, an input that is always 0), and no format loses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from mprun.numerics.collect import GRADIENTS, KINDS, LayerStatistics, Statistics
from mprun.numerics.format_verdict import (
    EITHER,
    FormatVerdict,
    GradientErrors,
    range_or_precision,
)
from mprun.numerics.histograms import Histogram
from mprun.numerics.loss_scale_advice import (
    PUBLISHED,
    LayerGradients,
    ScaleAdvice,
    best_tried,
    judge,
    need,
    power,
    recommend,
)
from mprun.numerics.lost_updates import LostUpdates
from mprun.numerics.noise import expected_db
from mprun.numerics.tolerance import NEEDED_DB
from mprun.precision.formats import BF16, FP16, Format
from mprun.records.deviation import Reference

FROM_THE_RUN = ("weights", "updates")
"""Kinds of which the run has the exact values."""


@dataclass(frozen=True)
class Findings:
    """Everything that was measured."""

    exact: Statistics
    """Of the passes in float32."""
    held: Statistics
    """Of the run."""
    largest: float
    """The largest gradient that float16 has to hold, unscaled."""
    where: str
    fp16: FormatVerdict
    """The errors of float16 passes, at a loss scale that fits."""
    bf16: FormatVerdict
    """The same in bfloat16."""
    tried: Mapping[float, GradientErrors]
    """Loss scale to the errors of float16 gradients at it; empty where none was tried."""
    undetermined: tuple[str, ...]
    """Parameters whose gradients are rounding errors in float32 already; they decide nothing."""
    zero: tuple[str, ...]
    """Parameters whose gradients are exactly zero in float32; they decide nothing either."""
    reference: Reference
    """How rounding errors were recognised."""
    unjudged_rows: frozenset[tuple[str, str]]
    """Kind and name of rows of gradients by activations that are rounding errors."""
    scale_kind: str
    """none, static or dynamic."""
    headroom: float = 2.0
    needed_db: float = NEEDED_DB

    @cached_property
    def advice(self) -> ScaleAdvice | None:
        """The recommended loss scale."""
        rows = self.exact.of(*GRADIENTS)
        layers = {n: (r.histogram, r.noise) for n, r in rows.items() if not self._is_noise(r)}
        return recommend(LayerGradients(self.largest, self.where, layers), self.headroom)

    def as_dict(self) -> dict[str, Any]:
        """Plain values; floats may be infinite or NaN."""
        rows = [self._row(row) for row in self._rows()]
        return {
            "verdict": self._verdict(rows),
            "loss_scale": self._loss_scale(),
            "lost_updates": _lost(self.held.lost),
            "rows": rows,
        }

    def _is_noise(self, row: LayerStatistics) -> bool:
        if row.kind == "weight_gradients":
            return row.name in self.undetermined
        return (row.kind, row.name) in self.unjudged_rows

    @cached_property
    def _in_use(self) -> float | None:
        """The run's last loss scale; None where it has none."""
        return self.held.scales[-1] if self.scale_kind != "none" and self.held.scales else None

    def _rows(self) -> list[LayerStatistics]:
        """Rows by kind, each kind in the order of the forward pass."""
        sources = {kind: self.held if kind in FROM_THE_RUN else self.exact for kind in KINDS}
        rows = [row for kind, source in sources.items() for row in source.of(kind).values()]
        forward = [row.name for row in rows if row.kind in ("weights", "activations")]
        order = {name: n for n, name in enumerate(forward)}
        return sorted(rows, key=lambda r: (KINDS.index(r.kind), order.get(r.name, len(order))))

    def _row(self, row: LayerStatistics) -> dict[str, Any]:
        counts = row.histogram
        result: dict[str, Any] = {
            "kind": row.kind,
            "name": row.name,
            "histogram": counts.as_dict(),
            "fp16": _shares(counts, row, FP16),
            "bf16": _shares(counts, row, BF16),
            "sqnr_db": {name: row.noise.db(name) for name in row.noise.noise},
            "verdict": None,
            "held": None,
            "loss_scaled": None,
        }
        if row.kind == "updates":  # are held nowhere: added, and lost or not
            return result
        held = self.held.rows.get((row.kind, row.name), LayerStatistics(row.kind, row.name))
        result["held"] = {
            "dtypes": sorted(str(d).removeprefix("torch.") for d in held.dtypes),
            "became_zero": _share(max(0, held.histogram.zero - counts.zero), counts.nonzero),
            "infinite": held.histogram.infinite,
            "nan": held.histogram.nan,
        }
        db = result["sqnr_db"]
        in_fp16 = db.get("fp16", math.inf)
        if row.kind in GRADIENTS:
            result["loss_scaled"] = self._loss_scaled(row, held)
            in_fp16 = result["loss_scaled"]["fp16_db"]
        in_bf16 = db.get("bf16", math.inf)
        if not self._is_noise(row):
            result["verdict"] = range_or_precision(
                self._suffices(self.fp16, row, in_fp16), self._suffices(self.bf16, row, in_bf16)
            )
        return result

    def _suffices(self, format: FormatVerdict, row: LayerStatistics, rounding_db: float) -> bool:
        """Whether a format suffices for a row: always where its passes are fine."""
        if format.will_do:
            return True
        is_parameter = row.kind == "weight_gradients"
        by_passes = not is_parameter or format.parameter_will_do(row.name)
        return by_passes and rounding_db >= self.needed_db

    def _loss_scaled(self, row: LayerStatistics, held: LayerStatistics) -> dict[str, Any]:
        """Gradients in float16 with the recommended loss scale, and with the run's."""
        counts, recommended = row.histogram, self.advice.scale if self.advice else 1.0
        result: dict[str, Any] = {
            "recommended": recommended,
            "fp16_db": expected_db(counts, row.noise.signal, FP16, recommended),
            "in_use": self._in_use,
        }
        if self._in_use is not None:
            by = math.frexp(self._in_use)[1] - 1
            result["fp16"] = {
                "below_normal": _share(counts.below(FP16.smallest_normal - by), counts.nonzero),
                "below_smallest": _share(counts.below(FP16.smallest - by), counts.nonzero),
                "becoming_zero": _share(counts.up_to(FP16.smallest - 1 - by), counts.nonzero),
                "above_largest": _share(held.histogram.infinite, counts.nonzero),
            }
        return result

    def _verdict(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        formats = {"fp16": self.fp16, "bf16": self.bf16}
        word = range_or_precision(self.fp16.will_do, self.bf16.will_do)
        names = [(f"{r['kind']} {r['name']}", r["verdict"]) for r in rows]
        others = (EITHER, None)
        return {
            "word": word,
            "reason": f"{self._in_fp16()}; in bfloat16 {_exactness(self.bf16)}",
            "made_by": [
                *(f"the loss in {LONG[name]}" for name, f in formats.items() if not f.loss_will_do),
                *(name for name, verdict in names if verdict not in others),
            ],
            "gradients_db": {name: f.errors.db for name, f in formats.items()},
            "passes": {
                name: {
                    "will_do": f.will_do,
                    "measure": asdict(f.measure),
                    "unavoidable": asdict(f.unavoidable),
                    "tolerance": vars(f.tolerance),
                }
                for name, f in formats.items()
            },
            "parameters_db": {
                p: {name: f.errors.db_of(p) for name, f in formats.items() if p in f.errors.ratios}
                for p in self.fp16.errors.ratios
            },
            "rows_of_another_verdict": [
                name for name, verdict in names if verdict not in (*others, word)
            ],
            "undetermined": sorted(self.undetermined),
            "zero_gradients": sorted(self.zero),
            "reference": asdict(self.reference),
        }

    def _in_fp16(self) -> str:
        at = "" if self.advice is None else f" ({power(self.advice.scale)} for all steps)"
        return f"in float16 at a fitting loss scale{at} {_exactness(self.fp16)}"

    def _loss_scale(self) -> dict[str, Any]:
        advice, used = self.advice, self.held.scales
        result: dict[str, Any] = {
            "kind": self.scale_kind,
            "in_use": self._in_use,
            "lowest_in_use": min(used, default=None),
            "highest_in_use": max(used, default=None),
            "recommended": advice.scale if advice else None,
            "reason": str(advice) if advice else NO_ADVICE,
            "needed": None,
            "need": NO_ADVICE,
            "largest_gradient": self.largest,
            "where": self.where,
            "headroom": self.headroom,
            "verdicts": [],
            "tried_db": {f"{s:.17g}": e.db for s, e in self.tried.items()},
            "best_tried": best_tried({s: e.db for s, e in self.tried.items()}),
        }
        if advice is not None:
            scales = {"none": 1.0, "published": PUBLISHED}
            if result["in_use"] is not None:
                scales["in use"] = result["in_use"]
            scales["recommended"] = advice.scale
            verdicts = {name: judge(s, advice, self.needed_db) for name, s in scales.items()}
            result["verdicts"] = [{"label": n, **vars(v)} for n, v in verdicts.items()]
            result["needed"], result["need"] = need(advice, self.needed_db)
        return result


LONG = {"fp16": "float16", "bf16": "bfloat16"}


def _exactness(format: FormatVerdict) -> str:
    """How exact the gradients and the loss of a format's passes are, and what is needed."""
    measure, tolerance = format.measure, format.tolerance
    loss, needed = measure.loss_difference, tolerance.gradient_db or 0.0
    if not math.isfinite(loss):
        return "the loss is not finite"
    if measure.worst_db == -math.inf:
        text = f"the gradient of {measure.worst_parameter} is not finite"
    else:
        text = f"weight gradients keep {_db(measure.worst_db, measure.worst_parameter)} or more"
        text += f" of signal over noise, {needed:.3g} dB are needed"
        if measure.worst_db < needed:
            text += "; without the noise that is no more than what batches differ by "
            text += _db(measure.judged_db, measure.beyond_parameter)
    if loss > tolerance.loss:
        text += f"; the loss is {loss:.2%} off, {tolerance.loss:.2%} are tolerated"
        text += f", {measure.judged_loss:.2%} beyond what batches differ by"
    return text


def _db(db: float, name: str) -> str:
    text = "all" if db == math.inf else f"{db:.1f} dB"
    return f"{text} ({name})" if name and db < math.inf else text


NO_ADVICE = "no loss scale can be recommended: every gradient is zero, or one is not finite"


def _shares(counts: Histogram, row: LayerStatistics, to: Format) -> dict[str, float | None]:
    """Shares of the non-zero values that a format holds with fewer bits, or not at all."""
    numbers = {
        "below_normal": counts.below(to.smallest_normal),
        "below_smallest": counts.below(to.smallest),
        "becoming_zero": counts.up_to(to.smallest - 1),
        "above_largest": row.noise.above.get(to.name, 0),
    }
    return {name: _share(n, counts.nonzero) for name, n in numbers.items()}


def _share(count: int, of: int) -> float | None:
    return count / of if of else None


def _lost(by_parameter: Mapping[str, LostUpdates]) -> dict[str, Any]:
    total = LostUpdates()
    for lost in by_parameter.values():
        total += lost
    return {
        "all": total.as_dict(),
        "by_parameter": {name: lost.as_dict() for name, lost in by_parameter.items()},
    }
