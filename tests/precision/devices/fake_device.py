"""A device that PyTorch takes for an accelerator, made of the CPU.

Its kind is `fake`, by PyTorch's own interface for further accelerators (`PrivateUse1`). Each of its
tensors holds a tensor on the CPU, and each op runs there. It lacks what accelerators lack: float64
is refused, as on Apple's GPUs, and there are no events. What it is asked for is counted, so that a
test sees that the generic interface is used.

    python -m tests.precision.devices.fake_device recipe=linear device=fake     runs mprun with it
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from mprun.cli import main as cli
from mprun.config import schema, validate
from mprun.precision import devices, rates

KIND = "fake"
asked: Counter[str] = Counter()
"""How often each function of the device's interface was called."""


class FakeTensorOnDevice(Tensor):
    """A tensor of the device; `raw` has the numbers."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> FakeTensorOnDevice:
        if raw.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"{KIND} has no {raw.dtype}")
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=f"{KIND}:0",
        )
        made.raw = raw.detach()
        return made  # type: ignore[no-any-return]

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"{KIND}({self.raw})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return on_device(func, args, kwargs or {})


def on_device(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run an op on the CPU; its results are on the device if its inputs are, or if it says so."""
    wanted = kwargs.get("device")
    stays = any(isinstance(x, FakeTensorOnDevice) for x in tree_leaves((args, kwargs)))
    if wanted is not None:
        stays = torch.device(wanted).type == KIND
    own: dict[int, Tensor] = {}

    def raw(x: Any) -> Any:
        if isinstance(x, FakeTensorOnDevice):
            own[id(x.raw)] = x
            return x.raw
        return torch.device("cpu") if isinstance(x, torch.device) and x.type == KIND else x

    def back(x: Any) -> Any:
        if isinstance(x, Tensor) and not isinstance(x, FakeTensorOnDevice) and stays:
            return own[id(x)] if id(x) in own else FakeTensorOnDevice(x)
        return x

    result = func(*tree_map(raw, args), **tree_map(raw, dict(kwargs)))
    return tree_map(back, result)


def make_empty(size: Sequence[int], dtype: Any = None, **others: Any) -> FakeTensorOnDevice:
    """What functions that make tensors begin with."""
    others.pop("layout", None)
    memory_format = others.get("memory_format") or torch.contiguous_format
    return FakeTensorOnDevice(
        torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format)
    )


def make_strided(
    size: Sequence[int], stride: Sequence[int], dtype: Any = None, **others: Any
) -> FakeTensorOnDevice:
    return FakeTensorOnDevice(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


class Module:
    """`torch.fake`: what a backend's module has."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"module 'torch.{KIND}' has no attribute '{name}'")

    _state = torch.zeros(8, dtype=torch.uint8)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = 0) -> Tensor:
        asked["get_rng_state"] += 1
        return self._state.clone()

    def set_rng_state(self, state: Tensor, device: Any = 0) -> None:
        asked["set_rng_state"] += 1
        self._state = state.clone()

    def manual_seed_all(self, seed: int) -> None:
        asked["manual_seed_all"] += 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_device_name(self, device: Any = None) -> str:
        return "Fake 1"


def cast_by_autocast() -> None:
    """Give the device's autocast a list of ops: those of linear layers and convolutions."""
    key = "AutocastPrivateUse1"
    _LIBRARIES.append(torch.library.Library("_", "IMPL"))
    _LIBRARIES[-1].fallback(torch.library.fallthrough_kernel, key)
    _LIBRARIES.append(torch.library.Library("aten", "IMPL"))
    guard = torch._C._ExcludeDispatchKeyGuard
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    for name in ("linear", "matmul", "conv2d"):
        packet = getattr(torch.ops.aten, name).default

        def cast(*given: Any, op: Any = packet) -> Any:
            asked["autocast"] += 1
            dtype = torch.get_autocast_dtype(KIND)
            with guard(keys):
                return op(*(x.to(dtype) if is_float32(x) else x for x in given))

        _LIBRARIES[-1].impl(name, cast, key)


def make_tensors() -> None:
    """Carry out the two functions that all others of PyTorch make tensors by, and all others."""
    _LIBRARIES.append(torch.library.Library("_", "IMPL"))
    _LIBRARIES[-1].fallback(lambda op, *given, **named: on_device(op, given, named), "PrivateUse1")
    _LIBRARIES.append(torch.library.Library("aten", "IMPL"))
    _LIBRARIES[-1].impl("empty.memory_format", make_empty, "PrivateUse1")
    _LIBRARIES[-1].impl("empty_strided", make_strided, "PrivateUse1")


def is_float32(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float32


_LIBRARIES: list[torch.library.Library] = []


def install() -> Module:
    """Make the device known to PyTorch and to mprun, for this whole process."""
    module = Module()
    cast_by_autocast()
    make_tensors()
    torch.__future__.set_swap_module_params_on_conversion(True)  # else `raw` would stay
    _setup_privateuseone_for_python_backend(KIND, backend_module=module)
    devices.BACKENDS[KIND] = devices.Backend(
        "Fake", float64=False, events=False, memory=False, pins=False
    )
    rates.SIDE[KIND] = rates.SIDE["cpu"]
    legal = (*schema.DEVICES, KIND)
    schema.DEVICES = validate.DEVICES = legal  # type: ignore[misc, assignment, attr-defined]

    def synchronize(device: torch.device) -> None:
        asked["synchronize"] += 1  # PyTorch's would ask a stream, which the device has not

    devices.synchronize = synchronize  # type: ignore[assignment]
    return module


def main(words: Sequence[str]) -> int:
    """Run mprun on the device."""
    install()
    status = cli.main(list(words))
    print("asked:", *(f"{name}={count}" for name, count in sorted(asked.items())))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
