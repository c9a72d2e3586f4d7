"""Names of formats of 8 bits or fewer: of modes that have them, and of those that are measured.

The formats themselves are in `mprun.precision.formats`, the products of modes in
`mprun.precision.gemms`. The names stand here so that mistakes are answered without torch.
"""

FORMAT_MODES = ("fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_hp", "mxfp8", "nvfp4")
"""The modes that give products a format."""
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
