"""Processes that start fast, and the Triton kernel where there is no GPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from multiprocessing import context, get_context
from typing import Any

import pytest


@pytest.fixture(scope="session")
def interpreted() -> Any:
    """A copy of the kernel that Triton's interpreter runs on the CPU; as on a GPU, bit for bit."""
    pytest.importorskip("triton")
    spec = importlib.util.find_spec("mprun.optim.triton_kernel")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # read where a kernel is defined
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def triton(interpreted: Any) -> Iterator[Any]:
    """For the time of a test the engine triton is that copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mprun.optim.triton_kernel", interpreted)
        patch.setattr("mprun.optim.triton_kernel", interpreted, raising=False)
        patch.setenv("TRITON_INTERPRET", "1")
        yield interpreted


@pytest.fixture(scope="session")
def forked() -> context.ForkServerContext:
    """Starts processes that are copies of one, which has imported what takes long."""
    found = get_context("forkserver")
    found.set_forkserver_preload(
        ["torch._dynamo", "torch.distributed.fsdp", "mprun.optim", "pytest", "hypothesis"]
    )
    return found
