"""The C engine calls the library of the installation, which needs no compiling.

Its loops are those of the kernels that are compiled here, half a second for each combination of
dtypes. All tests here have it; the marker `compiled` is on those that compile all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing import context, get_context
from typing import Any

import pytest
from torch._inductor import config as inductor_config

from mprun.optim import engines
from mprun.optim.formulas import Storage
from mprun.precision.kernels import prebuilt


@cache
def installed(storage: Storage) -> Callable[..., None]:
    (update,) = prebuilt.updates(engines._defines(storage))
    return update


@pytest.fixture(autouse=True)
def kernels_of_the_installation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is none, or one of other sources, the kernels are compiled."""
    compiled: Any = request.node.get_closest_marker("compiled")
    if compiled is None and not isinstance(prebuilt.library(), str):
        monkeypatch.setattr(engines, "_library", installed)
        monkeypatch.setattr(engines, "_compiles", lambda storage: True)


@pytest.fixture
def vectors_that_are_trusted() -> Iterator[None]:
    """Inductor would compile a program for each width of vectors, to see that it runs: 8 s."""
    with inductor_config.patch({"cpp.vec_isa_ok": True}):
        yield


@pytest.fixture(scope="session")
def forked() -> context.ForkServerContext:
    """Starts processes that are copies of one, which has imported what takes long."""
    found = get_context("forkserver")
    found.set_forkserver_preload(
        ["torch._dynamo", "torch.distributed.fsdp", "mprun.optim", "pytest", "hypothesis"]
    )
    return found
