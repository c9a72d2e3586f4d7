"""Every op of a step: its module and phase, forward and backward, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from mprun.precision import EmulatedTf32, WrappedArithmetic
from mprun.watch.op_watcher import OpRecorder, RecordedOp
from mprun.watch.step_events import PHASES

WIDTH = 4
"""Of everything here: modules cannot be distinguished by their shapes."""


X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, foreach=False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(X).square().mean().backward()
    optimizer.step()


def observed(model: nn.Module, run: Callable[..., object] = step) -> list[RecordedOp]:
    """The ops of `run(model, optimizer)`."""
    ops: list[RecordedOp] = []
    recorder, optimizer = OpRecorder(ops.append), sgd(model)
    with recorder.following(model, optimizer), recorder:
        run(model, optimizer)
    return ops


def where(ops: list[RecordedOp], name: str, phase: str) -> list[str]:
    """The modules of the ops of that name, in order."""
    return [op.module for op in ops if (op.name, op.phase) == (name, phase)]


def hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """How many there are, of every kind."""
    tables = [
        table
        for module in model.modules()
        for name, table in vars(module).items()
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
    ]
    tables += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    return sum(len(table) for table in tables)


class Block(nn.Module):
    """A linear layer and work of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).exp().sigmoid()  # type: ignore[no-any-return]


def nested() -> nn.Sequential:
    return nn.Sequential(Block(), nn.Sequential(Block(), nn.Tanh()), nn.Linear(WIDTH, WIDTH))


# ---- modules and phases --------------------------------------------------------------------------


def test_ops_of_a_nested_model_carry_the_innermost_module() -> None:
    ops = observed(nested())
    assert where(ops, "addmm", "forward") == ["0.inner", "1.0.inner", "2"]
    assert where(ops, "exp", "forward") == where(ops, "sigmoid", "forward") == ["0", "1.0"]
    assert where(ops, "tanh", "forward") == ["1.1"]


def test_ops_of_the_backward_pass_carry_the_module_of_their_forward_op() -> None:
    ops = observed(nested())
    assert where(ops, "tanh_backward", "backward") == ["1.1"]
    assert where(ops, "sigmoid_backward", "backward") == ["1.0", "0"]
    # For input and weight; the first layer's input needs no gradient.
    assert where(ops, "mm", "backward") == ["2", "2", "1.0.inner", "1.0.inner", "0.inner"]


class Tree(nn.Module):
    """Tanhs of one shape: one runs three times, and what one gives is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.leaves = nn.ModuleList(nn.Tanh() for _ in range(5))
        self.top = nn.Sequential(nn.Tanh(), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        a, b, c, d, _ = [leaf(x) for leaf in self.leaves]
        again = self.leaves[1](self.leaves[1](d))
        return self.top(again * a) + b * c + torch.tanh(x)  # type: ignore[no-any-return]


def test_modules_that_share_shapes_and_those_called_again_are_distinguished() -> None:
    """A `tanh_backward` reads the result of its own forward op: the storage says which that was."""
    ops = observed(Tree())
    made = {op.outputs[0].memory[0]: op.module for op in ops if op.name == "tanh"}
    backward = [op for op in ops if op.name == "tanh_backward"]
    ran = [op.module for op in backward]
    assert ran == [made[op.inputs[1].memory[0]] for op in backward]
    leaves = [f"leaves.{i}" for i in (0, 1, 1, 1, 2, 3)]
    assert sorted(ran) == ["", *leaves, "top.0", "top.1"]
    assert set(where(ops, "tanh", "forward")) == {*ran, "leaves.4"}


def test_the_loss_is_other_and_its_backward_pass_has_no_module() -> None:
    ops = observed(nested())
    loss = [(op.name, op.module) for op in ops if op.phase == "other"]
    assert loss == [("pow", ""), ("mean", ""), ("ones_like", "")]
    assert where(ops, "div", "backward") == [""]  # of the mean


def test_what_an_optimizer_computes_is_its_own_phase_and_what_surrounds_it_is_other() -> None:
    def clipped(model: nn.Module, optimizer: SGD) -> None:
        model(X).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        torch.cumsum(X, 0)

    ops = observed(nn.Linear(WIDTH, WIDTH), clipped)
    assert where(ops, "add_", "optimizer") == ["", ""]  # weight and bias
    assert {op.name for op in ops if op.phase == "optimizer"} == {"add_"}
    other = {op.name for op in ops if op.phase == "other"}
    assert {"sum", "linalg_vector_norm", "mul_", "cumsum"} <= other


def test_phases_follow_each_other_in_every_step() -> None:
    def two(model: nn.Module, optimizer: SGD) -> None:
        step(model, optimizer)
        step(model, optimizer)

    phases = [op.phase for op in observed(nested(), two)]
    changes = [p for p, before in zip(phases, ["", *phases], strict=False) if p != before]
    once = ["forward", "other", "backward", "optimizer"]
    assert changes == once * 2
    assert set(once) == set(PHASES)


class Mask(nn.Module):
    """Begins with an op that has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones(WIDTH) * x


def test_what_ran_before_the_model_does_not_become_its_first_module_s() -> None:
    def prepared(model: nn.Module, optimizer: SGD) -> None:
        model(X.clone().requires_grad_().sin()).sum().backward()

    ops = observed(nn.Sequential(Mask(), nn.Linear(WIDTH, WIDTH)), prepared)
    assert where(ops, "sin", "other") == [""]
    assert where(ops, "cos", "backward") == [""]


# ---- recomputation -------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.kept = nn.Sequential(Block(), Block())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return checkpoint(self.kept, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_ops_are_forward_ops_of_their_modules(reentrant: bool) -> None:
    ops = observed(Checkpointed(reentrant))
    twice = ["kept.0", "kept.1"] * 2
    assert where(ops, "exp", "forward") == twice
    # Recomputation may end early, once the last tensor that is needed is there.
    inner = [f"{name}.inner" for name in twice]
    assert where(ops, "addmm", "forward") == ["first", *inner]
    assert where(ops, "sigmoid_backward", "backward") == ["kept.1", "kept.0"]
    assert where(ops, "mm", "backward")[-1] == "first"
    assert set(where(ops, "mm", "backward")) == {"first", "kept.0.inner", "kept.1.inner"}


# ---- what is left behind -------------------------------------------------------------------------


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("broken")


class Forgiving(nn.Module):
    """Goes on without the part that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), Broken())
        self.rest = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.part(x)
        except ValueError:
            x = x.exp()
        return self.rest(x)  # type: ignore[no-any-return]


def test_hooks_are_removed_and_nothing_is_recorded_afterwards() -> None:
    model, ops = nested(), list[RecordedOp]()
    optimizer, recorder = sgd(model), OpRecorder(ops.append)
    with recorder.following(model, optimizer), recorder:
        assert hooks(model, optimizer) > 0
        step(model, optimizer)
    assert hooks(model, optimizer) == 0
    ops.clear()
    step(model, optimizer)
    assert ops == []


def test_an_error_in_a_forward_pass_leaves_no_hook_and_the_right_modules() -> None:
    model, ops = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Broken())), list[RecordedOp]()
    optimizer, recorder = sgd(model), OpRecorder(ops.append)
    with pytest.raises(ValueError, match="broken"), recorder.following(model, optimizer), recorder:
        model(X)
    assert hooks(model, optimizer) == 0
    model[1][0] = nn.Tanh()  # type: ignore[operator]
    ops.clear()
    with recorder.following(model, optimizer), recorder:
        step(model, optimizer)
    assert where(ops, "tanh", "forward") == where(ops, "tanh_backward", "backward") == ["1.0"]
    assert where(ops, "pow", "other") == [""]


def test_an_error_that_the_model_survives_leaves_it_in_the_right_module() -> None:
    ops = observed(Forgiving())
    assert where(ops, "exp", "forward") == [""]
    assert where(ops, "addmm", "forward") == ["part.0", "rest"]
    assert where(ops, "pow", "other") == [""]


# ---- the ops themselves --------------------------------------------------------------------------


def ops_of(run: Callable[[], object]) -> list[RecordedOp]:
    ops: list[RecordedOp] = []
    with OpRecorder(ops.append):
        run()
    return ops


def test_a_cast_is_a_copy_into_another_dtype() -> None:
    ops = ops_of(lambda: (X.bfloat16(), X.to(X.dtype, copy=True), X.clone(), X.double()))
    assert [op.name for op in ops] == ["_to_copy", "_to_copy", "clone", "_to_copy"]
    assert [op.is_cast for op in ops] == [True, False, False, True]


def test_views_are_distinguished_from_ops_that_write() -> None:
    x = X.clone()
    ops = ops_of(lambda: x.t().select(0, 1).add_(1).add(1).detach())
    assert [(op.name, op.is_view) for op in ops] == [
        ("t", True),
        ("select", True),
        ("add_", False),
        ("add", False),
        ("detach", True),
    ]


def test_a_value_is_described_by_dtype_shape_bytes_and_memory() -> None:
    x = X.clone()
    cast, written, again = ops_of(lambda: (x.bfloat16(), x.add_(1), x[1:].bfloat16()))[:3]
    (have,), (want,) = cast.inputs, cast.outputs
    assert (have.dtype, have.shape, have.nbytes) == (torch.float32, (3, WIDTH), 3 * WIDTH * 4)
    assert (want.dtype, want.shape, want.nbytes) == (torch.bfloat16, (3, WIDTH), 3 * WIDTH * 2)
    assert have.memory != want.memory
    assert written.inputs[0].memory == have.memory
    assert again.inputs[0].memory[0] == have.memory[0]
    assert again.inputs[0].memory[1] == have.memory[1] + 1


def test_the_device_is_waited_for_before_and_after_each_op() -> None:
    said: list[str] = []
    recorder = OpRecorder(lambda op: said.append(op.name), synchronize=lambda: said.append("wait"))
    with recorder:
        X.exp().sin()
    assert said[-6:] == ["wait", "wait", "exp", "wait", "wait", "sin"]


def test_the_marks_of_a_profiler_are_no_ops() -> None:
    ops = observed(nested())
    assert where(ops, "add_", "optimizer")  # a step of an optimizer is one in a profile
    assert not [op.name for op in ops if op.name.startswith("_record_function")]


def test_the_model_s_ops_are_recorded_once_under_an_emulated_arithmetic() -> None:
    model = nested()
    ops: list[RecordedOp] = []
    recorder, optimizer = OpRecorder(ops.append), sgd(model)
    arithmetic = WrappedArithmetic(EmulatedTf32(), lambda: recorder)

    def emulated(model: nn.Module, optimizer: SGD, region: Callable[[], Any]) -> None:
        optimizer.zero_grad()
        with region():
            model(X).square().mean().backward()
        optimizer.step()

    with recorder.following(model, optimizer), recorder:
        emulated(model, optimizer, arithmetic.region)
    ours = [(op.name, op.phase, op.module) for op in ops]
    assert ours == [(op.name, op.phase, op.module) for op in observed(nested())]


def test_observing_computes_the_same() -> None:
    weights = []
    for watched in (False, True):
        model = Tree()
        if watched:
            observed(model)
        else:
            step(model, sgd(model))
        weights.append(model.weight.detach())
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], torch.ones(WIDTH))
