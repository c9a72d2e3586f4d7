"""Private PyTorch interfaces that mprun uses, behind small functions.

PyTorch may change these names in any release. Where a public interface does the same, mprun uses
that one. The rest is here, but for what one package alone uses: `precision/_torch_switches.py` and
`watch/_torch_fakes.py`. It was tried on PyTorch 2.11 and 2.15: an interface that changes breaks
these files and no other. `tests/precision/test_torch_private.py` tries most of them and names what
broke in which version; it also checks that no other module of mprun uses a private name.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import currentframe
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses import fake_tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [  # what is PyTorch's own; the functions below are mprun's
    "BatchNorm",
    "InstanceNorm",
    "OpOverload",
    "OpOverloadPacket",
    "StorageWeakRef",
    "is_traceable_wrapper_subclass",
    "tree_leaves",
    "tree_map",
]

# Where PyTorch keeps its functions that are written in C++
FUNCTION_NAMESPACES: tuple[Any, ...] = (torch._C._VariableFunctions, torch._C._nn)


class DispatchMode(TorchDispatchMode):
    """PyTorch's, without the import of the compiler at the first op that it sees.

    Dynamo must not trace `__torch_dispatch__`, so PyTorch imports it (1.8 s) to disable it there.
    Here that is done when a mode is entered in a process that has imported it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Any:
        if "torch._dynamo" in sys.modules:
            mode: Any = type(self)
            _not_traced(mode)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self


@functools.cache
def _not_traced(mode: Any) -> None:
    mode.__torch_dispatch__ = _disable_dynamo(mode.__torch_dispatch__, recursive=True)


class EagerOptimizer(Optimizer):
    """A base of optimizers whose methods do not import the compiler, as `eager_optimizer`'s."""

    add_param_group: Any = inspect.unwrap(Optimizer.add_param_group)
    state_dict: Any = inspect.unwrap(Optimizer.state_dict)
    load_state_dict: Any = inspect.unwrap(Optimizer.load_state_dict)


@functools.cache
def eager_optimizer(kind: type[Optimizer]) -> type[Optimizer]:
    """One of PyTorch's optimizer classes, without the import of the compiler.

    `torch.optim` imports `torch._dynamo` when an optimizer is made, steps or zeroes gradients (1.5
    s where `import torch` takes 2). Here the methods themselves are called, with the same bits;
    code that is compiled must not contain them. Its `step` is not differentiable.
    """
    names = ("add_param_group", "state_dict", "load_state_dict")
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    methods["zero_grad"] = zero_grad
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    about = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**about, **methods})


def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """As PyTorch's method, which takes many times as long in the common case, `set_to_none`."""
    if not set_to_none:
        inspect.unwrap(Optimizer.zero_grad)(optimizer, set_to_none)
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None


def without_compiled_code() -> AbstractContextManager[None]:
    """Inside, what `torch.compile` was called on runs op by op.

    The compiler is not imported for it (1.5 s): without it there is no compiled code.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    eager: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return eager


def in_backward() -> bool:
    """Whether the calling thread is inside autograd's backward pass."""
    return backward_node() is not None


def in_autograd_function() -> bool:
    """Whether the calling thread is inside the forward pass of a `torch.autograd.Function`.

    Gradients are off there, also where the function has a backward pass.
    """
    named = (x for x in calling_frames() if x.f_code.co_name == "forward" and x.f_code.co_argcount)
    first = (x.f_locals.get(x.f_code.co_varnames[0]) for x in named)
    return any(isinstance(x, FunctionCtx) for x in first)


def is_transformed(x: Tensor) -> bool:
    """Whether a tensor is seen from inside of `torch.func`: `vmap` hides a dimension of it."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def in_transform() -> bool:
    """Whether code runs inside of `torch.func`: of `vmap`, `grad`, `jvp`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_zero(x: Tensor) -> bool:
    """Whether a tensor is zeros without memory, as forward-mode derivatives make them."""
    return bool(x._is_zerotensor())


def has_zeros(func: OpOverload, args: Any) -> bool:
    """Whether an op makes or reads such zeros, or outlines of them: there are no numbers to see."""
    if any(isinstance(x, Tensor) and (is_zero(x) or x.is_meta) for x in args):
        return True
    return func is torch.ops.aten._efficientzerotensor.default


def function_modes() -> list[TorchFunctionMode]:
    """The function modes calls of this thread go through, the outermost first.

    A thread that autograd runs a device's backward pass on has those of the thread that called it.
    """
    modes: list[TorchFunctionMode] = _get_current_function_mode_stack()
    return modes


@contextmanager
def recurrent_layers_take_any_dtype() -> Iterator[None]:
    """Inside, nn.LSTM and its kin accept inputs of another dtype than their weights.

    They refuse them unless autocast is on for some device. Here it is one that PyTorch has no
    kernels for: nothing is cast by it.
    """
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(_NO_DEVICE):
        yield
        return
    torch.set_autocast_enabled(_NO_DEVICE, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(_NO_DEVICE, False)


_NO_DEVICE = "hpu"  # Gaudi: without Habana's package there are no kernels to cast for


def backward_node() -> int | None:
    """The number of the autograd node that runs in the calling thread, None outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def next_node() -> int:
    """The number the next autograd node of the calling thread will get."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def calling_frames() -> Iterator[FrameType]:
    """The frames of the calling thread, the innermost first."""
    frame = currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def in_recomputation() -> bool:
    """Whether the calling thread is inside a backward pass that recomputes a forward pass."""
    if not in_backward():
        return False
    for frame in calling_frames():
        # Both kinds of checkpointing run the forward pass again in a function of that file
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        if is_backward_call(frame.f_code):  # the innermost backward pass
            return False
    return False


def no_dispatch() -> AbstractContextManager[None]:
    """A region whose ops go to PyTorch's kernels past all dispatch modes and tensor subclasses."""
    region: AbstractContextManager[None] = torch._C._DisableTorchDispatch()
    return region


def dispatch_modes() -> list[TorchDispatchMode]:
    """The dispatch modes ops of the calling thread go through, the outermost first."""
    return _get_current_dispatch_mode_stack()


@functools.cache
def kernel_key(op: OpOverload, device_type: str, backend: bool) -> Any:
    """The dispatch key of an op's kernel that consists of other ops; None without one.

    A composite kernel does not count where the device (cpu or cuda) has one of its own
    (`silu_backward`). `backend`: a kernel below autograd counts, which an op has besides composite
    ones.
    """
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    own = "Meta" if device_type == "meta" else device_type.upper()
    # "Implicit" kernels are made of differentiable ops, "explicit" ones have a formula of their own
    keys = [] if has(op.name(), own) else ["CompositeImplicitAutograd"]
    if backend:
        keys += [own, "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"]
    for key in keys:
        if has(op.name(), key):
            return getattr(torch._C.DispatchKey, key)
    return None


def autocast_has(name: str) -> bool:
    """Whether autocast in this version of PyTorch decides on the ATen op of that name."""
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        return any(has(f"aten::{name}", key) for key in ("AutocastCPU", "AutocastCUDA"))
    except RuntimeError:  # there is no such op
        return False


def call_kernel(op: OpOverload, key: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the kernel of an op for a dispatch key; the ops that it calls go to dispatch modes."""
    return op._op_dk(key, *args, **kwargs)


def aten_packets(names: str) -> frozenset[OpOverloadPacket]:
    """The ATen ops of these names, separated by blanks, all overloads of each."""
    return frozenset(getattr(torch.ops.aten, name) for name in names.split())


def schema_of(op: OpOverload) -> Any:
    """The schema of an op: names, types and aliases of its arguments and results."""
    return op._schema


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dictionary of a module's own parameters; what is put into it need not be a parameter."""
    return module._parameters


def compiling_s() -> float:
    """Seconds that PyTorch's compiler has taken in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    spent_ns = getattr(utils, "cumulative_time_spent_ns", {})
    own = ("entire_frame_compile", "entire_backward_compile")
    return float(sum(spent_ns.get(name, 0) for name in own)) / 1e9


@contextmanager
def parameters_replaced(model: nn.Module, by: Mapping[Any, nn.Parameter]) -> Iterator[None]:
    """Inside, each parameter of `model` that `by` maps to another one is replaced by it."""
    places = [
        (own, name, p)
        for own in map(own_parameters, model.modules())
        for name, p in own.items()
        if p is not None and p in by
    ]
    try:
        for own, name, p in places:
            own[name] = by[p]
        yield
    finally:
        for own, name, p in places:
            own[name] = p


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The dictionary of a module's own buffers."""
    return module._buffers


def unscale_and_check(optimizer: Optimizer, scale: Tensor) -> Tensor:
    """Divide the float32 gradients by a scalar, in place; 1 where one was not finite, else 0.

    The kernel and the reciprocal are GradScaler's, so the bits are too.
    """
    overflow = torch.zeros((), dtype=torch.float32, device=scale.device)
    gradients = []
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()  # else an overflow of a row's sum is not seen
            gradients.append(p.grad._values())
        elif p.grad is not None:
            gradients.append(p.grad)
    if gradients:
        inverse = scale.reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)
    return overflow


def step_unless(optimizer: Optimizer, overflow: Tensor) -> None:
    """`optimizer.step()` where `overflow` (float32 scalar) is 0.

    Fused optimizers on CUDA read the flag on the device, so the host does not wait for it. A fake
    flag has no value: the step is taken.
    """
    if overflow.device.type == "cuda" and getattr(optimizer, "_step_supports_amp_scaling", False):
        # The attributes by which GradScaler hands them to a fused optimizer
        optimizer.grad_scale, optimizer.found_inf = None, overflow  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    elif is_fake(overflow) or not overflow.item():
        optimizer.step()


def onednn_takes(dtype: torch.dtype) -> bool | None:
    """Whether PyTorch hands matmuls in a 16-bit dtype on a CPU to oneDNN; None: unknown.

    It asks oneDNN, so that a limit on its instructions counts.
    """
    short = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    try:
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{short}_supported")())
    except (AttributeError, RuntimeError):  # PyTorch built without oneDNN
        return None


def onednn_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Rows [N, K] times the transpose of [M, K], plus a bias, in float32, by oneDNN."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return product


@functools.cache
def onednn_has_lstm(dtype: torch.dtype) -> bool:
    """Whether autocast on the CPU can train an LSTM in a dtype: tried on one of a single number."""
    try:
        # With gradients on it is oneDNN's primitive for training, which exists for fewer dtypes.
        with outside_of_modes(), torch.enable_grad(), torch.autocast("cpu", dtype):
            x, weights = torch.zeros(1, 1, 1), [torch.zeros(4, 1), torch.zeros(4, 1)]
            weights += [torch.zeros(4), torch.zeros(4)]
            torch.lstm(x, (x, x), weights, True, 1, 0.0, True, False, False)
    except RuntimeError:
        return False
    return True


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made the module, or its own `compile` was called."""
    # The field of the wrapper that `torch.compile` makes
    return compiles_itself(module) or hasattr(module, "_orig_mod")


def original_module(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped; the module itself where it made none."""
    original = getattr(module, "_orig_mod", module)
    assert isinstance(original, nn.Module)
    return original


def compiles_itself(module: nn.Module) -> bool:
    """Whether `module.compile()` was called, which compiles the module's hooks, too."""
    return getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def on_scaler_step(callback: Callable[[Optimizer], None]) -> Iterator[None]:
    """Inside, `callback` gets the optimizer after each `torch.amp.GradScaler.step`.

    A scaler does not call the optimizer whose gradients overflowed, and has no hooks: the method
    of the class is replaced until the end.
    """
    original = torch.amp.GradScaler.step

    def step(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = original(self, optimizer, *args, **kwargs)
        callback(optimizer)
        return result

    with attribute_replaced(torch.amp.GradScaler, "step", step):
        yield


@contextmanager
def attribute_replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, another function is the attribute `name` of a module or class."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(function))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def on_loss(callback: Callable[[Tensor], None]) -> Iterator[None]:
    """Inside, `callback` gets each loss before its backward pass, without a loss scale.

    The loss is the tensor that `backward` is called on. In a loop with a `GradScaler` that tensor
    is scaled, and may be infinite where the loss is not: there it is what the scaler scales.
    """
    backward, scale = torch.autograd.backward, torch.amp.GradScaler.scale
    uses_scaler = False

    def noted(losses: Any) -> None:
        for loss in losses if isinstance(losses, list | tuple) else (losses,):
            if isinstance(loss, Tensor):
                callback(loss)

    def going_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not uses_scaler:
            noted(tensors)
        return backward(tensors, *args, **kwargs)

    def scaling(self: Any, outputs: Any) -> Any:
        nonlocal uses_scaler
        if self.is_enabled():
            uses_scaler = True
            noted(outputs)
        return scale(self, outputs)

    replaced = attribute_replaced(torch.autograd, "backward", going_backward)
    with replaced, attribute_replaced(torch.amp.GradScaler, "scale", scaling):
        yield


# The dictionaries in which nn.Module stores its hooks
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOK_FLAGS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


@contextmanager
def copied_without_hooks(model: nn.Module, package: str) -> Iterator[None]:
    """Inside, copies and pickles of a model leave out hooks that a package defines."""

    def is_own(hook: object) -> bool:
        # With the dot, so that another package whose name only begins alike is none
        return f"{getattr(hook, '__module__', '')}.".startswith(f"{package}.")

    def without(state: Any) -> Any:
        if isinstance(state, tuple):
            return tuple(map(without, state))
        if not isinstance(state, dict) or _HOOKS[0] not in state:
            return state
        rows = {name: state[name] for name in (*_HOOKS, *_HOOK_FLAGS) if name in state}
        own = {key for row in rows.values() for key, hook in row.items() if is_own(hook)}
        rest = {name: value for name, value in state.items() if name != "__reduce_ex__"}
        for name, row in rows.items():
            rest[name] = OrderedDict((key, x) for key, x in row.items() if key not in own)
        return rest

    def reduces(module: nn.Module) -> Callable[[Any], Any]:
        return lambda protocol: without(type(module).__reduce_ex__(module, protocol))

    modules = [module for module in model.modules() if "__reduce_ex__" not in vars(module)]
    for module in modules:  # pickle and copy ask the object, before its class
        vars(module)["__reduce_ex__"] = reduces(module)
    try:
        yield
    finally:
        for module in modules:
            vars(module).pop("__reduce_ex__", None)


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has a shape and no data (`FakeTensorMode`)."""
    return isinstance(tensor, fake_tensor.FakeTensor)


@contextmanager
def load_hooks_run(optimizer: Optimizer, state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`state` as the hooks before `load_state_dict` leave it; they do not run again inside."""
    hooks = optimizer._optimizer_load_state_dict_pre_hooks
    for hook in hooks.values():
        changed = hook(optimizer, state)
        state = state if changed is None else changed
    optimizer._optimizer_load_state_dict_pre_hooks = OrderedDict()
    try:
        yield state
    finally:
        optimizer._optimizer_load_state_dict_pre_hooks = hooks


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Inside, what is computed is seen by no dispatch or function mode, and not by autograd."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


def node_number(node: Node) -> int | None:
    """The number autograd gave a node as it was made; None for a parameter's, which has none."""
    number = int(node._sequence_nr())
    # The node of a parameter has the largest number, 2^64 - 1, so that it runs as soon as it can
    return None if number > 2**63 else number


def storage_key(x: Tensor) -> int:
    """A number of a tensor's storage: the same for views, never that of another live storage."""
    return int(x.untyped_storage()._cdata)  # its address in C++


def write_count(x: Tensor) -> int:
    """How often the memory of a tensor was written to; 0 for an inference tensor."""
    return 0 if x.is_inference() else int(x._version)


def viewed(x: Tensor) -> Tensor:
    """The tensor that `x` is a view of; `x` itself where it is none."""
    return x if x._base is None else x._base


def op_name(op: OpOverload) -> str:
    """ATen's name of an op, without the overload: `addmm`."""
    return str(op.overloadpacket.__name__)


# The op with which a loss scaler divides gradients and checks for overflows; its arguments are the
# gradients, a flag that becomes 1 where one is not finite, and the inverse of the scale
SCALER_CHECK: Any = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def is_backward_call(code: CodeType) -> bool:
    """Whether a stack frame with this code starts a backward pass."""
    # All of torch.autograd's functions start the engine through this one
    return code.co_name == "_engine_run_backward"


def local_tensor(x: Tensor) -> Tensor:
    """The part of a sharded tensor on this device; `x` itself where it is not sharded."""
    local: Tensor = getattr(x, "_local_tensor", x)  # of a DTensor
    return local


def stored_values(x: Tensor) -> Tensor:
    """The values that a sparse tensor stores; `x` itself where it is strided."""
    if x.layout is torch.sparse_coo:
        return x._values()
    return x if x.layout is torch.strided else x.values()


def end_workers(batches: object) -> None:
    """End the processes that an iterator of a `DataLoader` reads with, if it has any, at once.

    They end without it too, but only when the last reference to the iterator is gone, and the
    traceback of an error is one.
    """
    getattr(batches, "_shutdown_workers", lambda: None)()


def started(loader: Iterable[Any]) -> Iterator[Any]:
    """`iter(loader)`; where a worker process does not start, those before it are ended.

    PyTorch's own ending of a half-made iterator fails, and leaves a traceback on the terminal.
    """
    try:
        return iter(loader)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None:
            made: Any = trace.tb_frame.f_locals.get("self")
            # The field that PyTorch's own ending reads, and that a half-made iterator lacks
            if hasattr(made, "_shutdown_workers") and not hasattr(made, "_workers_status"):
                made._workers_status = [True] * len(made._workers)
                end_workers(made)
            trace = trace.tb_next
        raise


GraphPass = Callable[[Any], None]  # Changes a graph of ops


@contextmanager
def compiled_anew(
    first: GraphPass, last: GraphPass, on_code: Callable[[str], None], rounds_as_eager: bool
) -> Iterator[None]:
    """Inside, `torch.compile` compiles everything again, with its own options; nothing of it stays.

    Of Inductor's graphs `first` changes each before all passes, while forward and backward are one,
    and `last` before its code is made, ahead of passes of others; `on_code` gets that code.
    """
    import torch._dynamo.config as of_dynamo
    import torch._functorch.config as of_autograd
    import torch._inductor.config as of_inductor
    from torch._inductor.graph import GraphLowering

    def with_others(own: GraphPass, others: Any) -> list[Any]:
        given = others if isinstance(others, list | tuple) else [others]
        return [own, *(x for x in given if x is not None)]

    passes: dict[str, Any] = {
        name: with_others(own, getattr(of_inductor, name))
        for name, own in (("joint_custom_pre_pass", first), ("post_grad_custom_pre_pass", last))
    }
    rounds = rounds_as_eager or of_inductor.emulate_precision_casts
    before = GraphLowering.save_output_code
    torch.compiler.reset()
    GraphLowering.save_output_code = on_code
    try:
        with (
            # a graph from a cache has gone through no pass
            of_inductor.patch(
                passes | {"fx_graph_cache": False, "emulate_precision_casts": rounds}
            ),
            of_autograd.patch(enable_autograd_cache=False),
            # the number of a module's call is part of its code
            of_dynamo.patch(recompile_limit=1000, accumulated_recompile_limit=10000),
        ):
            yield
    finally:
        GraphLowering.save_output_code = before
        torch.compiler.reset()
