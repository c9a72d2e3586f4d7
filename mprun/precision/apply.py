"""What carries a policy out: prepare the model, run it, go backward, step.

`Precision` is one class with four parts: the policy names the dtypes, the caster decides how ops
get theirs, the arithmetic computes the ops, the loss scale scales the loss and decides whether a
step is taken. A mode is a choice of parts, never a subclass, so the training loop is the same for
all modes. It works in anyone's own loop (docs/tutorials/your_loop.md).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from mprun.precision._torch import is_compiled
from mprun.precision._torch_switches import backend_flags
from mprun.precision.arithmetic import (
    Arithmetic,
    NativeArithmetic,
    OpSubstitution,
    with_lstm_fallback,
)
from mprun.precision.caster import AutocastCaster, Caster
from mprun.precision.execution import chosen_arithmetic, chosen_caster, device_of, loss_scale_of
from mprun.precision.gemms import GEMMS, convert_gemms, convert_natively, model_gemms
from mprun.precision.layers import (
    accumulate_in,
    check_rounding,
    convert,
    keep_layers,
    layer_precisions,
    resolve,
    with_layer_formats,
)
from mprun.precision.loss_scale import ALONE, BufferGuard, BufferOverflow, Clip, Combine, LossScale
from mprun.precision.nested import to_dtype
from mprun.precision.op_lists import OpLists, disable_casts
from mprun.precision.policy import Policy, dtype_name, policy_of, torch_dtype
from mprun.precision.random_bits import name_parameters
from mprun.records.layer_values import layer_values

NOT_COMPILED = (
    "torch.compile has no effect in this mode here: mprun computes or replaces single ops, and "
    "compiled code would hide them; execution='native' takes PyTorch's kernels and compiles"
)

NOT_SCALED = (
    "this step divides gradients by the loss scale, and no loss was scaled before it: call "
    "precision.backward(loss) instead of loss.backward()"
)


class Precision:
    """A policy at work on a model, or on several that train together.

        precision = mprun.Precision("bf16_sr")
        precision.prepare(model)
        optimizer = mprun.optim.for_policy(precision.policy, torch.optim.AdamW, model.parameters())
        for x, y in batches:
            optimizer.zero_grad()
            precision.begin_step()
            loss = precision.loss(loss_function, precision.forward(model, x), y)
            precision.backward(loss)
            skipped = precision.step(optimizer)  # `unscale` first, to read or clip gradients
            precision.update()

    Args:
        policy: the mode, or its name.
        device: where the models train; None is CUDA if there is a CUDA device, else the CPU.
        execution: native (PyTorch's kernels for the dtype, however slow), emulated (float32
            arithmetic, each result rounded), or auto: native where the hardware has the format at
            a good speed, with a warning where it has not; or the arithmetic itself, which has its
            own seed.
        seed: of stochastic rounding of every result (`half_sr_full`).
        loss_scale: auto (dynamic if the mode or a layer computes in float16), none, dynamic,
            static, or the factor of a static one.
        max_norm: `step` clips the global L2 norm of an optimizer's gradients to this; None: never.
        combine: what processes with shards agree on that norm and on overflows by.
        layers: module names or globs to the precision of each: fp32, fp16, bf16, fp8, a mode, or
            formats of a linear layer's products, `{"forward": "fp8", "grad_weight": "fp32"}`.
        op_lists: in a mixed mode, lists that decide which ops are cast, or the name of shipped
            ones, such as "hmp"; None for autocast. In any mode a caster itself, which decides all
            casts: inputs are not cast before it.

    Raises:
        TypeError: `policy` is neither a policy nor a name.
        ValueError: an argument is not legal, or the mode cannot be carried out like this here.
    """

    def __init__(
        self,
        policy: Policy | str,
        *,
        device: torch.device | str | None = None,
        execution: Arithmetic | str = "auto",
        seed: int = 0,
        loss_scale: LossScale | str | float = "auto",
        max_norm: float | None = None,
        combine: Combine = ALONE,
        layers: Mapping[str, str | Mapping[str, str]] | None = None,
        op_lists: OpLists | Caster | str | None = None,
    ) -> None:
        place = device_of(device)
        try:
            named = layer_values(layers or {})
        except ValueError as error:
            raise ValueError(f"layers: {error}") from None
        row, caster = chosen_caster(policy_of(policy), op_lists, place.type)
        check_rounding(named, row)
        row = with_layer_formats(row, named.values())
        self.policy = row
        self.device = place
        self.arithmetic = chosen_arithmetic(row, execution, place, seed, named.values())
        self.loss_scale = loss_scale_of(loss_scale, row, named.values(), place)
        self.steps = 0
        """The number of the step that began last."""
        self.converted_gemms: list[str] | None = None
        """Linear layers whose products have formats of their own; None in modes without any."""
        self._caster = caster
        self._clip = Clip(max_norm, combine)
        self._layers = named
        # Without casts a 16-bit layer takes inputs of its own dtype alone. A run, which makes its
        # caster, has batches of that dtype.
        casts_inputs = row.input_dtype != "float32" and not isinstance(op_lists, Caster)
        self._input_dtype = torch_dtype(row.input_dtype) if casts_inputs else None
        self._output_dtype = torch_dtype(row.output_dtype)
        self._guards: dict[nn.Module, BufferGuard] = {}
        self._replaced: dict[int, weakref.ref[nn.Parameter]] = {}  # by `prepare`, by identity
        self._checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._begun = self._stepped = self._has_scaled = False
        self._seen_compiled = False

    @property
    def execution(self) -> str:
        """native, or emulated: whose kernels compute."""
        return self.arithmetic.execution

    @property
    def substitutions(self) -> tuple[OpSubstitution, ...]:
        """Ops that their own kernel does not compute, each with the dtype and the reason."""
        return self.arithmetic.substitutions

    def switches(self) -> AbstractContextManager[None]:
        """A context in which PyTorch's process-wide switches are those of the mode.

        TF32 is on for `tf32` on hardware that has it, else off, for convolutions too (PyTorch's
        default leaves it on there). 16-bit matmuls accumulate in float32. If code inside sets a
        switch, it is set back, with a warning. At the end all are as they were.
        """
        return backend_flags(self.policy, self.policy.tf32 and self.execution == "native")

    @property
    def columns(self) -> dict[str, object]:
        """The policy's columns that caster, arithmetic and the cast of outputs decide."""
        output_dtype = dtype_name(self._output_dtype)
        formats = {name: getattr(self.policy, name) for name in ("gemms", "hadamard")}
        if not self.converted_gemms:
            formats = {}
        own = {**self._caster.columns, **self.arithmetic.columns, **formats}
        return {**own, "output_dtype": output_dtype}

    def prepare(
        self,
        model: nn.Module,
        device: torch.device | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> nn.Module:
        """`model` on `device`, its parameters and floating buffers in the parameter dtype.

        The parameters are new objects: make optimizers afterwards. Layers of `layers` get their own
        dtype. Gradients are accumulated in the policy's dtype. None is the device of `Precision`.
        `memory_format` is that of `Tensor.to`.

        Raises:
            TypeError: `model` is no module.
            ValueError: `layers` names no module, names one twice, gives tied parameters two
                dtypes, or gives a layer what it cannot have in this mode.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"prepare takes a torch.nn.Module, not {type(model).__name__}; prepare each of "
                "several models with a call of its own"
            )
        device = self.device if device is None else device
        self._replaced |= {id(p): weakref.ref(p) for p in model.parameters()}
        layers = resolve(model, self._layers)
        named = layer_precisions(layers, self.policy)
        dtype = torch_dtype(self.policy.param_dtype)
        # A model that is prepared again keeps its number. A second model has a prefix, so that its
        # parameters get other random bits than those of the same names in the first one.
        number = [*dict.fromkeys([*self._guards, model])].index(model) + 1
        prefix = "" if number == 1 else f"model {number}: "
        # First, because all that follows looks at the dtypes of the new parameters
        convert(model, device, dtype, memory_format, {n: x.stored for n, x in named.items()})
        self._give_formats(model, layers, prefix)
        if named:
            casts = self.policy.casts
            caster = self._caster if casts else AutocastCaster(device.type, torch.float32)
            keep_layers(model, named, None if casts else dtype, caster.layer_region)
        accumulate_in(model, torch_dtype(self.policy.accum_dtype))
        self.arithmetic = with_lstm_fallback(self.arithmetic, model, self.policy.casting, device)
        needed = self.loss_scale.tensor is not None or self.policy.is_low
        self._guards[model] = BufferGuard(model, prefix, active=needed)
        name_parameters(model, prefix)
        return model

    def _give_formats(self, model: nn.Module, layers: Mapping[str, str], prefix: str) -> None:
        """Formats for the products of linear layers, before other code wraps them."""
        if self.policy.gemms == "none":
            return
        gemms = model_gemms(model, layers, self.policy.gemms, self.policy.hadamard)
        self.converted_gemms = [*(self.converted_gemms or []), *gemms]
        if self.execution == "native":
            if self.policy.hadamard or {*gemms.values()} != {GEMMS[self.policy.gemms]}:
                raise ValueError(
                    "execution=native with formats of single layers or a Hadamard transform, which "
                    "are emulated; legal: execution=emulated"
                )
            convert_natively(model, gemms, self.policy.gemms)
            return
        convert_gemms(model, gemms, self.arithmetic.bits)

    def begin_step(self, step: int | None = None) -> None:
        """An optimizer step begins: call it before the step's first forward pass.

        The number decides the bits of stochastic rounding, so each step needs its own: None is the
        one after the last. It also ends an iteration that `update` did not end.
        """
        step = self.steps + 1 if step is None else step
        self.update()
        self.steps, self._begun = step, True
        self.arithmetic.begin_step(step)
        for guard in self._guards.values():
            guard.before(step)

    def step_region(self) -> AbstractContextManager[object]:
        """A context around all forward and backward passes of a step, if there are several.

        A weight that one pass has cast is not cast again by the next.
        """
        return self._caster.step_region()

    @contextmanager
    def region(self) -> Iterator[None]:
        """The casts and the arithmetic of a forward pass, for code that calls the model itself."""
        with self.arithmetic.region(), self._caster.region():
            yield

    def forward(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`model(*args, **kwargs)`, its floating tensors in the policy's output dtype.

        Tuples, mappings and dataclasses keep their type; other leaves pass. The output dtype is
        float32 unless the policy names another one. Where parameters have 16 bits, floating inputs
        are cast to their dtype; the casts are differentiable.
        """
        self._warn_of_compiled(model)
        if self._begun and self._stepped and torch.is_grad_enabled():
            self._stepped = False  # the turn of another optimizer
            self.arithmetic.resume_step()
        if self._input_dtype is not None:
            args, kwargs = to_dtype((args, kwargs), self._input_dtype)
        with self.arithmetic.region():
            with self._caster.region():
                output = model(*args, **kwargs)
            # Inside the arithmetic, which sees this cast as an op, and outside of the caster
            return to_dtype(output, self._output_dtype)

    def _warn_of_compiled(self, model: Callable[..., Any]) -> None:
        compiled = isinstance(model, nn.Module) and is_compiled(model)
        if compiled and not self._seen_compiled:
            self._seen_compiled = True
            if not isinstance(self.arithmetic, NativeArithmetic):
                warnings.warn(NOT_COMPILED, stacklevel=3)

    def loss(self, function: Callable[..., Tensor], *args: Any, share: float = 1) -> Tensor:
        """`share` of the loss `function(*args)`, a scalar.

        The caster does not apply, the arithmetic does: an output in 16 bits has its loss computed
        in 16 bits, and emulation rounds it like every other result.
        """
        with self.arithmetic.region():
            loss = function(*args)
            return loss if share == 1 else loss * share

    def backward(
        self, loss: Tensor, *, retain_graph: bool | None = None, create_graph: bool = False
    ) -> None:
        """Add the (scaled) loss's gradients to the parameters' `grad`.

        `retain_graph` and `create_graph` are those of `Tensor.backward`; with the latter, gradients
        are those of the scaled loss until `unscale`.

        Raises:
            RuntimeError: every result is rounded stochastically, and `begin_step` was not called.
        """
        if self.policy.rounding_scope == "all" and not self._begun:
            raise RuntimeError(
                f"precision={self.policy.name} draws the random bits of a step by its number: call "
                "precision.begin_step() before the step's first forward pass"
            )
        scaled = self._scaled(loss)
        with self.arithmetic.region():
            self._caster.backward(scaled, retain_graph, create_graph)

    def grad(
        self, loss: Tensor, inputs: Sequence[Tensor], *, create_graph: bool = False
    ) -> tuple[Tensor, ...]:
        """The gradients of a scalar `loss` to `inputs`, in the policy's output dtype (float32).

        As `torch.autograd.grad`, for gradient penalties: the loss is scaled before, and the
        gradients are unscaled afterwards, so small ones survive float16. With `create_graph` they
        can be part of a loss.
        """
        scaled = self._scaled(loss)
        start = torch.ones_like(scaled)
        with self.arithmetic.region(), self._caster.backward_region():
            gradients = torch.autograd.grad(scaled, inputs, start, create_graph=create_graph)
        wide = to_dtype(gradients, self._output_dtype)
        scale = self.loss_scale.tensor
        # By the reciprocal, as in PyTorch's recipe for gradient penalties with a GradScaler
        return wide if scale is None else tuple(g * (1 / scale) for g in wide)

    def _scaled(self, loss: Tensor) -> Tensor:
        self._has_scaled = True
        return self.loss_scale.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of `optimizer` by the loss scale, before its step.

        16-bit gradients become float32 ones, in which small values survive, until `update`.
        Nothing happens where the loss is not scaled.

        Raises:
            RuntimeError: they are unscaled already, or the optimizer has stepped.
        """
        self.loss_scale.unscale(optimizer, self._clip.combine)

    def step(
        self, optimizer: Optimizer, closure: Callable[[], Tensor] | None = None
    ) -> Tensor | None:
        """Unscale the gradients if `unscale` did not, clip them, update the parameters.

        With a `closure`, which computes loss and gradients anew and returns the loss, the optimizer
        steps as it is (L-BFGS): nothing is scaled or clipped.

        Warns once, in a single process, where gradients are divided and no loss was scaled before.

        Returns:
            1 where a gradient was not finite and the step was skipped, else 0, a float32 scalar on
            the device; None where steps are never skipped.

        Raises:
            RuntimeError: the optimizer has stepped in this iteration, or it was made before
                `prepare`, of parameters that the model no longer has.
        """
        self._check_parameters(optimizer)
        self._warn_of_unscaled(optimizer)
        self._stepped = True
        if closure is not None:
            optimizer.step(closure)  # type: ignore[arg-type]
        self.arithmetic.end_step()
        self._caster.end_step()
        with disable_casts():  # an optimizer may step inside the caller's own region
            skipped = None if closure else self.loss_scale.step(optimizer, self._clip)
        for guard in self._guards.values():
            guard.after(skipped)
        return skipped

    def _check_parameters(self, optimizer: Optimizer) -> None:
        if optimizer in self._checked:
            return
        self._checked.add(optimizer)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if (old := self._replaced.get(id(p))) is not None and old() is p:
                raise RuntimeError(
                    f"{type(optimizer).__name__} was made before precision.prepare(model), which "
                    "gave the model new parameters: make the optimizer after it"
                )

    def _warn_of_unscaled(self, optimizer: Optimizer) -> None:
        if self._has_scaled or self.loss_scale.tensor is None:
            return
        if dist.is_available() and dist.is_initialized():
            return  # in a pipeline only the process with the loss scales it
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            self._has_scaled = True  # warn once
            warnings.warn(NOT_SCALED, stacklevel=3)

    def update(self) -> None:
        """End an iteration, after the step of its last optimizer: the loss scale moves."""
        self._begun = self._stepped = False
        self.loss_scale.update()

    def buffer_overflows(self) -> list[BufferOverflow]:
        """The buffers that became non-finite in steps that were taken, since the last call.

        On CUDA it waits for those steps.
        """
        return [x for guard in self._guards.values() for x in guard.overflows()]

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: the number of the last step, and the loss scale's."""
        return {"steps": self.steps, "loss_scale": self.loss_scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`.

        Raises:
            ValueError: it is no such state, or that of another kind of loss scale.
        """
        if {*state} != {"steps", "loss_scale"}:
            raise ValueError(
                f"the state has {', '.join(map(str, state)) or 'nothing'}; legal: steps, "
                "loss_scale, as Precision.state_dict() gives it"
            )
        self.loss_scale.load_state_dict(state["loss_scale"])
        self.steps = int(state["steps"])


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer computes the loss itself, several times in a step."""
    return isinstance(optimizer, torch.optim.LBFGS)


def forward_backward(
    precision: Precision,
    forward: Callable[[Any], Any],
    loss: Callable[[Any, Any], Tensor],
    inputs: Any,
    batch: Any,
    share: float = 1.0,
    before_backward: Callable[[Tensor], None] | None = None,
    run: Callable[[Callable[[], tuple[Tensor, Any]]], tuple[Tensor, Any]] = lambda f: f(),
) -> tuple[Tensor, Any]:
    """Run a model and add the gradients of its loss to the parameters' `grad`.

    The training loop, `mprun numerics` and `mprun search-ops` all take their steps with it, so that
    what they measure is what is trained. `loss(output, batch)` is multiplied by `share`, the
    micro-batch's share of the step. `before_backward` gets it unscaled; an exception in it skips
    the backward pass. `run` runs the forward pass; several processes prepare for its backward pass
    there.

    Returns:
        The loss times `share`, unscaled and detached, and the output.
    """

    def forward_pass() -> tuple[Tensor, Any]:
        output = precision.forward(forward, inputs)
        return precision.loss(loss, output, batch, share=share), output

    value, output = run(forward_pass)
    if before_backward is not None:
        before_backward(value)
    precision.backward(value)
    return value.detach(), output


def call(model: nn.Module, inputs: Any) -> Any:
    """The output of `model` for a tensor, a tuple of arguments, or a mapping of named ones."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
