"""The check of a device: its kernels against float64 on the CPU, once for each PyTorch.

A run on an accelerator reads what an earlier check found, from a small JSON file in the user's
cache folder, and makes one where there is none, or a damaged one.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from mprun import __version__, kernels
from mprun.assemble.parts import build_model, build_precision, first_samples
from mprun.assemble.plan import choose_device
from mprun.console import ReportPart, report_nothing
from mprun.doctor import machine
from mprun.errors import EXIT_CONDITION, EXIT_OK
from mprun.experiments.planned_run import PlannedRun
from mprun.nested import map_tensors
from mprun.numerics.kernel_check import DTYPES, LAYERS, Layer, check_layer
from mprun.precision.policy import dtype_name
from mprun.precision.switches import switches
from mprun.records.files import write_atomic
from mprun.results import Result
from mprun.results.kernel_check_result import KernelCheck, KernelFault, MissingKernel, check_parts
from mprun.train.loss_terms import LossTerms
from mprun.train.user_code import described

MAX_BYTES = 2**20


def kept_check(device: torch.device) -> KernelCheck | None:
    """What an earlier check of this device with this PyTorch found; None without one."""
    try:
        with _path(device).open("rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=KernelCheck)
    except (OSError, ValueError):
        return None


def keep_check(device: torch.device, check: KernelCheck) -> None:
    """Keep it; where nothing can be written, the next run checks again."""
    with contextlib.suppress(OSError):
        write_atomic(_path(device), msgspec.json.encode(check))


def _path(device: torch.device) -> Path:
    name = machine.hardware(device, []).name
    text = f"{device.type} {name} {torch.__version__} {torch.version.cuda} {__version__}"
    return kernels.cache_folder() / f"check_{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


MAX_SAMPLES = 16


def check_by_name(
    device: str, planned: PlannedRun | None, report: ReportPart = report_nothing
) -> Result:
    """Check a device by its name, or that of a planned run, and keep what was found.

    Raises:
        UsageError: this machine has no such device.
    """
    where = choose_device(device) if planned is None else planned.plan.device
    check = check_device(where, planned, report)
    if planned is None:
        keep_check(where, check)
    status = EXIT_CONDITION if check.faults or not check.ops else EXIT_OK
    return Result(check, list(check_parts(check)), status=status)


def check_device(
    device: torch.device,
    planned: PlannedRun | None = None,
    report: ReportPart = report_nothing,
    layers: Iterable[Layer] = LAYERS,
) -> KernelCheck:
    """Check the common layers, and the model of a recipe if there is one.

    Args:
        device: where.
        planned: a run of the recipe.
        report: is called before each part.
        layers: what is checked.
    """
    names: list[str] = []
    faults: list[KernelFault] = []
    missing: list[MissingKernel] = []
    compared = 0
    with torch.random.fork_rng(devices=[]), switches(tf32=False):
        torch.manual_seed(0)
        for name, model, step_of in _steps(device, planned, layers):
            report(f"checking {name}")
            names.append(name)
            for dtype in DTYPES:
                watcher, lacking = check_layer(name, model, step_of(dtype), dtype)
                compared += watcher.compared
                faults += watcher.faults
                missing += lacking
    return KernelCheck(
        device=str(device),
        hardware=machine.hardware(device, []).name,
        torch=str(torch.__version__),
        dtypes=[dtype_name(x) for x in DTYPES],
        layers=names,
        ops=compared,
        faults=list(dict.fromkeys(faults)),
        missing=missing,
    )


StepOf = Callable[[torch.dtype], Callable[[], object]]


def _steps(
    device: torch.device, planned: PlannedRun | None, layers: Iterable[Layer]
) -> Iterator[tuple[str, nn.Module, StepOf]]:
    """What is checked: its name, the module, and a step in a dtype."""
    for layer in layers:
        module = layer.module().to(device)
        inputs = tuple(x.to(device) for x in layer.inputs())
        yield layer.name, module, partial(_layer_step, module, inputs)
    if planned is not None:
        yield from _recipe_steps(planned)


def _layer_step(
    module: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype
) -> Callable[[], object]:
    def step() -> None:
        module.to(dtype)
        given = [x.to(dtype).requires_grad_() if x.is_floating_point() else x for x in inputs]
        output: Tensor = module(*given)
        output.backward(torch.ones_like(output) / output.numel() ** 0.5)

    return step


def _recipe_steps(planned: PlannedRun) -> Iterator[tuple[str, nn.Module, StepOf]]:
    """The recipe's model and loss on its first samples, as autocast computes them."""
    plan = planned.plan
    model, _ = build_model(plan, build_precision(plan))
    part = first_samples(plan, MAX_SAMPLES)
    loss = LossTerms(plan.recipe)

    def step_in(dtype: torch.dtype) -> Callable[[], object]:
        def step() -> None:
            low = dtype != torch.float32
            with torch.autocast(plan.device.type, dtype if low else None, enabled=low):
                output = plan.recipe.forward(model, part.inputs)
            wide = map_tensors(lambda x: x.float() if x.is_floating_point() else x, output)
            loss(wide, part.content).backward()

        return step

    yield plan.config.recipe.name, model, step_in


def checked_before(device: torch.device, report: ReportPart = report_nothing) -> list[str]:
    """A warning if kernels of an accelerator are wrong; the first run on it checks them.

    A device that the check itself cannot run on is left to the run. The CPU is checked by
    `mprun doctor check` alone.
    """
    if device.type == "cpu":
        return []
    check = kept_check(device)
    if check is None:
        try:
            check = check_device(device, report=report)
        except Exception as error:  # whatever a new backend raises: the run will show it
            return [f"the kernels of {device} could not be checked: {described(error)}"]
        keep_check(device, check)
    return [check.answer] if check.faults else []
