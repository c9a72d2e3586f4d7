"""The columns of a precision mode: each one's name, legal values, meaning and default.

This table is the only one. `mprun.precision.Policy` is a row of it, and so are the precision that a
run asked for and the one that it had (`run_record.PrecisionRow`) and the section `precision` of a
configuration (`config.schema.PrecisionConfig`), from which `mprun --help` and the page of fields
are made. A new column is written here, and in the code that carries it out. No torch.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from typing import Annotated, Any, TypeVar, get_type_hints

from msgspec import Meta

LOW_DTYPES = ("bfloat16", "float16")
WIDE_DTYPES = ("float64", "float32")
FLOAT_DTYPES = (*WIDE_DTYPES, "float16", "bfloat16")
MOMENT_DTYPES = (*FLOAT_DTYPES, "uint8")
"""Of an optimizer's moments; uint8: codes and a scale per block, see `mprun.optim.formulas`."""
ROUNDINGS = ("nearest", "stochastic", "kahan", "split")
COMPENSATED = ("kahan", "split")
"""Roundings that keep a remainder beside a 16-bit parameter."""
FORMAT_MODES = ("fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_hp", "mxfp8", "nvfp4")
"""The modes that give the products of linear layers a format of 8 bits or fewer."""


Row = TypeVar("Row", bound="PolicyColumns")


class Legal:
    """The texts that a field can be, in its type: `Annotated[str, Legal("infinity", "saturate")]`.

    OmegaConf and msgspec, which read the types too, take `str` alone.
    """

    def __init__(self, *values: str) -> None:
        self.values = values


Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Number = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]
"""Part of a whole that is not the whole."""
FloatDtype = Annotated[str, Legal(*FLOAT_DTYPES)]
MomentDtype = Annotated[str, Legal(*MOMENT_DTYPES)]


# The strings below the columns, and no comments, are what `mprun --help` says of them
@dataclass(kw_only=True)
class PolicyColumns:
    """What a precision mode decides; dtypes by PyTorch's names."""

    param_dtype: FloatDtype
    """Dtype the parameters are stored in (Keras: variable dtype)."""
    compute_dtype: FloatDtype
    """Dtype matmuls and convolutions compute in."""
    output_dtype: FloatDtype
    """Dtype the model's outputs are cast to before the loss."""
    casting: Annotated[str, Legal("none", "autocast", "op_lists")]
    """How ops get their dtype: none (parameters' own), autocast or op_lists."""
    rounding: Annotated[str, Legal(*ROUNDINGS)]
    """Of 16-bit parameters and state: nearest, stochastic, kahan (2 bytes more), split (1 more)."""
    rounding_scope: Annotated[str, Legal("update", "all")]
    """Where this rounding is used: update, for parameters and state; all, for every result."""
    overflow: Annotated[str, Legal("infinity", "saturate")] = "infinity"
    """Finite numbers beyond a dtype's largest become infinity, or saturate at the largest."""
    accum_dtype: FloatDtype
    """Dtype gradients are accumulated and stored in (PopTorch: accum_type)."""
    momentum_dtype: MomentDtype
    """Dtype of the optimizer's first moment; uint8: 8-bit codes (of 4096 numbers or more)."""
    variance_dtype: MomentDtype
    """Dtype of the optimizer's second moment; in 16 or 8 bits its square root is stored."""
    reduce_dtype: FloatDtype = "float32"
    """Dtype gradients are sent in and summed in over processes (see `parallel`)."""
    partials_dtype: Annotated[str, Legal(*WIDE_DTYPES, "float16")] = "float32"
    """Dtype matmul and convolution accumulate in: float32, or float16 in float16 modes."""
    tf32: bool
    """Whether float32 matmuls and convolutions use TensorFloat-32."""
    gemms: Annotated[str, Legal("none", *FORMAT_MODES)] = "none"
    """Format of the products of inner linear layers; none: the compute dtype."""
    hadamard: bool = False
    """In modes with such formats: a random Hadamard transform before gradients of weights."""

    @property
    def has_low_partials(self) -> bool:
        """Whether matmuls and convolutions accumulate in 16 bits."""
        return self.partials_dtype == "float16"

    def with_partials(self: Row, dtype: str) -> Row:
        """The same row, with this dtype of the accumulation inside matmuls and convolutions."""
        return replace(self, partials_dtype=dtype)


LATER_COLUMNS: dict[str, Any] = {
    x.name: x.default
    for x in fields(PolicyColumns)
    if x.default is not MISSING and x.name not in ("overflow", "partials_dtype")
}
"""Columns that earlier versions did not have, with the value that changes nothing."""


def legal_values() -> dict[str, tuple[Any, ...]]:
    """Column to legal values, of the columns that are one of several texts."""
    hints = get_type_hints(PolicyColumns, include_extras=True)
    return {
        name: one.values
        for name, kind in hints.items()
        for one in getattr(kind, "__metadata__", ())
        if isinstance(one, Legal)
    }
