"""The numerics: what a precision mode is (policy) and what carries it out (Precision).

Imports torch and nothing else of mprun, so that it can be used in anyone's own loop.
"""

from mprun.precision.caster import AutocastCaster, Caster, NoCaster
from mprun.precision.clip import Clip, ClipNorm, NoClip
from mprun.precision.execution import accelerated, backend_flags
from mprun.precision.loss_scale import LossScale, NoLossScale
from mprun.precision.policy import Policy
from mprun.precision.precision import Precision

__all__ = [
    "AutocastCaster",
    "Caster",
    "Clip",
    "ClipNorm",
    "LossScale",
    "NoCaster",
    "NoClip",
    "NoLossScale",
    "Policy",
    "Precision",
    "accelerated",
    "backend_flags",
]
