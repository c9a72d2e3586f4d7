"""What precisions are called: modes under other names, formats, values of `precision.layers`.

Lightning names a mode by its bits (`bf16-mixed`), Keras by its dtype (`mixed_bfloat16`). A name
that stands for one mode here is accepted and recorded as that mode. A name that fits several
(`bf16`: mixed, or everything in bfloat16) is refused, and the error names them, first the one that
most people mean. The formats themselves are in `mprun.precision.formats`, the products of
modes in `mprun.precision.gemms`. The names stand here so that mistakes are answered without torch.

`precision.layers` gives a module a dtype, a mode, or a format for each product. A linear layer
multiplies three times in a training step: forward, for the gradient of its input and for the
gradient of its weight. `{forward: fp8, grad_weight: fp32}` gives some of these products a format of
their own; in plans and records it is the text `forward=fp8,grad_weight=fp32`. What a run's guard of
matrix products found is written in this form too, for the next run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mprun.errors import did_you_mean, hint, nearest
from mprun.records.policy_columns import FORMAT_MODES
from mprun.records.run_record import Summary

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
    "bf16": ("bf16_mixed", "bf16_true", "bf16_sr"),
    **dict.fromkeys(("fp16", "16", "half"), ("fp16_mixed", "fp16_true", "half_sr")),
    **dict.fromkeys(("amp", "autocast", "mixed"), ("bf16_mixed", "fp16_mixed")),
    **dict.fromkeys(("true", "low"), ("bf16_true", "fp16_true")),
    **dict.fromkeys(("32", "float", "full", "64", "64_true", "float64", "fp64"), ("fp32",)),
    **dict.fromkeys(("fp8", "float8", "8", "int8"), ("fp8_tensorwise", "fp8_rowwise", "mxfp8")),
    **dict.fromkeys(("fp4", "float4", "4", "int4"), ("nvfp4",)),
}
"""Names that fit several modes, or none, to the modes that are suggested, the likeliest first."""


def own_label(label: str) -> str:
    """A variant's label with mprun's name of its mode: `bf16_mixed+hmp` of `bf16-mixed+hmp`."""
    return re.sub(r"^[\w-]+", lambda mode: ALIASES.get(mode[0], mode[0]), label)


def mode_hint(word: str, known: Iterable[str], what: Mapping[str, str] | None = None) -> str:
    """`; did you mean 'x' or 'y'?` for the modes that `word` may mean, or an empty string.

    Args:
        word: as it was given.
        known: the modes that are legal.
        what: describes modes, where several are named.
    """
    legal = list(known)
    modes = {_plain(name): [name] for name in legal}
    others = {**{_plain(name): (mode,) for name, mode in ALIASES.items()}, **MEANT}
    for name, meant in others.items():
        if here := [mode for mode in meant if mode in legal]:
            modes[name] = here
    key = _plain(word)
    near = modes.get(key if key in modes else nearest(key, modes) or "", [])
    return did_you_mean(near, what if len(near) > 1 else None)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


SHORT_DTYPES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
FURTHER_FORMATS = (
    "e4m3fnuz",
    "e5m2fnuz",
    "e3m2",
    "e2m3",
    "e2m1",
    "fp8_tensorwise",
    "fp8_tensorwise_e5m2",
    "fp8_rowwise",
    "mxfp8",
    "mxfp8_rceil",
    "mxfp8_e5m2",
    "mxfp6_e3m2",
    "mxfp6_e2m3",
    "mxfp4",
    "nvfp4",
)
"""Formats that `mprun numerics` measures where they are asked for."""


DTYPES = ("fp32", "fp16", "bf16")
FORMATS = ("fp8", "float8_e4m3fn", "float8_e5m2")
"""Formats of products; `fp8` is what the mode fp8_tensorwise has."""
MODES = (
    "fp16_mixed",
    "bf16_mixed",
    "fp16_true",
    "bf16_true",
    "half_sr",
    "bf16_sr",
    "half_sr_full",
    *FORMAT_MODES,
)
"""Modes that a layer may have in `precision.layers`."""
PRODUCTS = ("forward", "grad_input", "grad_weight")
FLOAT16_LAYERS = {"fp16", "fp16_mixed", "fp16_true", "half_sr", "half_sr_full"}
"""Values that compute in float16."""
LAYERS_STORED_LOW = {"fp16_true", "bf16_true", "half_sr", "bf16_sr", "half_sr_full"}
"""Values that store 16 bits in every mode; fp16 and bf16 do so where nothing is cast."""

LEGAL = (*DTYPES, *FORMATS, *MODES, *OWN_ALIASES)
OF_A_PRODUCT = (*DTYPES, *FORMATS, *FORMAT_MODES)


def layer_value(value: object) -> str:
    """A value of `precision.layers` as plans and records have it.

    Raises:
        ValueError: it is none; the text names what is legal.
    """
    if isinstance(value, str) and "=" in value:
        value = dict(part.partition("=")[::2] for part in value.split(","))
    if isinstance(value, Mapping):
        return _of_products(value)
    text = str(value)
    if text not in LEGAL:
        raise ValueError(
            f"{text[:40]!r}; legal is a dtype or a mode, one of {', '.join(LEGAL)}, or a format "
            f"for each product, {{forward: fp8, grad_weight: fp32}}{hint(text[:40], LEGAL)}"
        )
    return OWN_ALIASES.get(text, text)


def layer_values(given: Mapping[Any, object]) -> dict[str, str]:
    """`layer_value` of each, by the name of its module.

    Raises:
        ValueError: as `layer_value`; the text names the module.
    """
    layers = {}
    for name, value in given.items():
        try:
            layers[str(name)] = layer_value(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return layers


def _of_products(given: Mapping[object, object]) -> str:
    texts = {str(key): str(value) for key, value in given.items()}
    for name, value in texts.items():
        if name not in PRODUCTS:
            legal = ", ".join(PRODUCTS)
            raise ValueError(
                f"{name[:40]!r} is not a product{hint(name, PRODUCTS)}; legal: {legal}"
            )
        if value not in OF_A_PRODUCT:
            raise ValueError(
                f"{name}: {value[:40]!r}; legal for a product: {', '.join(OF_A_PRODUCT)}"
                f"{hint(value[:40], OF_A_PRODUCT)}"
            )
    if not texts:
        raise ValueError(f"{{}} names no product; legal: {', '.join(PRODUCTS)}")
    return ",".join(f"{name}={texts[name]}" for name in PRODUCTS if name in texts)


def without_formats(layers: Mapping[str, str]) -> dict[str, str]:
    """The same layers in the 16-bit precision around their formats; none for formats alone."""
    dtypes = {name: "bf16_mixed" if x in FORMAT_MODES else x for name, x in layers.items()}
    return {name: value for name, value in dtypes.items() if product_formats(value) is None}


def with_high_products(value: str, high: Collection[str]) -> str:
    """A value that names formats, with some of its products in bfloat16.

    Args:
        value: of a layer: a format, a mode that has one, or a format for each product.
        high: names of `PRODUCTS`.
    """
    formats = {
        name: "bf16" if name in high else of for name, of in (product_formats(value) or {}).items()
    }
    if formats.keys() == set(PRODUCTS) and {*formats.values()} == {"bf16"}:
        return "bf16"
    return ",".join(f"{name}={of}" for name, of in formats.items())


def layers_file(head: str, layers: Mapping[str, str]) -> str:
    """The text of a file for `precision.layers_file`.

    Args:
        head: a comment of one line or more, without `#`.
        layers: module names to values.
    """
    lines = [f"# {line}" for line in head.splitlines()]
    for name, value in layers.items():
        pairs = value.replace("=", ": ").replace(",", ", ")
        lines.append(f'"{name}": ' + (f"{{{pairs}}}" if "=" in value else value))
    return "\n".join(lines) + "\n"


def product_formats(value: str) -> dict[str, str] | None:
    """Product to format of such a text; None for a dtype or a mode without formats.

    A mode's name, and a format's, stand for all three products.
    """
    if "=" in value:
        return dict(part.partition("=")[::2] for part in value.split(","))
    return dict.fromkeys(PRODUCTS, value) if value in (*FORMATS, *FORMAT_MODES) else None


def guard_layers(summary: Summary) -> str | None:
    """The text of guard_layers.yaml; None where the guard found nothing.

    It has the run's own `precision.layers` too, so that it replaces them.
    """
    guard, row = summary.guard, summary.requested
    if guard is None or not guard.gemms:
        return None
    high: dict[str, list[str]] = {}
    for gemm in guard.gemms:
        high.setdefault(gemm.module, []).append(gemm.product)
    found = {
        module: with_high_products(_value(module, row.layers, row.gemms), products)
        for module, products in high.items()
    }
    head = (
        f"Products that passed a threshold of debug.guard={guard.action} in {summary.variant}, "
        "in bfloat16.\n"
        f"For precision={summary.precision} precision.layers_file=THIS_FILE"
    )
    return layers_file(head, {**row.layers, **found})


def _value(module: str, layers: Mapping[str, str], mode: str) -> str:
    """The formats of a layer: its own, those of the module around it, or the mode's."""
    inside = [name for name in layers if module == name or module.startswith(f"{name}.")]
    return layers[max(inside, key=len)] if inside else mode
