"""Files of what a search found: op lists and layers, with their reasons as comments.

The lists are YAML as `op_lists.lower_file` and `op_lists.fp32_file` read it, both in one file; the
layers are what `precision.layers_file` reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mprun.records.run_record import number
from mprun.report.search_ops_tables import SHORT, measured

OPS, ALL_LOWER, LAYERS = "ops.yaml", "ops_all_lower.yaml", "layers.yaml"


def texts(found: Mapping[str, Any]) -> dict[str, str]:
    """Name to content of the files a search leaves: op lists; where modules are enough, these too.

    Args:
        found: the content of search_ops.json.
    """
    ops, modules = found["search"]["ops"], found["search"]["modules"]
    lines = {OPS: [*_head(found, ops), *_lists(found, ops["fp32"])]}
    if modules is not None and modules["is_within"]:
        beside = [f"# For precision.layers_file={LAYERS}, beside this file."]
        lines[ALL_LOWER] = [*_head(found, modules), *beside, *_lists(found, ())]
        lines[LAYERS] = [*_head(found, modules), *_layers(found, modules["fp32"])]
    return {name: "\n".join(text) + "\n" for name, text in lines.items()}


def _head(found: Mapping[str, Any], outcome: Mapping[str, Any]) -> Iterator[str]:
    on, tolerance, low = found["measured_on"], found["tolerance"], found["dtype"]
    yield f"# Found by mprun search-ops: recipe {found['recipe']}, precision {found['precision']}."
    yield (
        f"# Measured against float32 on {on['batches']} batches of {on['batch_size']} samples "
        f"({on['split']})."
    )
    gradients = tolerance["gradient_db"]
    also = "" if gradients is None else f", every gradient's SQNR at least {gradients:.3g} dB"
    yield f"# Tolerated: a loss {tolerance['loss']:.2%} off{also}."
    yield f"# Weights of {low}'s precision alone: {measured(found['unavoidable']['measure'])}."
    yield f"# Everything in {low}: {measured(found['everything_lower']['measure'])}."
    yield f"# As listed here: {measured(outcome['measure'])}."
    if not outcome["is_within"]:
        yield "# THIS IS MORE THAN IS TOLERATED: no list keeps to it."


def _lists(found: Mapping[str, Any], fp32: Sequence[str]) -> Iterator[str]:
    rows = {row["name"]: row for row in found["ops"]}
    always = found["always"]
    yield "fp32:" + ("" if fp32 or always else " []  # no op has to be")
    yield from (f"  - {name}  # {_reason(found, rows[name])}" for name in fp32)
    yield from (f"  - {name}  # search_ops.always" for name in always)
    lower = [name for name in found["lower"] if name not in (*fp32, *always)]
    yield "lower:"
    yield from (f"  - {n}  # {_reason(found, rows[n])}" for n in lower if n in rows)
    yield "  # not in this model"
    yield from (f"  - {name}" for name in lower if name not in rows)


def _layers(found: Mapping[str, Any], modules: Sequence[str]) -> Iterator[str]:
    rows = {row["name"]: row for row in found["modules"]}
    yield from (f'"{name}": fp32  # {_reason(found, rows[name])}' for name in modules)


def _reason(found: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """What the op or module does alone, beside what is tolerated."""
    harm = number(row["harm_alone"])
    said = "" if harm <= 1 else "harmful "
    return f"{said}alone in {SHORT[found['dtype']]}: {measured(row['alone'])}"
