"""The files of a search: op lists and layers, with the reasons as comments.

The lists are YAML as `op_lists.lower_file` and `op_lists.fp32_file` read it, both in one file; the
layers are what `precision.layers_file` reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mprun.records.format_names import SHORT_DTYPES
from mprun.records.search_ops_record import Fp32Selection, OpSearch, SensitivityRow
from mprun.report.search_ops_tables import deviation_text

OPS, ALL_LOWER, LAYERS = "ops.yaml", "ops_all_lower.yaml", "layers.yaml"


def texts(search: OpSearch, config: str) -> dict[str, str]:
    """Name to content of the files: op lists; and layers, if modules are enough.

    Nothing if the search ended before the smallest list. `config` is for the comment at the top:
    `recipe mnist, precision fp16_mixed`.
    """
    if search.search is None:
        return {}
    ops, modules = search.search.ops, search.search.modules
    lines = {OPS: [*_head(search, config, ops), *_lists(search, ops.fp32)]}
    if modules is not None and modules.is_within:
        head = [*_head(search, config, modules)]
        beside = f"# For precision.layers_file={LAYERS}, beside this file."
        lines[ALL_LOWER] = [*head, beside, *_lists(search, ())]
        lines[LAYERS] = [*head, *_layers(search, modules.fp32)]
    return {name: "\n".join(text) + "\n" for name, text in lines.items()}


def comments(search: OpSearch, config: str) -> Iterator[str]:
    """Where the answer comes from, a line each, for files that are no lists; see `texts`."""
    if search.search is not None:
        ops, modules = search.search.ops, search.search.modules
        selection = modules if search.answer == "modules" and modules is not None else ops
        yield from (line.removeprefix("# ") for line in _head(search, config, selection))


def _head(search: OpSearch, config: str, selection: Fp32Selection) -> Iterator[str]:
    on, tolerance, low = search.measured_on, search.tolerance, search.dtype
    yield f"# Written by mprun search-ops: {config}."
    yield (
        f"# Measured against float32 on {on.batches} batches of {on.batch_size} samples "
        f"({on.split})."
    )
    gradients = tolerance.gradient_db
    gradient_text = (
        "" if gradients is None else f", every gradient's SQNR at least {gradients:.3g} dB"
    )
    yield f"# Tolerance: a loss {tolerance.loss:.2%} off{gradient_text}."
    yield f"# Weights of {low}'s precision alone: {deviation_text(search.unavoidable.measure)}."
    yield f"# Everything in {low}: {deviation_text(search.everything_lower.measure)}."
    yield f"# As listed here: {deviation_text(selection.measure)}."
    if not selection.is_within:
        yield "# THIS EXCEEDS THE TOLERANCE: no list meets it."


def _lists(search: OpSearch, fp32: Sequence[str]) -> Iterator[str]:
    rows = {row.name: row for row in search.ops}
    always = search.always
    yield "fp32:" + ("" if fp32 or always else " []  # no op needs it")
    yield from (f"  - {name}  # {_reason(search, rows[name])}" for name in fp32)
    yield from (f"  - {name}  # search_ops.always" for name in always)
    lower = [name for name in search.lower if name not in (*fp32, *always)]
    yield "lower:"
    yield from (f"  - {name}  # {_reason(search, rows[name])}" for name in lower if name in rows)
    yield "  # not in this model"
    yield from (f"  - {name}" for name in lower if name not in rows)


def _layers(search: OpSearch, modules: Sequence[str]) -> Iterator[str]:
    rows = {row.name: row for row in search.modules}
    yield from (f'"{name}": fp32  # {_reason(search, rows[name])}' for name in modules)


def _reason(search: OpSearch, row: SensitivityRow) -> str:
    harm = "" if row.harm_alone <= 1 else "harmful "
    return f"{harm}alone in {SHORT_DTYPES[search.dtype]}: {deviation_text(row.alone)}"
