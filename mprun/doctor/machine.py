"""What is known of a machine without timing anything, `hardware.accelerated` apart."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from mprun._torch import onednn_takes
from mprun.doctor import environment
from mprun.doctor.instructions import INSTRUCTIONS, architecture, instructions, onednn_limit
from mprun.records.doctor_record import Cuda, GpuUnused, Machine, OneDnn

VARIABLES = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "CUDA_VISIBLE_DEVICES",
)
"""Environment variables that change how fast PyTorch computes."""

CGROUP = Path("/sys/fs/cgroup")
DRIVER = Path("/proc/driver/nvidia/version")

TENSOR_CORES: tuple[tuple[tuple[int, int], tuple[str, ...]], ...] = (
    ((7, 0), ("float16",)),
    ((8, 0), ("tf32", "bfloat16")),
    ((8, 9), ("float8",)),
)
"""From which compute capability on NVIDIA's matrix units take which formats.

Source: NVIDIA, "CUDA C++ Programming Guide", compute capabilities. Not every model of 7.5 has them.
"""


def examine_machine(device: torch.device) -> Machine:
    """The facts about this machine and one of its devices."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    machine, capabilities = architecture(), torch.cpu.get_capabilities()
    found = instructions(platform.system(), machine, capabilities)
    return Machine(
        system=platform.system(),
        architecture=machine,
        hardware=environment.hardware(device, ["bfloat16", "float16"]),
        cores_total=os.cpu_count(),
        cpu_quota=cpu_quota(CGROUP),
        threads=torch.get_num_threads(),
        load_average=load,
        instructions={name: found.get(name) for name in INSTRUCTIONS.get(machine, {})},
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        onednn=onednn(os.environ),
        variables={name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
        cuda=cuda(device) if device.type == "cuda" else None,
        gpu_unused=None if device.type == "cuda" else gpu_unused(),
    )


def onednn(variables: Mapping[str, str]) -> OneDnn:
    """oneDNN's version, what limits it, and which 16-bit formats PyTorch hands it."""
    version = re.search(r"MKL-DNN v([\d.]+)|oneDNN v([\d.]+)", torch.__config__.show())
    limit_by, limit = onednn_limit(variables) or (None, None)
    return OneDnn(
        version=(version[1] or version[2]) if version else None,
        limit_by=limit_by,
        limit=limit,
        bfloat16=onednn_takes(torch.bfloat16),
        float16=onednn_takes(torch.float16),
    )


def cuda(device: torch.device) -> Cuda:
    """What matters of a GPU."""
    capability = torch.cuda.get_device_capability(device)
    return Cuda(
        compute_capability="{}.{}".format(*capability),
        tensor_cores=None if torch.version.hip else tensor_cores(capability),
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
        memory_free_bytes=torch.cuda.mem_get_info(device)[0],
    )


def tensor_cores(capability: tuple[int, int]) -> list[str]:
    """The formats NVIDIA's matrix units of a compute capability take."""
    return [name for since, names in TENSOR_CORES if capability >= since for name in names]


def gpu_unused() -> GpuUnused | None:
    """Why the CPU is examined although there seems to be a GPU; None where there is none."""
    if torch.cuda.is_available():
        return "cpu asked for"
    if shutil.which("nvidia-smi") is None and not DRIVER.exists():
        return None
    return "no cuda in torch" if torch.version.cuda is None else "not usable"


def cpu_quota(root: Path) -> float | None:
    """Cores' worth of time the control group of a container may use; None without a limit.

    Linux's "Control Group v2", cpu.max: microseconds of quota ("max" for none) and of period.
    Version 1 has the two in files of their own, and -1 for none.

    Args:
        root: where control groups are mounted.
    """
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text(encoding="utf-8").split()
        else:
            files = (root / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            quota, period = (file.read_text(encoding="utf-8") for file in files)
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
