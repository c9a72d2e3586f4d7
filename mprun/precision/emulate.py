"""16-bit arithmetic around float32: every result rounded, forward and backward.

Hardware with stochastic rounding (Graphcore's IPU) applies it where a result leaves the arithmetic
unit. The output of a 16-bit kernel is already rounded to nearest. So each op on 16-bit tensors is
computed in float32, on inputs that are widened exactly, and mprun rounds its result: stochastically
during a training step, to nearest in evaluation, so that a model has one test accuracy. Between ops
all is really 16 bits. Inside an op sums are float32, unless the partials are float16.

The format and the width of the sums are emulated, not the bits of some hardware. Ops that only move
or select numbers are exact, and not rounded. Mixed dtypes are promoted or refused like in PyTorch's
kernels (`products.py`).

**Copies** let emulation widen the same numbers once: the loop that rounds a result writes it twice,
as 16 bits and as float32, which the next op reads. It takes six bytes a number, not two.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

from mprun.precision._torch import (
    DispatchMode,
    aten_packets,
    dispatch_modes,
    in_recomputation,
    is_zero,
    kernel_key,
    schema_of,
    storage_key,
    tree_map,
    write_count,
)
from mprun.precision.arithmetic import Arithmetic, OpSubstitution
from mprun.precision.fused import FUSED, fused_kernels
from mprun.precision.partials import BLOCK, SUPPORTED, blocked
from mprun.precision.products import (
    COMMUNICATION,
    CONVOLUTION_BACKWARD,
    CONVOLUTIONS,
    FAST_PATHS,
    LOW,
    NORMS,
    UNTOUCHED,
    is_float32,
    leaves,
    mapped,
    opened,
    recorded_name,
    result_dtype,
    unfused,
    variants,
    widen,
    written,
    written_arguments,
)
from mprun.precision.random_bits import BLOCK as MOST
from mprun.precision.random_bits import Key, key
from mprun.precision.rounding import round_nearest, round_twice, stochastic

aten = torch.ops.aten

CONVOLUTION_OPS = frozenset({*CONVOLUTIONS, *CONVOLUTION_BACKWARD})
RECOMPUTED = (
    "torch.utils.checkpoint recomputes stochastically rounded activations with other random bits: "
    "the gradients are not those of the forward pass; use "
    "checkpoint(..., use_reentrant=False, context_fn=mprun.precision.same_rounding)"
)
SITE = 2**32  # Separates the random bits of results from those of optimizer updates

CAST = next(iter(aten_packets("_to_copy"))).default
ADDMM_ACTIVATION = next(iter(aten_packets("_addmm_activation"))).default
OPENED = FAST_PATHS | {"_trilinear", "conv_tbc", "conv_tbc_backward"}
# In-place ops and those with `out`, each with the op that returns what they write.
VARIANTS: dict[Any, Any] = {
    variant: op for op in SUPPORTED for variant in variants(op) if variant not in SUPPORTED
}


ATTRIBUTE = "_mprun_wide_copy"  # The attribute of a storage that holds its copy


class _WideCopy(NamedTuple):
    wide: Tensor  # As many float32 numbers as the storage has of 16 bits, in the same order
    writes: int
    owner: WideCopies
    generation: int


class WideCopies:
    """The copies that one arithmetic made; views share that of their storage.

    One is valid while nothing was written to the tensor: PyTorch counts writes, and emulation drops
    the copy of what an op writes to, also through `Tensor.data`, which has a count of its own. And
    it is valid within its generation, one training step or one region outside of a step: kernels
    that PyTorch does not know of write to parameters between two steps.
    """

    def __init__(self) -> None:
        self._generation = 0

    def invalidate(self) -> None:
        """A new generation begins."""
        self._generation += 1

    def keep(self, low: Tensor, wide: Tensor) -> None:
        """`wide` has the values of `low`, its strides, and a storage of its own; both are whole."""
        # At the storage, so that views share the copy, and it lives no longer
        copy = _WideCopy(wide, write_count(low), self, self._generation)
        setattr(low.untyped_storage(), ATTRIBUTE, copy)

    def get(self, low: Tensor) -> Tensor | None:
        """The copy of `low`, not to be written to, laid out as `low.float()` would be, or None."""
        storage = low.untyped_storage()
        copy: _WideCopy | None = getattr(storage, ATTRIBUTE, None)
        if copy is None or copy.owner is not self or copy.generation != self._generation:
            return None
        wide = copy.wide
        # A storage that is resized itself, as FSDP does, counts no write
        resized = wide.numel() * low.element_size() != storage.nbytes()
        if resized or copy.writes != write_count(low) or not is_dense(low):
            return None
        if wide.shape == low.shape and wide.stride() == low.stride():
            return wide
        return wide.as_strided(low.size(), low.stride(), low.storage_offset())

    def take(self, low: Tensor) -> Tensor | None:
        """The copy of a whole `low` for the caller alone, which may write to it, or None.

        It is no copy any more.
        """
        wide = self.get(low) if is_whole(low) else None
        if wide is not None:
            forget(low)
        return wide


def forget(low: Tensor) -> None:
    """Drop the copy of what shares memory with `low`, if there is one."""
    vars(low.untyped_storage()).pop(ATTRIBUTE, None)


def is_dense(x: Tensor) -> bool:
    """Whether the numbers of `x` lie side by side in some order, without gaps or overlaps."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def is_whole(x: Tensor) -> bool:
    """Whether `x` is dense and all of its storage."""
    filled = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return filled and int(x.storage_offset()) == 0 and is_dense(x)


def is_plain(x: Tensor) -> bool:
    """Whether `x` is a CPU tensor with memory of its own, which a C kernel can read."""
    kind = type(x) is Tensor or type(x) is torch.nn.Parameter
    return kind and x.is_cpu and x.layout is torch.strided and not is_zero(x)


class Emulated16(Arithmetic):
    """A region in which mprun rounds 16-bit results, stochastically or to nearest.

    What overflows becomes infinity, or saturates; `partials` is what matmuls and convolutions
    accumulate in, float32 or float16; `seed` is that of the random bits.
    """

    execution = "emulated"

    def __init__(self, rounding: str, overflow: str, partials: str, seed: int) -> None:
        super().__init__()
        how = {"stochastic": "stochastically", "nearest": "to nearest"}[rounding]
        reason = f"emulated: computed in float32, each result rounded {how} to 16 bits"
        self.substitutions = (OpSubstitution("*", "float32", reason),)
        if partials == "float16":
            self.substitutions += partials_substitutions()
        everywhere = {"rounding": "stochastic", "rounding_scope": "all"}
        self.columns = {
            **(everywhere if rounding == "stochastic" else {}),
            "overflow": overflow,
            "partials_dtype": partials,
        }
        self._stochastic = rounding == "stochastic"
        self._overflow = overflow
        self._partials = partials == "float16"
        self._seed = seed
        self._step: int | None = None
        """The training step, None outside of one."""
        self._last: int | None = None
        self.copies = WideCopies()
        self.site = 0
        """Results of the step that were rounded so far."""
        self.warns = True
        """Whether to warn of activations that are recomputed with other bits."""

    def begin_step(self, step: int) -> None:
        self._step, self._last, self.site = step, step, 0
        self.copies.invalidate()

    def end_step(self) -> None:
        self._step = None
        self.copies.invalidate()

    def resume_step(self) -> None:
        self._step = self._last
        self.copies.invalidate()

    def round(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`x` rounded to `dtype`."""
        return self._rounded(x.float(), dtype, self._next_key())  # also a float64

    def _rounded(self, x: Tensor, dtype: torch.dtype, bits: Key | None) -> Tensor:
        if bits is None:
            return round_nearest(x, dtype, self._overflow)
        return stochastic(x, dtype, bits, self._overflow)

    def round_and_keep(self, x: Tensor, dtype: torch.dtype, ours: bool) -> Tensor:
        """As `round`; a float32 copy of the result is kept where that costs no pass of its own.

        `ours`: nobody else needs the memory of `x`, if `x` is all of it: the copy takes it.
        """
        # An index of random bits has 31 bits, so one key serves as many numbers as `MOST`
        if not is_plain(x) or x.numel() > MOST or not is_dense(x):
            return self.round(x, dtype)
        wide = x if ours and is_whole(x) else torch.empty_like(x)
        bits = self._next_key()
        low = round_twice(x, dtype, bits, self._overflow, wide)
        if low is None:
            return self._rounded(x, dtype, bits)
        self.copies.keep(low, wide)
        return low

    def _next_key(self) -> Key | None:
        """What the bits of the next rounding depend on; None if it is to nearest."""
        if self._step is None or not self._stochastic:
            return None
        if self.warns and in_recomputation():
            self.warns = False
            warnings.warn(RECOMPUTED, stacklevel=3)
        self.site += 1
        return key(self._seed, self._step, SITE, self.site)

    @contextmanager
    def region(self) -> Iterator[None]:
        if self._step is None:
            self.copies.invalidate()
        # Attention's chain of ops is computed in float32, as natively. Partials are those of ops.
        cuda: Any = torch.backends.cuda
        before = cuda.fp16_bf16_reduction_math_sdp_allowed()
        cuda.allow_fp16_bf16_reduction_math_sdp(self._partials)
        kernels = nullcontext() if self._partials else fused_kernels(self.round)
        try:
            with unfused(), kernels, _EmulationMode(self, self._partials):
                yield
        finally:
            cuda.allow_fp16_bf16_reduction_math_sdp(before)


class _Repetition:
    """A region whose results get the bits of those after its creation; not nested, reusable."""

    def __init__(self, arithmetic: Emulated16) -> None:
        self._arithmetic, self._site = arithmetic, arithmetic.site

    def __enter__(self) -> None:
        self._before = self._arithmetic.site, self._arithmetic.warns
        self._arithmetic.site, self._arithmetic.warns = self._site, False

    def __exit__(self, *_: object) -> None:
        self._arithmetic.site, self._arithmetic.warns = self._before


def same_rounding() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Makes `torch.utils.checkpoint` recompute activations with the random bits they had.

    For its argument `context_fn`; under other arithmetic it does nothing:

        checkpoint(block, x, use_reentrant=False, context_fn=same_rounding)

    The gradients are then bit for bit those without checkpointing. Otherwise the recomputed
    activations are rounded anew, and the gradients belong to another forward pass than the loss.
    If several blocks share a weight, autocast casts it in the first block alone; a recomputation
    does not repeat that cast, and the bits of the other blocks differ.

    Returns:
        The regions of the forward pass and of its recomputation.
    """
    for mode in dispatch_modes():
        if isinstance(mode, _EmulationMode):
            return nullcontext(), _Repetition(mode.arithmetic)
    return nullcontext(), nullcontext()


def partials_substitutions(ops: Iterable[Any] = SUPPORTED) -> tuple[OpSubstitution, ...]:
    """One substitution for each op that has float16 partials."""
    reason = f"float16 partials: sums of {BLOCK} products in float32, added up in float16"
    names = sorted(recorded_name(op) for op in ops)
    return tuple(OpSubstitution(name, "float16", reason) for name in names)


class BlockedConvolutions(Arithmetic):
    """Native arithmetic except for float16 convolutions, whose partials are float16.

    For GPUs: cuBLAS has a switch for matmuls (`backend_flags`), cuDNN has none.
    """

    columns: Mapping[str, object] = {"partials_dtype": "float16"}
    substitutions = partials_substitutions(CONVOLUTION_OPS)

    def region(self) -> AbstractContextManager[object]:
        return _BlockedMode(self.occurred)


class _BlockedMode(DispatchMode):
    def __init__(self, occurred: set[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._occurred = occurred

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in CONVOLUTION_OPS or args[0].dtype != torch.float16:
            return func(*args, **(kwargs or {}))
        self._occurred.add(func)
        result = blocked(func, tree_map(widen, args), Tensor.half, kwargs)
        return tree_map(lambda x: x.half() if isinstance(x, Tensor) else x, result)


class _Facts(NamedTuple):
    """What decides how the mode treats an op, looked up once."""

    op: Any
    is_view: bool
    untouched: bool
    may_open: bool
    writes: tuple[tuple[int, str], ...]  # Arguments it may write to: position and name
    fused: Callable[..., Any] | None
    """What computes it as its kernel does; None where the kernel in float32 does."""


# By the op's `id`, because its hash takes long; the facts keep the op alive
_KNOWN: dict[int, _Facts] = {}


def _facts(func: Any) -> _Facts:
    # `t_` and its like change a shape in place: their schemas do not call them views
    is_view = func.is_view or torch.Tag.inplace_view in func.tags
    name = func.name().removeprefix("aten::").partition(".")[0]
    may_open = name in OPENED or kernel_key(func, "cpu", False) is not None
    untouched, writes = func.overloadpacket in UNTOUCHED, written_arguments(func)
    # What is sent was rounded before. Any argument may be written to: the schemas do not tell.
    if func.namespace in COMMUNICATION:
        untouched = True
        writes = tuple(enumerate(x.name for x in schema_of(func).arguments))
    facts = _Facts(func, is_view, untouched, may_open, writes, FUSED.get(func))
    _KNOWN[id(func)] = facts
    return facts


def _forget_all(argument: Any) -> None:
    for x in leaves(argument):
        if isinstance(x, Tensor) and x.dtype in LOW and is_plain(x):
            forget(x)


class _EmulationMode(DispatchMode):
    def __init__(self, arithmetic: Emulated16, partials: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arithmetic = arithmetic
        self._round = arithmetic.round
        self._round_and_keep = arithmetic.round_and_keep
        self._copies = arithmetic.copies
        self._occurred = arithmetic.occurred
        self._partials = partials

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = _KNOWN.get(id(func)) or _facts(func)
        if facts.is_view:
            return func(*args, **kwargs)
        for position, name in facts.writes:
            _forget_all(args[position] if position < len(args) else kwargs.get(name))
        if facts.untouched:
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        if facts.may_open and (kernel := opened(func, args, OPENED)) is not None:
            # PyTorch switches a mode off inside its own call, and the kernel's ops must be seen
            with self:
                return kernel(*args, **kwargs)
        if facts.fused is not None and args[0].dtype in LOW:
            self._occurred.add(func)
            return facts.fused(self._round, *args, **kwargs)
        target = result_dtype(func, args, kwargs)
        if target is None:
            return func(*args, **kwargs)
        self._occurred.add(func)
        if func is CAST and (result := self._cast(*args, **kwargs)):
            return result[0]
        return self._compute(func, args, kwargs, target, facts.writes)

    def _compute(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], target: torch.dtype, writes: Any
    ) -> Any:
        """The result of an op computed in float32, what the op would give in `target` rounded."""
        in_blocks = self._partials and target == torch.float16
        # What is written to must not be a copy that other ops read.
        widened = widen if writes or in_blocks else self._widened
        wide_args, wide_kwargs = mapped(widened, args), mapped(widened, kwargs)
        if in_blocks:
            result = self._in_blocks(func, wide_args, wide_kwargs)
        else:
            result = func(*wide_args, **wide_kwargs)
        # An op that writes returns what it wrote: callers must get their own 16-bit tensor
        stored: dict[int, Tensor] = {}
        if writes:
            for low, wide in written(func, (args, kwargs), (wide_args, wide_kwargs)):
                stored[id(wide)] = low.copy_(self._round(wide, low.dtype))
        # Some kernels return an input as it is.
        inputs = {storage_key(x) for x in leaves(wide_args, wide_kwargs) if is_float32(x)}

        def finished(x: Any, dtype: torch.dtype) -> Any:
            if id(x) in stored:
                return stored[id(x)]
            if not is_float32(x) or dtype not in LOW:
                return x
            if is_zero(x):
                return x.to(dtype)
            return self._round_and_keep(x, dtype, ours=storage_key(x) not in inputs)

        if func.overloadpacket in NORMS:
            first, *others = result
            return (finished(first, args[0].dtype), *(finished(x, target) for x in others))
        return mapped(lambda x: finished(x, target), result)

    def _widened(self, x: Any) -> Any:
        """As `widen`, from a copy where there is one."""
        if not isinstance(x, Tensor):
            return widen(x)
        if x.dtype not in LOW:
            return x
        wide = self._copies.get(x) if is_plain(x) else None
        return x.float() if wide is None else wide

    def _cast(self, x: Tensor, **options: Any) -> tuple[Tensor] | None:
        """`x` in another dtype by one pass, alone in a tuple; None where it is no mere cast."""
        dtype, device = options.get("dtype"), options.get("device") or x.device
        known = options.keys() <= {"dtype", "layout", "device"}
        strided = options.get("layout") in (None, torch.strided)
        if not (known and strided and device == x.device and is_plain(x)):
            return None
        if x.dtype in LOW and dtype == torch.float32:
            wide = self._copies.take(x)
            return (x.float() if wide is None else wide,)
        if x.dtype == torch.float32 and dtype in LOW:
            return (self._round_and_keep(x, dtype, ours=False),)
        return None

    def _in_blocks(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The float32 result of an op, its products added up in float16 where it has any."""
        if func is ADDMM_ACTIVATION:
            use_gelu = kwargs.pop("use_gelu", False)
            result = self._in_blocks(aten.addmm.default, args, kwargs)
            # Kernels that end in gelu approximate it on CUDA.
            kind = "tanh" if result.is_cuda else "none"
            return gelu(result, approximate=kind) if use_gelu else result.relu()
        op = VARIANTS.get(func, func)
        if op not in SUPPORTED:
            return func(*args, **kwargs)
        # An op in place has no `out`: it writes to its first argument
        out = kwargs.pop("out", args[0]) if op is not func else None
        result = blocked(op, args, lambda x: self._round(x, torch.float16), kwargs)
        return result if out is None else out.resize_(result.shape).copy_(result)

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if to.dtype in LOW and source.dtype != to.dtype and source.is_floating_point():
            source = self._round(source.float(), to.dtype)
        return to.copy_(source, non_blocking)
