"""The names of precision modes: mprun's own, with their rows, and those of other libraries.

Lightning names a mode by its bits (`bf16-mixed`), Keras by its dtype (`mixed_bfloat16`). A name
that stands for one mode here is accepted and recorded as that mode. A name that fits several
(`bf16`: mixed, or everything in bfloat16) is refused, and the error names them, first the one that
most people mean. No torch, so that mistakes are answered at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from mprun.errors import did_you_mean, hint
from mprun.records.policy_columns import FORMAT_MODES
from mprun.records.reader import load_yaml

# The modes of conf/precision, in the order of tables
SHIPPED_MODES = (
    *("fp64", "fp32", "tf32", "bf16_mixed", "fp16_mixed", "bf16_true", "fp16_true"),
    *("bf16_sr", "half_sr", "half_sr_full", *FORMAT_MODES),
)


@cache
def mode_row(name: str) -> Mapping[str, Any]:
    """The columns of a shipped mode, as its file in conf/precision has them."""
    path = files("mprun.conf") / "precision" / f"{name}.yaml"
    return MappingProxyType(load_yaml(path.read_text(encoding="utf-8")))


# ---- names that others use ----------------------------------------------------------------------

OWN_ALIASES = {"fp16_sr": "half_sr"}  # As bf16_sr is named
LIGHTNING_NAMES = {
    "64-true": "fp64",
    "32-true": "fp32",
    "bf16-mixed": "bf16_mixed",
    "16-mixed": "fp16_mixed",
    "bf16-true": "bf16_true",
    "16-true": "fp16_true",
}
KERAS_NAMES = {
    "float64": "fp64",
    "float32": "fp32",
    "mixed_bfloat16": "bf16_mixed",
    "mixed_float16": "fp16_mixed",
    "bfloat16": "bf16_true",
    "float16": "fp16_true",
}
# Other names, to the mode they stand for
ALIASES = {**OWN_ALIASES, **LIGHTNING_NAMES, **KERAS_NAMES}
# Names that fit several modes, to those that are suggested, the likeliest first
MEANT = {
    **dict.fromkeys(("bf16", "torch.bfloat16"), ("bf16_mixed", "bf16_true", "bf16_sr")),
    **dict.fromkeys(("fp16", "half", "torch.float16"), ("fp16_mixed", "fp16_true", "half_sr")),
    **dict.fromkeys(("double", "torch.float64"), ("fp64",)),
    "torch.float32": ("fp32", "tf32"),
    **dict.fromkeys(("amp", "mixed"), ("bf16_mixed", "fp16_mixed")),
    **dict.fromkeys(("fp8", "int8"), ("fp8_tensorwise", "fp8_rowwise", "mxfp8")),
}


def own_label(label: str) -> str:
    """A variant's label with mprun's name of its mode: `bf16_mixed+hmp` of `bf16-mixed+hmp`."""
    return re.sub(r"^[\w-]+", lambda mode: ALIASES.get(mode[0], mode[0]), label)


def mode_hint(word: str, known: Collection[str]) -> str:
    """`; did you mean 'x' or 'y'?` for the legal modes that `word` may mean, or an empty string."""
    return did_you_mean([x for x in MEANT.get(word, ()) if x in known]) or hint(word, known)


SHORT_DTYPES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# Formats that `mprun numerics` measures on demand, beside those that it always does
FURTHER_FORMATS = (
    *("e4m3fnuz", "e5m2fnuz", "e3m2", "e2m3", "e2m1"),  # Single numbers
    *("fp8_tensorwise", "fp8_tensorwise_e5m2", "fp8_rowwise"),  # A scale per tensor, or per row
    # A scale per block
    *("mxfp8", "mxfp8_rceil", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4"),
)
