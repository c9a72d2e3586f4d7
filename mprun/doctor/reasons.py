"""Why a number format is slow on a machine, as far as that is known."""

from __future__ import annotations

from collections.abc import Collection

from mprun.doctor.instructions import ALLOWED, NEEDED
from mprun.records.doctor_record import Cuda, Format, Machine, OpName

OWN_LOOPS = "so PyTorch computes {0} in loops of its own"
CONVERTS = "so oneDNN converts {0} to float32 and back"


def why_slow(format_: Format, slow: Collection[OpName], machine: Machine) -> str | None:
    """The reason in words; None where there is none that the machine's facts give.

    Args:
        format_: a format other than float32.
        slow: the ops that are slower in it than in float32.
        machine: the facts.
    """
    if machine.cuda is not None:
        return _on_gpu(format_, machine.cuda)
    needed = NEEDED.get(machine.architecture, {}).get(format_)
    if needed is None:
        return None
    has = {name: machine.instructions.get(name) for name in needed}
    ending = f", {_consequence(format_, machine)}"
    if not any(has.values()):
        if None in has.values():
            return None
        neither = f"neither {' nor '.join(needed)}" if len(needed) > 1 else f"no {needed[0]}"
        return f"this CPU has {neither}{ending}"
    forbidden = forbidden_instructions(machine)
    if all(name in forbidden for name, there in has.items() if there):
        kept = ", ".join(name for name, there in has.items() if there)
        onednn = machine.onednn
        return f"{onednn.limit_by}={onednn.limit} keeps oneDNN from {kept}{ending}"
    if format_ == "float16" and set(slow) == {"convolution_backward"}:
        return "oneDNN has no fast float16 kernel for the backward pass of convolutions"
    return None


def forbidden_instructions(machine: Machine) -> list[str]:
    """What the CPU has and the environment keeps oneDNN from."""
    limit = machine.onednn.limit
    if machine.architecture != "x86_64" or limit not in ALLOWED:
        return []
    return [n for n, there in machine.instructions.items() if there and n not in ALLOWED[limit]]


def _consequence(format_: Format, machine: Machine) -> str:
    taken = machine.onednn.bfloat16 if format_ == "bfloat16" else machine.onednn.float16
    return (CONVERTS if taken else OWN_LOOPS).format("it")


def _on_gpu(format_: Format, cuda: Cuda) -> str | None:
    units = cuda.tensor_cores
    if units is None or format_ in units:
        return None
    return f"compute capability {cuda.compute_capability} has no tensor cores for {format_}"
