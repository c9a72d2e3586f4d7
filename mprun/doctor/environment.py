"""The environment of a run: hardware, versions, the code's commit."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import mprun
from mprun import devices
from mprun.doctor.heap import page_fault_us
from mprun.precision import accelerated
from mprun.records.run_record import Hardware

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""A random number that Linux draws when it starts; containers on one machine share it."""
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
    if not (package.parent / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match="],
            cwd=package,
            capture_output=True,
            text=True,
            timeout=10,
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
    return hashlib.sha256(b"mprun " + boot).hexdigest()[:12]


def usable_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"
