"""The results of `mprun doctor` on a machine: the content of its JSON file. No torch.

Names and meanings are fixed; `SCHEMA_VERSION` moves when one changes, not when a field is added.
What the system does not report is null, never a guess. docs/reference/doctor.md has an example.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mprun.records.format_record import FormatGains
from mprun.records.roofline_record import Roofline
from mprun.records.run_record import Hardware
from mprun.records.scaling_record import ScalingEstimate

SCHEMA_VERSION = 1

OpName = Literal["matmul", "convolution", "convolution_backward"]
Format = Literal["float32", "tf32", "bfloat16", "float16"]
GpuUnused = Literal["cpu asked for", "no cuda in torch", "not usable"]
SpeedVerdict = Literal[
    "worth trying", "depends on the model", "no gain", "not for speed", "not known"
]

OPS: tuple[OpName, ...] = ("matmul", "convolution", "convolution_backward")
FORMATS: tuple[Format, ...] = ("float32", "tf32", "bfloat16", "float16")


@dataclass(kw_only=True)
class Spread:
    """A quantity measured several times."""

    median: float
    p10: float
    p90: float
    n: int


@dataclass(kw_only=True)
class Ratio:
    """A speed-up, measured round by round."""

    median: float
    low: float
    high: float
    """The median's 95 % interval is from `low` to `high`."""
    n: int


@dataclass(kw_only=True)
class Rate:
    """The speed of one op in one number format, at one size."""

    op: OpName
    format: Format
    size: str
    flops: int
    """Multiplications and additions of a call."""
    time_ms: Spread
    """Of a call."""
    gflops: Spread
    """10^9 operations a second."""
    speedup: Ratio
    """Over float32, same op and size."""


@dataclass(kw_only=True)
class Copy:
    """The speed of copying a buffer within the device's memory."""

    bytes: int
    """Of the buffer."""
    gigabytes_per_second: Spread
    """10^9 bytes per second, read and written: each byte counts twice."""


@dataclass(kw_only=True)
class OneDnn:
    """The library that computes matmuls and convolutions on CPUs."""

    version: str | None
    limit_by: str | None
    """The environment variable that limits its instructions, null if none does."""
    limit: str | None
    """That variable's value, in upper case."""
    bfloat16: bool | None
    """Whether PyTorch passes it bfloat16 here; if not, PyTorch computes in its own loops."""
    float16: bool | None


@dataclass(kw_only=True)
class Cuda:
    """A GPU."""

    compute_capability: str
    tensor_cores: list[str] | None
    """Formats its matrix units take; null if it is not NVIDIA's."""
    multiprocessors: int
    memory_free_bytes: int


@dataclass(kw_only=True)
class Machine:
    """Facts that need no measurement, except `hardware.accelerated`, which is measured."""

    system: str
    architecture: str
    hardware: Hardware
    """The same as in the record of a run, with both 16-bit dtypes."""
    cores_total: int | None
    """Cores of the whole machine; `hardware.cores` are those this process may use."""
    cpu_quota: float | None
    """How many cores' time a container may use; null without a limit."""
    threads: int
    """PyTorch's threads in a run."""
    load_average: float | None
    """Of the machine, over the minute before measuring."""
    instructions: dict[str, bool | None]
    """The instruction sets that matter for number formats; null if it is not known."""
    cpu_capability: str
    """The vector instructions PyTorch's own CPU kernels use."""
    onednn: OneDnn
    variables: dict[str, str]
    """Those set of the environment variables that change speed."""
    cuda: Cuda | None
    """The GPU examined."""
    gpu_unused: GpuUnused | None
    """Why a GPU that seems to be present is not examined; null if none seems to be."""
    optimizer_kernels: str | None = None
    """Where the CPU kernels of optimizers and of rounding come from, or why there are none."""


@dataclass(kw_only=True)
class Mode:
    """A precision mode on this machine."""

    name: str
    format: Format
    """The format of its matmuls and convolutions."""
    execution: Literal["native", "emulated"]
    why_emulated: str | None
    accelerated: bool | None
    """As in `hardware`, for native 16-bit modes; null for others."""
    substituted: list[OpName]
    """Ops that a run computes in float32 and rounds (`speed=auto`)."""
    loss_scale: str
    """The kind of `loss_scale=auto`."""
    products_of_8_bits: bool = False
    """Its native matmuls have factors of 8 bits: their rate is not among the measured ones."""


@dataclass(kw_only=True)
class Finding:
    """A fact that affects timed runs on this machine."""

    level: Literal["warning", "note"]
    about: str
    text: str


@dataclass(kw_only=True)
class Conclusion:
    """The use of the modes of one format on this machine."""

    format: Format
    modes: list[str]
    verdict: SpeedVerdict
    text: str


@dataclass(kw_only=True)
class Measured:
    """The examination before conclusions are drawn from it."""

    machine: Machine
    threads: int
    """Threads of the CPU rates: fewer than PyTorch's if other processes use the cores."""
    rates: list[Rate]
    copy: Copy
    modes: list[Mode]


@dataclass(kw_only=True)
class Examination(Measured):
    """The whole result of `mprun doctor`."""

    schema_version: int
    examined_at: str
    mprun_version: str
    git_commit: str | None
    versions: dict[str, str | None]
    """Those of a record, and of cuda and cudnn; null for a missing one."""
    budget_s: float
    measured_s: float
    """How long the rates took."""
    findings: list[Finding]
    conclusions: list[Conclusion]
    roofline: Roofline | None = None
    """Of a recipe's step, where a recipe was named."""
    formats: list[FormatGains] | None = None
    """Whether formats of 8 bits or fewer pay for a recipe's linear layers; null without one."""
    scaling: ScalingEstimate | None = None
    """A recipe's step on several processes; null where doctor.world_size is 1."""
