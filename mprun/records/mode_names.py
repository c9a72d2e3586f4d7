"""Other names of precision modes. Records, tables and messages have mprun's own.

Lightning names a mode by its bits (`bf16-mixed`), Keras by its dtype (`mixed_bfloat16`). A name
that stands for one mode here is accepted and recorded as that mode. A name that fits several
(`bf16`: mixed, or everything in bfloat16) is refused, and the error suggests mixed precision, which
most people mean by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mprun.errors import nearest

OWN_ALIASES = {"fp16_sr": "half_sr"}
LIGHTNING_NAMES = {
    "32-true": "fp32",
    "bf16-mixed": "bf16_mixed",
    "16-mixed": "fp16_mixed",
    "bf16-true": "bf16_true",
    "16-true": "fp16_true",
}
KERAS_NAMES = {
    "float32": "fp32",
    "mixed_bfloat16": "bf16_mixed",
    "mixed_float16": "fp16_mixed",
    "bfloat16": "bf16_true",
    "float16": "fp16_true",
}
ALIASES = {**OWN_ALIASES, **LIGHTNING_NAMES, **KERAS_NAMES}
"""Other names, to the mode they stand for."""
MEANT = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "16": "fp16_mixed",
    "32": "fp32",
    "64": "fp32",
    "64_true": "fp32",
    "float64": "fp32",
}
"""Names that fit several modes, or none, to the mode that is suggested."""


def own_label(label: str) -> str:
    """A variant's label with mprun's name of its mode: `bf16_mixed+hmp` of `bf16-mixed+hmp`."""
    return re.sub(r"^[\w-]+", lambda mode: ALIASES.get(mode[0], mode[0]), label)


def mode_hint(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the mode that `word` most likely means, or an empty string."""
    legal = list(known)
    modes = {_plain(name): name for name in legal}
    others = {**{_plain(name): mode for name, mode in ALIASES.items()}, **MEANT}
    modes |= {name: mode for name, mode in others.items() if mode in legal}
    key = _plain(word)
    near = key if key in modes else nearest(key, modes)
    return "" if near is None else f"; did you mean '{modes[near]}'?"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
