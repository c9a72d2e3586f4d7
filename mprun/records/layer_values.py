"""The grammar of `precision.layers`: the values that a module can have, and what each one means.

    fp32, fp16, bf16              a dtype: what the module computes in
    bf16_mixed, half_sr, mxfp8    a mode: what the mode stores, computes in and rounds
    fp8, float8_e5m2              a format: of the three products of linear layers
    {forward: fp8, grad_weight: fp32}    a format for each of these products

A linear layer multiplies three times in a training step: forward, for the gradient of its input and
for the gradient of its weight. A format for each product is in plans and records the text
`forward=fp8,grad_weight=fp32`. `mprun.precision.layers` carries out dtypes and modes,
`mprun.precision.gemms` formats. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mprun.errors import hint
from mprun.records.mode_names import OWN_ALIASES, SHIPPED_MODES, mode_row
from mprun.records.policy_columns import FORMAT_MODES

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# Formats of products; `fp8` is what the mode fp8_tensorwise has
FORMATS = ("fp8", "float8_e4m3fn", "float8_e5m2")
# Modes that a layer may have. fp32 is a dtype; TF32 is switched for the whole process.
LAYER_MODES = tuple(name for name in SHIPPED_MODES if name not in ("fp64", "fp32", "tf32"))
PRODUCTS = ("forward", "grad_input", "grad_weight")
LEGAL = (*DTYPES, *FORMATS, *LAYER_MODES, *OWN_ALIASES)
OF_A_PRODUCT = (*DTYPES, *FORMATS, *FORMAT_MODES)


def layer_value(value: object) -> str:
    """A value of `precision.layers` as plans and records have it; a `ValueError` has legal ones."""
    if isinstance(value, str) and "=" in value:
        value = dict(part.partition("=")[::2] for part in value.split(","))
    if isinstance(value, Mapping):
        return _of_products(value)
    text = str(value)
    if text not in LEGAL:
        raise ValueError(  # 40 characters: it may be anything, a whole file
            f"{text[:40]!r}; legal is a dtype or a mode, one of {', '.join(LEGAL)}, or a format "
            f"for each product, {{forward: fp8, grad_weight: fp32}}{hint(text[:40], LEGAL)}"
        )
    return OWN_ALIASES.get(text, text)


def layer_values(given: Mapping[Any, object]) -> dict[str, str]:
    """`layer_value` of each, by the name of its module; a `ValueError` names the module too."""
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


def layer_dtypes(value: str, casting: str) -> tuple[str, str] | None:
    """What a layer stores its parameters in, and what it computes in, by PyTorch's names.

    None for formats of products alone, with which a layer has the dtypes of the mode around it.
    `casting` is that mode's: where it casts, a dtype leaves parameters in float32.
    """
    if value in LAYER_MODES:
        row = mode_row(value)
        return row["param_dtype"], row["compute_dtype"]
    if value not in DTYPES:
        return None
    return "float32" if casting != "none" else DTYPES[value], DTYPES[value]


def computes_float16(value: str) -> bool:
    """Whether a layer computes in float16, and needs a loss scale."""
    return (layer_dtypes(value, "none") or ("", ""))[1] == "float16"


def in_rounding(value: str, rounding: str) -> str:
    """A value that rounds 16-bit parameters so; the mode with the same dtype if this one does not.

    Dtypes and modes that cast state no rounding, which is nearest or stochastic.
    """
    if value not in LAYER_MODES or _stored(value, rounding) or mode_row(value)["casting"] != "none":
        return value
    stored = mode_row(value)["param_dtype"]
    return next(mode for mode in LAYER_MODES if _stored(mode, rounding) == stored)


def _stored(mode: str, rounding: str) -> str | None:
    """What a mode without casts stores if it has this rounding."""
    row = mode_row(mode)
    fits = row["casting"] == "none" and row["rounding"] == rounding
    return row["param_dtype"] if fits else None


def without_formats(layers: Mapping[str, str]) -> dict[str, str]:
    """The same layers in the 16-bit precision around their formats; none for formats alone."""
    dtypes = {name: "bf16_mixed" if x in FORMAT_MODES else x for name, x in layers.items()}
    return {name: value for name, value in dtypes.items() if product_formats(value) is None}


def with_high_products(value: str, high: Collection[str]) -> str:
    """A value that names formats, with the products `high` of it in bfloat16."""
    formats = {
        name: "bf16" if name in high else of for name, of in (product_formats(value) or {}).items()
    }
    if formats.keys() == set(PRODUCTS) and {*formats.values()} == {"bf16"}:
        return "bf16"
    return ",".join(f"{name}={of}" for name, of in formats.items())


def layers_file(head: str, layers: Mapping[str, str]) -> str:
    """The text of a file for `precision.layers_file`; `head` is a comment, without `#`."""
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
