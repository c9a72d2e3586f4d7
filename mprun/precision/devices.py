"""Devices: what PyTorch can do on each kind, and how it is asked.

`torch.accelerator` names the accelerator of this machine: CUDA (NVIDIA's GPUs, and AMD's by ROCm),
XPU (Intel), MPS (Apple), or what a package adds, such as HPU (Gaudi). What a kind lacks is a row of
`BACKENDS`, so that no other code asks for a device's name to decide:

    float64    numbers of 64 bits; without, oracles are computed on the CPU
    events     a time that the device itself notes; without, each step is waited for
    memory     the allocator's peak and the free memory
    pins       copies from pinned host memory, for which the host does not wait
    group      the library by which several processes exchange tensors

This code has run on CPUs alone. For the other kinds it follows PyTorch's documentation, and the
tests run it on a device that they make up.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

CPU = torch.device("cpu")
NAMED = re.compile(r"([a-z_]+)(?::(\d+))?")


@dataclass(frozen=True)
class Backend:
    """What PyTorch has for a kind of device."""

    title: str  # As people write it
    float64: bool = True
    events: bool = True
    memory: bool = True
    pins: bool = True
    group: str | None = None
    package: str | None = None  # Has to be imported before PyTorch knows the kind


# By the type of a `torch.device`
BACKENDS = {
    "cpu": Backend("CPU", events=False, memory=False, pins=False, group="gloo"),
    "cuda": Backend("CUDA", group="nccl"),
    "xpu": Backend("XPU", group="xccl"),
    "mps": Backend("MPS", float64=False, events=False, memory=False, pins=False),
    "hpu": Backend(
        "HPU", float64=False, events=False, group="hccl", package="habana_frameworks.torch.core"
    ),
}


def accelerator() -> torch.device | None:
    """The accelerator that this machine has, without a number; None if there is none."""
    for backend in BACKENDS.values():
        if backend.package is not None and importlib.util.find_spec(backend.package.split(".")[0]):
            # PyTorch knows the kind only after this import
            with suppress(ImportError):
                importlib.import_module(backend.package)
    here = torch.accelerator.current_accelerator(check_available=True)
    return None if here is None or here.type not in BACKENDS else torch.device(here.type)


def find(wanted: str) -> torch.device:
    """The device of a name: auto, cpu, cuda, cuda:1, ...; `auto` is the accelerator, else the CPU.

    Raises:
        ValueError: it is no such name, or this machine has no such device; the text says what is
            legal here.
    """
    here = accelerator()
    if wanted == "auto":
        return here or CPU
    count = torch.accelerator.device_count() if here is not None else 0
    numbered = f", {here.type}:0 to {here.type}:{count - 1}" if here and count > 1 else ""
    legal = f"legal here: auto, cpu{f', {here.type}' if here else ''}{numbered}"
    match = NAMED.fullmatch(wanted)
    if match is None or match[1] not in BACKENDS:
        raise ValueError(
            f"device={wanted} is not a device that mprun knows ({', '.join(BACKENDS)}, with a "
            f"number as in cuda:1); {legal}"
        )
    kind, number = match[1], match[2]
    if kind == "cpu":
        return CPU
    if here is None or kind != here.type:
        raise ValueError(f"device={wanted}: PyTorch finds no {BACKENDS[kind].title} here; {legal}")
    if number is None:
        return here
    if int(number) >= count:
        raise ValueError(f"device={wanted}: there are {count} here; {legal}")
    return torch.device(kind, int(number))


def in_use() -> list[torch.device]:
    """The accelerators that this process has begun to use: a forked one must not begin to."""
    here = torch.accelerator.current_accelerator()
    if here is None or here.type not in BACKENDS:
        return []
    # Not every kind's module can say so
    has_begun = getattr(torch.get_device_module(here), "is_initialized", lambda: True)
    count = torch.accelerator.device_count() if has_begun() else 0
    return [torch.device(here.type, number) for number in range(count)]


def backend(device: torch.device) -> Backend:
    """What PyTorch has for a device; of a kind that is not known, what the CPU has."""
    return BACKENDS.get(device.type, BACKENDS["cpu"])


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in float64, or in float32 where its device has none."""
    return x.double() if backend(x.device).float64 else x.float()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    # A kind that is not known, such as meta, has the CPU's row
    if device.type != "cpu" and backend(device) is not BACKENDS["cpu"]:
        torch.accelerator.synchronize(device)


def event(device: torch.device) -> Any:
    """An event that notes its time when the device reaches it; it is recorded."""
    made = torch.Event(device, enable_timing=True)
    made.record()
    return made


def peak_bytes(device: torch.device) -> int | None:
    """The most that tensors have taken on a device; None if nobody counts."""
    return torch.accelerator.max_memory_allocated(device) if backend(device).memory else None


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None if it does not say."""
    return int(torch.accelerator.get_memory_info(device)[0]) if backend(device).memory else None


def total_bytes(device: torch.device) -> int | None:
    """The memory of a device; None if it does not say."""
    return int(torch.accelerator.get_memory_info(device)[1]) if backend(device).memory else None


def name(device: torch.device) -> str:
    """The device as its maker calls it."""
    asked = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(asked(device)) if asked is not None else backend(device).title


def random_states(devices: Iterable[torch.device]) -> dict[str, torch.Tensor]:
    """The states of the random numbers of accelerators, by the device's name."""
    states = {}
    for device in devices:
        if device.type == "cpu":
            continue
        get, index = torch.get_device_module(device).get_rng_state, _number(device)
        state = get() if device.type == "mps" else get(index)  # MPS has one device
        states[f"{device.type}:{index}"] = state
    return states


def restore_random_states(states: dict[str, torch.Tensor]) -> None:
    """Continue the random numbers of accelerators; those of devices that are not here are left."""
    here = accelerator()
    count = torch.accelerator.device_count() if here is not None else 0
    for named, state in states.items():
        device = torch.device(named)
        if here is None or device.type != here.type or (device.index or 0) >= count:
            continue
        put = torch.get_device_module(device).set_rng_state
        put(state) if device.type == "mps" else put(state, device.index)


def host_random_states() -> dict[str, Any]:
    """The states of Python's and NumPy's random numbers; None of NumPy where nothing imported it.

    They are plain values: `torch.load` with `weights_only` refuses NumPy's.
    """
    version, words, gauss = random.getstate()
    numpy = None
    if (module := sys.modules.get("numpy.random")) is not None:
        state = module.get_state(legacy=False)  # in half the time of a tuple
        kind, keys = state["bit_generator"], state["state"]["key"].tolist()
        cached = int(state["has_gauss"]), float(state["gauss"])
        numpy = [str(kind), keys, int(state["state"]["pos"]), *cached]
    return {"python": [version, list(words), gauss], "numpy": numpy}


def restore_host_random_states(saved: dict[str, Any]) -> None:
    """Go back to states that `host_random_states` gave."""
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    if saved["numpy"] is not None:
        import numpy as np

        kind, keys, position, has_gauss, cached = saved["numpy"]
        np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))


@contextmanager
def random_numbers_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """At the end PyTorch's random numbers are as before: the CPU's, and those of accelerators."""
    host, states = torch.get_rng_state(), random_states(devices)
    try:
        yield
    finally:
        torch.set_rng_state(host)
        restore_random_states(states)


def _number(device: torch.device) -> int:
    return torch.accelerator.current_device_index() if device.index is None else device.index
