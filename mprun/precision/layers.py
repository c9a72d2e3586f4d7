"""The dtype of each module: what its parameters are stored in, and what it computes in.

`convert` brings a model to a device, a dtype and a memory format, by new `Parameter` objects: fake
tensors cannot be converted in place. Running statistics of norms stay in float32.

**Modules in a precision of their own** (`precision.layers`; its grammar: `records.layer_values`)
keep what does not survive 16 bits. A dtype means, in the mode around:

    casting none      parameters are stored in that dtype, and the layer computes in it
    casting autocast, parameters stay float32, and the layer computes in that dtype; fp32 switches
    op_lists          casts off inside it

A mode's name gives what the mode has; one optimizer rounds all 16-bit parameters alike. A layer
casts its floating inputs to what it computes in; its output stays. It holds for all modules inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from mprun.errors import hint
from mprun.precision._torch import BatchNorm, InstanceNorm, own_parameters
from mprun.precision.caster import LayerRegions, RegionFactory
from mprun.precision.nested import map_tensors
from mprun.precision.op_lists import disable_casts
from mprun.precision.policy import Policy, dtype_name, torch_dtype
from mprun.records.layer_values import (
    DTYPES,
    LAYER_MODES,
    in_rounding,
    layer_dtypes,
    layer_value,
    product_formats,
)
from mprun.records.mode_names import OWN_ALIASES, mode_row

T = TypeVar("T")
# In float32, a few numbers per layer: a variance above 65,504 overflows in float16, and a moving
# average that is rounded at each step stops up to 4 % before its mean in bfloat16
STATISTICS = ("running_mean", "running_var")


class ForwardWrapper:
    """A module's forward with code around it, to be put in place of `module.forward`.

    It is an object with the module in a field, not a closure. So a copy or pickle of the model has
    a copy of it that is bound to the copied module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.before = vars(module).get("forward")
        """What it wraps, another wrapper; None for the class's own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


@contextmanager
def forwards_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """At the end these modules have the forward again that they have now."""
    before = {module: vars(module).get("forward") for module in modules}
    try:
        yield
    finally:
        for module, forward in before.items():
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


class Float32Statistics(ForwardWrapper):
    """The forward of a norm layer with 16-bit parameters and float32 running statistics.

    PyTorch's kernels take 16-bit inputs with statistics and parameters in float32, but not with
    16-bit parameters. So those are widened for the call; the output has the input's dtype.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters: dict[str, Any] = own_parameters(self._module)
        stored = dict(parameters)
        parameters.update({k: None if p is None else p.float() for k, p in stored.items()})
        try:
            return super().__call__(*args, **kwargs)
        finally:
            parameters.update(stored)


def convert(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    memory_format: torch.memory_format = torch.contiguous_format,
    layers: Mapping[str, torch.dtype] | None = None,
) -> nn.Module:
    """`model` itself, with its parameters and buffers replaced; tied parameters stay tied.

    Args:
        device: where parameters and buffers go.
        dtype: of floating ones, except for running statistics (`keeps_wide_statistics`).
        memory_format: of those with four dimensions.
        layers: module names to another dtype, for the module and all inside it.

    Raises:
        ValueError: `layers` gives one tied parameter two dtypes.
    """
    converted: dict[int, Tensor] = {}

    def to_target(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        target = dtype if tensor.is_floating_point() else tensor.dtype
        if id(tensor) not in converted:
            new = tensor.detach().to(device, target)
            if new.dim() == 4:
                # `contiguous` keeps the strides of a tensor with one channel, which is in both
                # formats; then convolutions would give their outputs in the other one.
                new = new.to(memory_format=memory_format)
            if isinstance(tensor, nn.Parameter):
                new = _with_hooks_of(tensor, nn.Parameter(new, requires_grad=tensor.requires_grad))
            converted[id(tensor)] = new
        elif converted[id(tensor)].dtype != target:
            raise ValueError(f"precision.layers: '{name}' is tied to a parameter of another dtype")
        return converted[id(tensor)]

    for path, module in model.named_modules():
        wanted = dtype_of(path, layers or {}, dtype)
        every = {"recurse": False, "remove_duplicate": False}  # each name of a tied one too
        narrow = wanted != torch.float64 and keeps_wide_statistics(module)
        wide = torch.float32 if narrow else wanted
        for name, tensor in [*module.named_parameters(**every), *module.named_buffers(**every)]:
            target = wide if name in STATISTICS else wanted
            setattr(module, name, to_target(tensor, target, f"{path}.{name}"))
        # A model may be prepared twice
        own_forward = isinstance(vars(module).get("forward"), Float32Statistics)
        if wide != wanted and not own_forward:
            module.forward = Float32Statistics(module)
        if isinstance(module, nn.RNNBase):
            # cuDNN takes an RNN's weights as one range of memory, which new parameters are not
            module.flatten_parameters()
    return model


def _with_hooks_of(old: nn.Parameter, new: nn.Parameter) -> nn.Parameter:
    """`new` with the attributes and the gradient hooks of `old`, as `model.to` keeps them.

    Both share the hooks: the handle that `register_hook` gave removes them.
    """
    for name, value in vars(old).items():  # a fake one's own name its device: not those
        vars(new).setdefault(name, value)
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    return new


def keeps_wide_statistics(module: nn.Module) -> bool:
    """Whether `module` has running statistics, and a forward of PyTorch's that takes float32 ones.

    A subclass with a forward of its own may compute with them otherwise, and instance norm's kernel
    without weights averages statistics in its input's dtype: theirs are stored as their parameters.
    """
    forward = type(module).forward
    known = forward is BatchNorm.forward or (
        forward is InstanceNorm.forward and module.weight is not None
    )
    return known and module.running_mean is not None


def dtype_of(path: str, layers: Mapping[str, T], default: T) -> T:
    """The dtype at `path`, a module or parameter: its own in `layers`, or the nearest parent's."""
    while path:
        if path in layers:
            return layers[path]
        path = path.rpartition(".")[0]
    return default


def accumulate_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep the gradients of 16-bit parameters in `dtype` where that is wider than their own."""
    for p in model.parameters():
        if p.requires_grad and p.dtype.itemsize < dtype.itemsize:
            # By this field autograd takes a gradient of another dtype
            p.grad_dtype = dtype


LAYER_DTYPES = {*map(torch_dtype, DTYPES.values())}  # What a layer can compute in


class LayerPrecision(NamedTuple):
    """What a layer stores its parameters in and what it computes in."""

    stored: torch.dtype
    compute: torch.dtype

    @property
    def casts(self) -> bool:
        """Whether ops inside are cast, rather than run in the dtype of the parameters."""
        return self.stored != self.compute


def layer_precision(value: str, casting: str) -> LayerPrecision | None:
    """What a value of `precision.layers` means in a mode with that casting; None: as the mode.

    Raises `ValueError` if it is no value that a layer can have.
    """
    try:
        dtypes = layer_dtypes(layer_value(value), casting)
    except ValueError as error:
        raise ValueError(f"precision.layers: a layer cannot be in {error}") from None
    return None if dtypes is None else LayerPrecision(*map(torch_dtype, dtypes))


def layer_precisions(named: Mapping[str, str], policy: Policy) -> dict[str, LayerPrecision]:
    """`layer_precision` of each module of `named` under `policy` that has one of its own.

    Raises `ValueError` as it does, or if a layer is to round every result in another mode.
    """
    for name, value in named.items():
        rounds_all = value in LAYER_MODES and mode_row(value)["rounding_scope"] == "all"
        if rounds_all and policy.rounding_scope != "all":
            raise ValueError(
                f"precision.layers: {name}: {value} rounds every result stochastically, which one "
                f"layer of precision={policy.name} cannot; legal: half_sr where the mode rounds "
                f"stochastically, precision={value}"
            )
    precisions = {name: layer_precision(value, policy.casting) for name, value in named.items()}
    return {name: layer for name, layer in precisions.items() if layer is not None}


def with_layer_formats(policy: Policy, values: Iterable[str]) -> Policy:
    """`policy` with `gemms="layers"` if some of these values name formats of products.

    Raises `ValueError` if the mode computes or casts ops in a way that these do not follow.
    """
    if not any(product_formats(value) for value in values) or policy.gemms != "none":
        return policy
    try:
        return replace(policy, gemms="layers")
    except ValueError as error:
        raise ValueError(f"precision.layers with formats of products: {error}") from None


def check_rounding(named: Mapping[str, str], policy: Policy) -> None:
    """Raise `ValueError` unless the one optimizer of `policy` rounds as the layers' modes do."""
    rounding = "stochastic" if policy.rounding == "stochastic" else "nearest"
    rounds = {"nearest": "to nearest", "stochastic": "stochastically"}
    for name, value in named.items():
        legal = in_rounding(value, rounding)
        if legal != value:
            raise ValueError(
                f"precision.layers: {name}: {value} rounds its parameters "
                f"{rounds[mode_row(value)['rounding']]}, and precision={policy.name} rounds what "
                f"it stores {rounds[rounding]}: one optimizer rounds all of them alike; legal: "
                f"{legal}, or another precision.rounding"
            )


def resolve(model: nn.Module, layers: Mapping[str, str]) -> dict[str, str]:
    """Module name to value, for every module that a key of `layers`, a name or a glob, fits.

    An exact name wins over globs. Raises `ValueError` if a key fits no module, or two globs fit
    one.
    """
    layers = {key: OWN_ALIASES.get(value, value) for key, value in layers.items()}
    names = [name for name, _ in model.named_modules() if name]
    named = {key: dtype for key, dtype in layers.items() if key in names}
    for name in (n for n in names if n not in layers):
        fitting = [key for key in layers if key not in names and fnmatchcase(name, key)]
        if len(fitting) > 1:
            raise ValueError(f"precision.layers: {' and '.join(fitting)} both fit module '{name}'")
        if fitting:
            named[name] = layers[fitting[0]]
    for key in layers:
        if key not in names and not any(fnmatchcase(n, key) for n in names):
            raise ValueError(
                f"precision.layers: no module is named '{key}'{hint(key, names)}; "
                f"legal: {', '.join(names)}"
            )
    return named


class LayerRow(NamedTuple):
    """A module with parameters or a precision of its own, and its dtypes by PyTorch's names."""

    name: str
    kind: str
    parameters: str  # What they are stored in; "none" without parameters
    compute: str


def layer_rows(model: nn.Module, named: Mapping[str, str], policy: Policy) -> list[LayerRow]:
    """The dtypes of a prepared model's layers; `named` is what `resolve` gives."""
    others = LayerPrecision(torch.float32, torch_dtype(policy.compute_dtype))
    precisions = layer_precisions(named, policy)
    rows = []
    for name, module in model.named_modules():
        own = next((p for p in module.parameters(recurse=False) if p.is_floating_point()), None)
        if own is not None or (name in named and not any(True for _ in module.parameters())):
            stored = "none" if own is None else dtype_name(own.dtype)
            compute = dtype_name(dtype_of(name, precisions, others).compute)
            rows.append(LayerRow(name, type(module).__name__, stored, compute))
    return rows


def keep_layers(
    model: nn.Module,
    named: Mapping[str, LayerPrecision],
    stored: torch.dtype | None,
    layer_region: LayerRegions,
) -> None:
    """Make the layers of a converted model compute in their precision.

    `stored` is what all other parameters are stored in, where nothing casts; None where a caster
    decides. `layer_region` gives regions in which ops are cast to a dtype; float32: nothing is
    cast.
    """
    casts = stored is None or any(layer.casts for layer in named.values())
    # A region costs time at each call; where nothing is cast there is none to switch off
    uncast: RegionFactory = disable_casts if casts else nullcontext
    for path, module in model.named_modules():
        around = LayerPrecision(stored, stored) if stored is not None else None
        layer = dtype_of(path, named, around)
        if path in named:
            layer = named[path]
            region = layer_region(layer.compute) if layer.casts else uncast
            module.forward = InDtype(module, region, layer.compute)
        elif layer is not None and not layer.casts and (stored or layer.stored != torch.float32):
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if any(x.is_floating_point() for x in own):
                module.forward = InDtype(module, nullcontext, layer.stored)


@contextmanager
def computing_in(
    model: nn.Module, named: Mapping[str, torch.dtype], layer_region: LayerRegions
) -> Iterator[None]:
    """Inside, modules compute in a dtype of their own where a caster decides; parameters stay.

    `layer_region` is `Caster.layer_region`.
    """
    modules = {model.get_submodule(name): dtype for name, dtype in named.items()}
    with forwards_restored(modules):
        for module, dtype in modules.items():
            module.forward = InDtype(module, layer_region(dtype), dtype)
        yield


def to_layer(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in a layer's dtype; function modes see that it is not a cast of the model's own code."""
    if has_torch_function_unary(x):
        return handle_torch_function(to_layer, (x,), x, dtype)
    return x.to(dtype)


# `Table.make` reads it: op lists report this cast under that name, and do not cast again
to_layer.cast_rule = "layer policy"  # type: ignore[attr-defined]


class InDtype(ForwardWrapper):
    """A module's forward in a region, with its floating inputs cast to a dtype."""

    def __init__(self, module: nn.Module, region: RegionFactory, dtype: torch.dtype) -> None:
        super().__init__(module)
        self._region, self._dtype = region, dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(self._cast, (args, kwargs))
        with self._region():
            return super().__call__(*args, **kwargs)

    def _cast(self, x: Tensor) -> Tensor:
        # float64 stays, because it is used on purpose, and so do integers
        return to_layer(x, self._dtype) if x.dtype in LAYER_DTYPES else x
