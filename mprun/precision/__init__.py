"""Precision modes: what a mode is (`Policy`) and what carries it out (`Precision`).

For anyone's own loop. Of mprun it imports `_torch` (private interfaces of PyTorch), `kernels`
(compiled loops), `errors` and the reader of op-list files in `records`.
"""

from mprun.precision.apply import Precision
from mprun.precision.arithmetic import Arithmetic, Float16Fallback, NativeArithmetic, WrappedArithmetic
from mprun.precision.caster import AutocastCaster, Caster, NoCaster, OpListCaster
from mprun.precision.emulate import BlockedConvolutions, Emulated16, same_rounding
from mprun.precision.gemm_guard import GemmGuard, guard_of
from mprun.precision.loss_scale import DynamicLossScale, DynamicRule, LossScale, NoLossScale, StaticLossScale
from mprun.precision.op_lists import OpLists, disable_casts, op_lists
from mprun.precision.policy import Policy
from mprun.precision.rates import accelerated, slowdown
from mprun.precision.switches import EmulatedTf32, backend_flags, has_tf32, round_to_tf32
from mprun.precision.update import Clip, Combine

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
    "GemmGuard",
    "LossScale",
    "NativeArithmetic",
    "NoCaster",
    "NoLossScale",
    "OpListCaster",
    "OpLists",
    "Policy",
    "Precision",
    "StaticLossScale",
    "WrappedArithmetic",
    "accelerated",
    "backend_flags",
    "disable_casts",
    "guard_of",
    "has_tf32",
    "op_lists",
    "round_to_tf32",
    "same_rounding",
    "slowdown",
]
