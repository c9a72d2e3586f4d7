"""A step is the same few calls for any number of parameters, and sees all that changes between."""

from __future__ import annotations

import copy
import gc
import re
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mprun.optim import AdamW, LowPrecisionOptimizer
from mprun.precision import kernels
from tests.optim import BRAIN, FLOAT, HALF, give, normal, parameters, unlike
from tests.optim.test_engines import needs_c


def many(count: int, **options: Any) -> tuple[list[nn.Parameter], AdamW]:
    made = parameters(normal((8, 8), n, BRAIN) for n in range(count))
    for p in made:
        give(p, normal((8, 8), 7, BRAIN))
    return made, AdamW(made, **options)


class Calls(TorchDispatchMode):
    """Counts what a step asks of PyTorch, of the kernels and of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = self.kernels = self.functions = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        self.ops += 1
        return op(*args, **(kwargs or {}))

    def of(self, step: Callable[[], object]) -> tuple[int, int, int]:
        def count(frame: Any, event: str, argument: Any) -> None:
            self.functions += event == "call"

        gc.disable()  # it calls back whoever asked for it
        sys.setprofile(count)
        step()
        sys.setprofile(None)
        gc.enable()
        functions = self.functions
        with self:
            step()
        return self.ops, self.kernels, functions


def counted(count: int, calls: Calls, scale: float | None = None) -> tuple[int, int, int]:
    _, optimizer = many(count)

    def step() -> None:
        if scale is None:
            optimizer.step()
        else:
            optimizer.scaled_step(torch.tensor(scale), overflow=torch.zeros(()))

    step()
    return calls.of(step)


CALL = kernels.call


def counting(calls: Calls, *given: Any) -> None:
    calls.kernels += 1
    CALL(*given)


@needs_c
def test_on_a_cpu_its_calls_do_not_depend_on_the_number_of_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for count in (10, 150, 1500):
        calls = Calls()
        monkeypatch.setattr(kernels, "call", partial(counting, calls))
        found.append(counted(count, calls))
    assert found[0] == found[1] == found[2]
    ops, in_c, functions = found[0]
    assert ops <= 10
    assert in_c == 3  # one a step
    assert functions <= 100


@pytest.mark.parametrize("scale", [None, 8.0])
def test_as_on_a_gpu_neither_do_its_launches(
    scale: float | None, triton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a loss scale the constants are computed on the device too."""
    monkeypatch.setattr("mprun.optim.base.is_on_host", lambda p: False)
    monkeypatch.setattr("mprun.optim.engines.fastest", lambda device, formula: "triton")
    found = []
    for count in (10, 150, 1500):
        calls = Calls()

        def launched(*given: Any, calls: Calls = calls, **storage: Any) -> None:
            calls.kernels += 1

        monkeypatch.setattr(triton, "update", launched)
        found.append(counted(count, calls, scale))
    assert found[0] == found[1] == found[2]
    ops, launches, functions = found[0]
    assert ops <= (10 if scale is None else 50)
    assert launches == 3  # one a step
    assert functions <= 120


# ---- what a step must not take from the one before ----


Change = Callable[[list[nn.Parameter], LowPrecisionOptimizer], None]


def rate(made: list[nn.Parameter], optimizer: LowPrecisionOptimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def rounding(made: list[nn.Parameter], optimizer: LowPrecisionOptimizer) -> None:
    optimizer.param_groups[0]["rounding"] = "nearest"


def moments(made: list[nn.Parameter], optimizer: LowPrecisionOptimizer) -> None:
    optimizer.param_groups[0]["momentum_dtype"] = HALF


def data(made: list[nn.Parameter], optimizer: LowPrecisionOptimizer) -> None:
    made[0].data = made[0].data.clone() * 2


def dtype(made: list[nn.Parameter], optimizer: LowPrecisionOptimizer) -> None:
    made[1].data = made[1].data.half()


def gradient(made: list[nn.Parameter], optimizer: LowPrecisionOptimizer) -> None:
    give(made[0], normal((8, 8), 9, FLOAT))


def missing(made: list[nn.Parameter], optimizer: LowPrecisionOptimizer) -> None:
    made[0].grad = None


def strided(made: list[nn.Parameter], optimizer: LowPrecisionOptimizer) -> None:
    give(made[0], normal((8, 8), 9, BRAIN).t())


def attempts(made: list[nn.Parameter], optimizer: LowPrecisionOptimizer) -> None:
    optimizer.state[made[1]]["step"].fill_(100)


def entry(made: list[nn.Parameter], optimizer: LowPrecisionOptimizer) -> None:
    optimizer.state[made[0]]["exp_avg"] = torch.ones(8, 8)


def entry_in_place(made: list[nn.Parameter], optimizer: LowPrecisionOptimizer) -> None:
    optimizer.state[made[0]]["exp_avg"].data = torch.ones(8, 8)


def cleared(made: list[nn.Parameter], optimizer: LowPrecisionOptimizer) -> None:
    optimizer.state.clear()


def loaded(made: list[nn.Parameter], optimizer: LowPrecisionOptimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def group(made: list[nn.Parameter], optimizer: LowPrecisionOptimizer) -> None:
    made.append(nn.Parameter(normal((3,), 1, BRAIN)))
    optimizer.add_param_group({"params": [made[-1]], "lr": 0.1})


CHANGES: tuple[Change, ...] = (
    rate,
    rounding,
    moments,
    data,
    dtype,
    gradient,
    missing,
    strided,
    attempts,
    entry,
    entry_in_place,
    cleared,
    loaded,
    group,
)


@needs_c
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_sees_every_change_since_the_last_one(change: Change) -> None:
    """The optimizer beside it forgets what it knew before each step."""
    found = []
    for forgets in (False, True):
        made, optimizer = many(3, seed=5)
        for step in range(5):
            for p in made:
                give(p, normal(p.shape, step, p.dtype))
            if step == 2:
                change(made, optimizer)
                if change is dtype:
                    give(made[1], normal((8, 8), step, HALF))
            if forgets:
                optimizer._plans.clear()
            optimizer.step()
        found.append(optimizer)
    assert unlike(*found) == []


@needs_c
def test_a_sparse_gradient_is_refused_at_any_step() -> None:
    made, optimizer = many(2)
    optimizer.step()
    made[0].grad = None
    optimizer.step()
    made[0].grad = normal((8, 8), 1, BRAIN).to_sparse()
    with pytest.raises(RuntimeError, match="does not take sparse gradients"):
        optimizer.step()


@needs_c
def test_what_others_keep_in_the_state_is_left_alone() -> None:
    made, optimizer = many(2)
    optimizer.state[made[0]]["note"] = "mine"  # type: ignore[assignment]
    for _ in range(2):
        optimizer.step()
    assert optimizer.state[made[0]]["note"] == "mine"


def test_the_engine_of_gpus_is_refused_on_a_cpu() -> None:
    _, optimizer = many(1, engine="triton")
    text = "engine='triton' for a parameter on cpu; legal there: None, 'c', 'eager'"
    with pytest.raises(ValueError, match=text):
        optimizer.step()


@needs_c
def test_parameters_are_known_to_have_changed() -> None:
    made, optimizer = many(2)
    for _ in range(2):
        before = [p._version for p in made]
        optimizer.step()
        assert all(p._version > version for p, version in zip(made, before, strict=True))


@needs_c
def test_an_optimizer_is_copied_and_freed() -> None:
    _, optimizer = many(2, seed=1)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    for held in (optimizer, twin):
        for p in held.param_groups[0]["params"]:
            give(p, normal((8, 8), 3, BRAIN))
        held.step()
    assert unlike(optimizer, twin) == []
    gone = weakref.ref(twin.param_groups[0]["params"][0])
    del twin, held, p
    gc.collect()
    assert gone() is None


@needs_c
def test_steps_of_parameters_that_began_later_have_their_own_corrections() -> None:
    made, optimizer = many(2)
    made[1].grad = None
    optimizer.step()
    give(made[1], normal((8, 8), 7, BRAIN))
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in made] == [2, 1]
    alone, other = many(2)
    alone[0].grad = None
    other.param_groups[0]["attempts"] = 1
    other.step()
    assert torch.equal(alone[1], made[1])


# ---- on a GPU that is not here ----


KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "codes": {"FIRST": "C8", "SECOND": "C8", "ROOT": True},
    "masters of 24 bits": {"RULE": "split", "SKIPS": True},
    "kahan": {"RULE": "kahan", "PARAM": "F16", "GRAD": "F32", "FIRST": "S16"},
    "rmsprop": {"FORMULA": "rmsprop", "PARAM": "F16", "SATURATE": True},
    "nesterov": {"FORMULA": "nesterov", "PARAM": "F32", "RULE": "nearest", "SECOND": "NONE"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_compiles_for_a_gpu_and_rounds_each_operation_once(
    kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an H100, with the assembler that Triton brings; no fused or approximate operation."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mprun.optim import triton_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    storage = {
        "PARAM": "BF16",
        "GRAD": "BF16",
        "FIRST": "F32",
        "SECOND": "F32",
        "FORMULA": "adamw",
        "RULE": "stochastic",
        "FIRST_DRAWN": True,
        "ROOT": False,
        "SATURATE": False,
        "SKIPS": False,
        **KINDS[kind],
    }
    floats = dict.fromkeys(("hypers", "skip", "maps"), "*fp32")
    integers = dict.fromkeys(("table", "chunks", "words"), "*i64")
    signature = {**integers, **floats, **dict.fromkeys(storage, "constexpr")}
    source = ASTSource(fn=triton_kernel._step, signature=signature, constexprs=storage)
    made = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}
    )
    assert made.asm["cubin"]
    code = made.asm["ptx"]
    assert not re.findall(r"\bfma\.|\.ftz|\.approx|div\.full", code)
    assert "add.rn.f32" in code
    divides = storage["FORMULA"] in ("adamw", "rmsprop")
    assert ("div.rn.f32" in code) == ("sqrt.rn.f32" in code) == divides
