"""The facts about a machine that need no timing, except `hardware.accelerated`.

A run records hardware, versions and the code's commit from here, too.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import math
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

import mprun
from mprun.precision import accelerated, devices, kernels
from mprun.precision._torch import onednn_takes
from mprun.records.run_record import Hardware
from mprun.train.machine.conditions import CPUINFO, content, page_fault_us, usable_cpus
from mprun.train.machine.doctor_result import Cuda, GpuUnused, Machine, OneDnn

# Environment variables that change how fast PyTorch computes
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

CGROUP = Path("/sys/fs/cgroup")
DRIVER = Path("/proc/driver/nvidia/version")  # in containers it is there without nvidia-smi

TENSOR_CORES: tuple[tuple[tuple[int, int], tuple[str, ...]], ...] = (
    ((7, 0), ("float16",)),
    ((8, 0), ("tf32", "bfloat16")),
    ((8, 9), ("float8",)),
)
"""From which compute capability on NVIDIA's matrix units take which formats.

Source: NVIDIA, "CUDA C++ Programming Guide", compute capabilities. Not every model of 7.5 has them.
"""


class InstructionNames(NamedTuple):
    """The names of an instruction set in Linux and cpuinfo."""

    linux: str
    cpuinfo: str


# By architecture: the sets that decide which format is fast, by the names mprun shows
INSTRUCTIONS: dict[str, dict[str, InstructionNames]] = {
    "x86_64": {
        "AVX2": InstructionNames("avx2", "avx2"),
        "AVX512": InstructionNames("avx512f", "avx512_f"),
        "AVX512-BF16": InstructionNames("avx512_bf16", "avx512_bf16"),
        "AVX512-FP16": InstructionNames("avx512_fp16", "avx512_fp16"),
        "AMX-BF16": InstructionNames("amx_bf16", "amx_bf16"),
        "AMX-FP16": InstructionNames("amx_fp16", "amx_fp16"),
    },
    "aarch64": {
        "FP16": InstructionNames("asimdhp", "fp16_arith"),
        "BF16": InstructionNames("bf16", "bf16"),
        "SVE": InstructionNames("sve", "sve"),
        "SME": InstructionNames("sme", "sme"),
    },
}

# By architecture and format: the sets any of which makes the format fast
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "bfloat16": ("AVX512-BF16", "AMX-BF16"),
        "float16": ("AVX512-FP16", "AMX-FP16"),
    },
    "aarch64": {"bfloat16": ("BF16",), "float16": ("FP16",)},
}

SAME_ARCHITECTURE = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}


def architecture() -> str:
    """The processor's architecture by Linux's name: x86_64, aarch64, ..."""
    name = platform.machine().lower()
    return SAME_ARCHITECTURE.get(name, name)


def instructions(system: str, machine: str, capabilities: Mapping[str, object]) -> dict[str, bool]:
    """Whether this CPU has each of `INSTRUCTIONS`, without those that are not known.

    Args:
        system: the operating system as `platform.system` names it.
        machine: the architecture.
        capabilities: cpuinfo's names (`torch.cpu.get_capabilities`).
    """
    rows = INSTRUCTIONS.get(machine, {})
    # The system's list has what a process may use: AMX needs the kernel to save its registers.
    # cpuinfo has reported AMX-FP16 on a CPU without it (github.com/pytorch/cpuinfo/issues/312).
    if system == "Linux" and (flags := linux_flags(content(CPUINFO))):
        return {name: names.linux in flags for name, names in rows.items()}
    # on macOS cpuinfo asks sysctl, so this is the system's list there too
    return {
        name: bool(capabilities[w.cpuinfo]) for name, w in rows.items() if w.cpuinfo in capabilities
    }


@cache
def has_amx() -> bool:
    """Whether this CPU multiplies bfloat16 in tiles."""
    present = instructions(platform.system(), architecture(), torch.cpu.get_capabilities())
    return present.get("AMX-BF16", False)


def linux_flags(text: str) -> frozenset[str]:
    """The flags that all cores in the text of /proc/cpuinfo share; empty without such a line."""
    lists = [
        frozenset(line.partition(":")[2].split())
        for line in text.splitlines()
        if line.split(":", 1)[0].strip() in ("flags", "Features")
    ]
    return frozenset.intersection(*lists) if lists else frozenset()


def examine_machine(device: torch.device) -> Machine:
    """The facts about this machine and one of its devices."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    machine, capabilities = architecture(), torch.cpu.get_capabilities()
    present = instructions(platform.system(), machine, capabilities)
    return Machine(
        system=platform.system(),
        architecture=machine,
        hardware=hardware(device, ["bfloat16", "float16"]),
        cores_total=os.cpu_count(),
        cpu_quota=cpu_quota(CGROUP),
        threads=torch.get_num_threads(),
        load_average=load,
        instructions={name: present.get(name) for name in INSTRUCTIONS.get(machine, {})},
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        onednn=onednn(),
        variables={name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
        cuda=cuda(device) if device.type == "cuda" else None,
        gpu_unused=None if device.type == "cuda" else gpu_unused(),
        optimizer_kernels=kernels.origin(),
        compiled_code=compiled_code(),
    )


def compiled_code() -> str:
    """The folders in which PyTorch's compiler and Triton keep what they compiled."""
    with contextlib.suppress(OSError, KeyError):  # a user without a name
        inductor = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        triton = Path("~/.triton/cache").expanduser()
        names = {"TORCHINDUCTOR_CACHE_DIR": inductor, "TRITON_CACHE_DIR": triton}
        return ", ".join(os.environ.get(name, str(folder)) for name, folder in names.items())
    return "unknown"


def onednn() -> OneDnn:
    """oneDNN's version, and the 16-bit formats that PyTorch passes to it."""
    version = re.search(r"(?:MKL-DNN|oneDNN) v([\d.]+)", torch.__config__.show())
    return OneDnn(
        version=version[1] if version else None,
        bfloat16=onednn_takes(torch.bfloat16),
        float16=onednn_takes(torch.float16),
    )


def cuda(device: torch.device) -> Cuda:
    """The properties of a GPU."""
    capability = torch.cuda.get_device_capability(device)
    return Cuda(
        compute_capability="{}.{}".format(*capability),
        # PyTorch gives AMD's GPUs compute capabilities too, which mean something else
        tensor_cores=None if torch.version.hip else tensor_cores(capability),
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
        memory_free_bytes=torch.cuda.mem_get_info(device)[0],
    )


def tensor_cores(capability: tuple[int, int]) -> list[str]:
    """The formats of NVIDIA's matrix units of a compute capability."""
    return [name for since, names in TENSOR_CORES if capability >= since for name in names]


def gpu_unused() -> GpuUnused | None:
    """Why the CPU is examined although there seems to be a GPU; None if there seems to be none."""
    if torch.cuda.is_available():
        return "cpu asked for"
    if shutil.which("nvidia-smi") is None and not DRIVER.exists():
        return None
    return "no cuda in torch" if torch.version.cuda is None else "not usable"


def cpu_quota(root: Path) -> float | None:
    """How many cores' time the control group of a container may use; None without a limit.

    Linux's "Control Group v2", cpu.max: microseconds of quota ("max" for none) and of period.
    Version 1 has two files, and -1 for none.

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


IDLE = 0.5  # The load average of an idle system, whose own services run now and then


def is_busy(machine: Machine) -> bool:
    """Whether other processes leave fewer cores than PyTorch has threads; False if not known."""
    load, cores = machine.load_average, machine.cores_total
    if load is None or cores is None:
        return False
    return load + min(machine.threads, cores) > cores + IDLE


def threads_to_measure(machine: Machine) -> int:
    """PyTorch's threads, or as many as have a core to themselves."""
    # Threads wait for the slowest: two on two cores, one of them used by another process, reached a
    # fiftieth of their rate. With fewer threads the ratios between formats stay the same.
    fitting = [math.inf if machine.cpu_quota is None else machine.cpu_quota]
    load, cores = machine.load_average, machine.cores_total
    if is_busy(machine) and load is not None and cores is not None:
        fitting.append(cores - load)
    fit = min(machine.threads, machine.hardware.cores, *fitting)
    return max(1, int(fit))


# A random number that Linux draws when it starts; containers on one machine share it
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PACKAGES = ("torch", "torchvision", "numpy", "hydra-core", "omegaconf")


def versions() -> dict[str, str | None]:
    """Python's and the packages' versions; None for one that is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


@cache
def git_commit() -> str | None:
    """The commit of mprun's source tree, with "-dirty" if it was changed; None in a wheel.

    Read once: later changes of the tree do not affect what the process has imported.
    """
    package = Path(mprun.__file__).resolve().parent
    # installed below a stranger's repository, git would name that one's commit
    if not (package.parent / ".git").exists():
        return None
    try:
        described = subprocess.run(
            # --match= matches no tag, so the answer is the whole hash
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match="],
            cwd=package,
            capture_output=True,
            text=True,
            timeout=10,  # seconds: a folder on a network may not answer
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def hardware(device: torch.device, dtypes: list[str]) -> Hardware:
    """The machine; `accelerated` measures whether each of `dtypes` is faster than float32."""
    return Hardware(
        device=device.type,
        name=cpu_name() if device.type == "cpu" else devices.name(device),
        cores=usable_cores(),
        memory_bytes=memory_bytes(device),
        accelerated={name: accelerated(getattr(torch, name), device) for name in dtypes},
        page_fault_us=page_fault_us() if device.type == "cpu" else None,
        host=host(),
    )


@cache
def host() -> str | None:
    """Stands for this machine since its start, without its name; None where there is no identity.

    Runs with equal values shared a machine, if they overlapped in time.
    """
    try:
        boot = BOOT_ID.read_bytes().strip()
    except OSError:
        return None
    # a hash: a record may be published, and the number itself is the system's secret
    return hashlib.sha256(b"mprun " + boot).hexdigest()[:12]


def usable_cores() -> int:
    """Cores this process may use."""
    return len(usable_cpus())


def memory_bytes(device: torch.device) -> int | None:
    """The device's memory; None if the system does not report it."""
    if device.type != "cpu":
        return devices.total_bytes(device)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def cpu_name() -> str:
    """The processor's name, with the vector instructions that PyTorch uses."""
    listed = re.search(r"^model name\s*: (.+)$", content(CPUINFO), re.MULTILINE)
    name = listed[1] if listed else platform.processor() or platform.machine()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"
