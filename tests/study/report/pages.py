"""Reports of every kind, each made once for all tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mprun.study.compare.comparison import Advice, Comparison, Interval, LookVerdict, Skipped
from mprun.study.report import canvas
from mprun.study.report.canvas import Plot
from mprun.study.report.exports import page
from mprun.study.report.plots import NAMES, draw
from tests.study.report.compared import comparison, hostile, of_losses

LONG = "x" * 300
"""A name or a path without a place to break it."""


def without_png(*_: object) -> dict[str, bytes]:
    return {"png": b""}


def drawn(found: Comparison, names: Sequence[str] = NAMES) -> list[Plot]:
    """These plots for a page, which takes no PNG."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canvas, "_framed", without_png)
        return draw(found, names)


def made(found: Comparison, plots: Sequence[str] = NAMES) -> str:
    """The page, with these plots or all."""
    return page(found, drawn(found, plots))


def with_advice(folder: Path) -> Comparison:
    """The report of `mprun advise`."""
    advice = Advice("bf16_mixed", LONG, {LONG: "slower"}, {"tf32": LONG}, (LONG, "a note " * 50))
    return replace(comparison(3, folder), advice=advice)


def with_failures(folder: Path) -> Comparison:
    """Failed and skipped runs, a variant without any run, warnings, long names everywhere."""
    base = comparison(4, folder)
    first, second, third, last = base.variants
    for run in (*second.runs, *last.runs):
        run.summary.error = f"{LONG} no space left on the device " * 5
    variants = (
        first,
        replace(second, label=LONG, failed=second.runs, substituted="matmuls in fp32"),
        replace(third, label="bf16_mixed " + "(train.lr=0.002, train.clip_norm=1) " * 8),
        replace(last, runs=(), failed=last.runs),
    )
    return replace(
        base,
        variants=variants,
        skipped=tuple(Skipped(Path(f"out/{LONG}{n}"), "still running") for n in range(30)),
        data=LONG,
        hardware=LONG,
        code=LONG,
        warnings=(LONG, "page faults take 45 % of the step " * 10),
        notes=(LONG, "a note " * 60),
    )


def with_looks(folder: Path) -> Comparison:
    """Ten variants of a study that looked twice at each."""
    found = comparison(10, folder)
    looks = (
        LookVerdict(4, 0.001, Interval(-0.05, 0.052), 0.98, "inconclusive"),
        LookVerdict(7, 0.001, Interval(-0.002, 0.004), 0.97, "equivalent"),
    )
    base, *others = found.variants
    variants = (base, *(replace(v, looks=looks) for v in others))
    return replace(found, variants=variants, planned_pairs=(4, 7, 10))


KINDS: dict[str, Callable[[Path], Comparison]] = {
    "one": lambda folder: comparison(1, folder),
    "two": lambda folder: comparison(2, folder),
    "ten": with_looks,
    "losses": lambda folder: of_losses(comparison(3, folder, seeds=1)),
    "hostile": hostile,
}
FURTHER: dict[str, Callable[[Path], Comparison]] = {
    "advice": with_advice,
    "failures": with_failures,
}
"""Kinds that are drawn with two of their plots."""


WITH_PNG = ("ten",)
"""Kinds whose PNG files tests look at, too."""


class Pages(dict[str, str]):
    """Pages by kind, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._drawn: dict[str, tuple[Comparison, list[Plot]]] = {}

    def drawn(self, kind: str) -> tuple[Comparison, list[Plot]]:
        """What a page shows."""
        if kind not in self._drawn:
            found = KINDS[kind](self._folder / kind)
            self._drawn[kind] = found, draw(found) if kind in WITH_PNG else drawn(found)
        return self._drawn[kind]

    def __missing__(self, kind: str) -> str:
        if kind in KINDS:
            self[kind] = page(*self.drawn(kind))
        else:
            self[kind] = made(FURTHER[kind](self._folder / kind), ["difference", "loss"])
        return self[kind]
