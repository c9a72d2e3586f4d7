"""The numerics: what a precision mode is (policy) and what carries it out (Precision).

Imports torch and of mprun only `_torch` (private interfaces), `kernels` and `op_list_file`, so that
it can be used in anyone's own loop.
"""

from mprun.precision.arithmetic import (
    Arithmetic,
    EmulatedTf32,
    Float16ByFloat32,
    NativeArithmetic,
    round_to_tf32,
)
from mprun.precision.caster import AutocastCaster, Caster, NoCaster, OpListCaster
from mprun.precision.clip import Clip, ClipNorm, NoClip
from mprun.precision.emulate import BlockedConvolutions, Emulated16, same_rounding
from mprun.precision.execution import backend_flags, has_tf32
from mprun.precision.loss_scale import (
    DynamicLossScale,
    DynamicRule,
    LossScale,
    NoLossScale,
    StaticLossScale,
)
from mprun.precision.op_lists import OpLists, disable_casts, op_lists
from mprun.precision.policy import Policy
from mprun.precision.precision import Precision
from mprun.precision.range import Float16Loss, float16_loss
from mprun.precision.rates import accelerated

__all__ = [
    "Arithmetic",
    "AutocastCaster",
    "BlockedConvolutions",
    "Caster",
    "Clip",
    "ClipNorm",
    "DynamicLossScale",
    "DynamicRule",
    "Emulated16",
    "EmulatedTf32",
    "Float16ByFloat32",
    "Float16Loss",
    "LossScale",
    "NativeArithmetic",
    "NoCaster",
    "NoClip",
    "NoLossScale",
    "OpListCaster",
    "OpLists",
    "Policy",
    "Precision",
    "StaticLossScale",
    "accelerated",
    "backend_flags",
    "disable_casts",
    "float16_loss",
    "has_tf32",
    "op_lists",
    "round_to_tf32",
    "same_rounding",
]
