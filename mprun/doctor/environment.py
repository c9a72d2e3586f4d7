"""What a run ran on: hardware, versions, the code's commit."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import mprun
from mprun.precision import accelerated
from mprun.records.run_record import Hardware

PACKAGES = ("torch", "torchvision", "numpy", "hydra-core", "omegaconf")


def versions() -> dict[str, str | None]:
    """Python's and the packages' versions; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


@cache
def git_commit() -> str | None:
    """The commit of mprun's source tree, "-dirty" where it was changed; None in a wheel.

    Asked once: what a process has imported stays, whatever becomes of the tree meanwhile.
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
    """The machine, and for each of `dtypes` whether it is faster than float32 here (measured)."""
    return Hardware(
        device=device.type,
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        cores=usable_cores(),
        memory_bytes=memory_bytes(device),
        accelerated={name: accelerated(getattr(torch, name), device) for name in dtypes},
    )


def usable_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes(device: torch.device) -> int | None:
    """The device's memory; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def cpu_name() -> str:
    """The processor's name as the system gives it, with the vector instructions PyTorch uses."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"
