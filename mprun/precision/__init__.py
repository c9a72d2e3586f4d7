"""Precision modes: what a mode is (`Policy`) and what carries it out (`Precision`).

For anyone's own loop, too. Doors: `policy("bf16_sr")` (a row of dtypes and roundings, read from
`conf/precision/`), `Precision` (a policy for one model and its optimizer), `rounding.py`
(stochastic rounding), `op_lists/` (which op runs in which dtype), `kernels/` (loops in C).

How data goes through: `Precision.prepare` casts the model; in a forward pass the caster decides the
dtype of each op, the arithmetic whose kernels compute it (PyTorch's, or ones that round); the
loss is scaled, the backward pass follows, gradients are unscaled and clipped, and an optimizer of
`mprun.optim` rounds its update. `_torch.py` has the private interfaces of PyTorch, `devices.py`
what each kind of device can do, `nested.py` tensors inside batches and outputs.
"""

from mprun.precision._torch_switches import backend_flags, has_tf32
from mprun.precision.apply import Precision
from mprun.precision.arithmetic import (
    Arithmetic,
    EmulatedTf32,
    Float16Fallback,
    NativeArithmetic,
    WrappedArithmetic,
    round_to_tf32,
)
from mprun.precision.caster import AutocastCaster, Caster, NoCaster, OpListCaster
from mprun.precision.emulate import BlockedConvolutions, Emulated16, same_rounding
from mprun.precision.loss_scale import (
    Clip,
    Combine,
    DynamicLossScale,
    DynamicRule,
    LossScale,
    StaticLossScale,
)
from mprun.precision.op_lists import OpLists, disable_casts, op_lists
from mprun.precision.policy import Policy
from mprun.precision.rates import accelerated, slowdown

__all__ = [
    "Arithmetic",
    "AutocastCaster",
    "BlockedConvolutions",
    "Caster",
    "Clip",
    "Combine",
    "DynamicLossScale",
    "DynamicRule",
    "Emulated16",
    "EmulatedTf32",
    "Float16Fallback",
    "LossScale",
    "NativeArithmetic",
    "NoCaster",
    "OpListCaster",
    "OpLists",
    "Policy",
    "Precision",
    "StaticLossScale",
    "WrappedArithmetic",
    "accelerated",
    "backend_flags",
    "disable_casts",
    "has_tf32",
    "op_lists",
    "round_to_tf32",
    "same_rounding",
    "slowdown",
]
