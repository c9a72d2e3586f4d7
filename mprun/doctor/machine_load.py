"""How many threads rates can be measured with on a machine that others use too.

Threads that wait for each other are as fast as the slowest: two of them on two cores, one of which
another process works on, were measured at a fiftieth of their rate, now in one format and now in
another. Fewer threads than cores are free give the ratios between formats all the same.
"""

from __future__ import annotations

import math

from mprun.records.doctor_record import Machine

IDLE = 0.5
"""A load average up to this beyond what the cores hold is what an idle system has."""


def is_busy(machine: Machine) -> bool:
    """Whether others leave fewer cores than PyTorch has threads; False where it is not known."""
    load, cores = machine.load_average, machine.cores_total
    if load is None or cores is None:
        return False
    return load + min(machine.threads, cores) > cores + IDLE


def threads_to_measure(machine: Machine) -> int:
    """PyTorch's threads, or as many as have a core to themselves."""
    fitting = [math.inf if machine.cpu_quota is None else machine.cpu_quota]
    load, cores = machine.load_average, machine.cores_total
    if is_busy(machine) and load is not None and cores is not None:
        fitting.append(cores - load)
    fit = min(machine.threads, machine.hardware.cores, *fitting)
    return max(1, int(fit))
