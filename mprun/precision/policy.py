"""A precision mode as a row of data.

The table of modes is `conf/precision/*.yaml`; two modes differ exactly where their rows differ:

    mode        parameters  computation  output   casting
    fp32        float32     float32      float32  none
    tf32        float32     float32      float32  none      (tf32: true)
    bf16_mixed  float32     bfloat16     float32  autocast
    fp16_mixed  float32     float16      float32  autocast

Keras calls the first two the variable dtype and the compute dtype. The remaining columns (rounding
and its scope, the dtypes of the gradient buffer, the optimizer's moments and of the partial sums
inside a matmul) are float32 and nearest in all of them.

A row must be one this version really carries out: a combination that would have to be silently
replaced by another is refused here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

FLOAT_DTYPES = ("float32", "float16", "bfloat16")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in `FLOAT_DTYPES`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass(frozen=True)
class Policy:
    """One precision mode; dtypes by PyTorch's names.

    Raises:
        ValueError: a combination that is not carried out, with the legal values.
    """

    name: str
    param_dtype: str
    """Parameters."""
    compute_dtype: str
    """Inputs of matmuls and convolutions."""
    output_dtype: str
    """The model's outputs as the loss sees them."""
    casting: str
    """none, or autocast to `compute_dtype`."""
    rounding: str
    rounding_scope: str
    accum_dtype: str
    """The gradient buffer."""
    momentum_dtype: str
    variance_dtype: str
    partials_dtype: str
    """Accumulation inside a matmul or convolution."""
    tf32: bool
    """Whether float32 matmuls and convolutions may round their inputs to TensorFloat-32."""

    def __post_init__(self) -> None:
        for key, legal in self._legal().items():
            if getattr(self, key) not in legal:
                words = ", ".join(str(x).lower() if isinstance(x, bool) else x for x in legal)
                received = str(getattr(self, key))
                received = received.lower() if isinstance(getattr(self, key), bool) else received
                raise ValueError(
                    f"precision.{key}={received} with precision={self.name} "
                    f"(casting={self.casting}): legal is {words}"
                )

    def _legal(self) -> dict[str, tuple[Any, ...]]:
        only_fp32 = ("float32",)
        computes = {"none": only_fp32, "autocast": ("bfloat16", "float16")}
        compute = computes.get(self.casting, only_fp32)
        named = {"bf16_mixed": ("bfloat16",), "fp16_mixed": ("float16",)}
        switches = {"fp32": (False,), "tf32": (True,)}
        return {
            "casting": tuple(computes),
            "param_dtype": only_fp32,
            # A shipped mode's name states its compute dtype; another dtype needs another name.
            "compute_dtype": named.get(self.name, compute),
            "output_dtype": tuple(dict.fromkeys((*only_fp32, self.compute_dtype))),
            "rounding": ("nearest",),
            "rounding_scope": ("update",),
            "accum_dtype": only_fp32,
            "momentum_dtype": only_fp32,
            "variance_dtype": only_fp32,
            "partials_dtype": only_fp32,
            "tf32": switches.get(self.name, (False, self.casting == "none")),
        }

    def columns(self) -> dict[str, Any]:
        """The row without its name, as records keep it."""
        row = asdict(self)
        del row["name"]
        return row
