"""16-bit arithmetic around float32: every result rounded, forward and backward.

Hardware with stochastic rounding (Graphcore's IPU) applies it where a result leaves the arithmetic
unit. On a CPU or GPU the output of a 16-bit kernel is already rounded to nearest, and the digits
that it cut off are lost. So each op on 16-bit tensors is computed in float32, on inputs that are
widened exactly, and mprun rounds its result to 16 bits: in the forward pass, in the backward pass
and where gradients are accumulated. Between ops, parameters, gradients and what is stored for the
backward pass are really 16 bits. Inside an op sums are float32, unless the partials are float16
(`partials.py`).

Rounding is stochastic during a training step. Outside of one (evaluation) it is to nearest, so that
a model has one test accuracy.

The format and the width of the sums are emulated, not the bits of some hardware. Ops that only move
or select numbers are not changed: rounding their result would do nothing. Mixed dtypes are promoted
where PyTorch's kernels promote, and refused where they refuse.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from mprun._torch import (
    TorchDispatchMode,
    aten_packets,
    dispatch_modes,
    in_recomputation,
    schema_of,
    tree_leaves,
    tree_map,
)
from mprun.precision.arithmetic import Arithmetic, OpSubstitution
from mprun.precision.partials import BLOCK, SUPPORTED, blocked
from mprun.precision.policy import dtype_name
from mprun.precision.products import (
    CONVOLUTION_BACKWARD,
    CONVOLUTIONS,
    FAST_PATHS,
    LOW,
    MATMULS,
    opened,
    recorded_name,
    unfused,
    variants,
)
from mprun.precision.random_bits import key
from mprun.precision.rounding import round_nearest, stochastic

aten = torch.ops.aten

CONVOLUTION_OPS = frozenset({*CONVOLUTIONS, *CONVOLUTION_BACKWARD})
RECOMPUTED = (
    "torch.utils.checkpoint recomputes stochastically rounded activations with other random bits: "
    "the gradients are not those of the forward pass; use "
    "checkpoint(..., use_reentrant=False, context_fn=mprun.precision.same_rounding)"
)
SITE = 2**32
"""Keeps the sites of results apart from those of optimizer updates."""

# Results that are inputs, moved or selected: exact in the inputs' dtype.
EXACT = aten_packets(
    "_local_scalar_dense _unsafe_view abs amax amin cat clamp_min clone constant_pad_nd embedding "
    "empty_like fill_ flip full_like gather index index_select masked_fill masked_fill_ max "
    "max_pool2d_with_indices maximum min minimum neg new_empty new_empty_strided new_zeros "
    "ones_like relu relu_ roll select_backward slice_backward sort stack threshold_backward topk "
    "tril triu where zero_ zeros_like"
)
# Random numbers, which rounding would carry over the end of their range.
DRAWN = aten_packets("bernoulli_ normal_ rand rand_like randn randn_like uniform_")
UNTOUCHED = EXACT | DRAWN
# Normalizations and their gradients: the first result is like the first argument, the others
# (statistics, gradients of weights) are promoted. So float32 weights leave 16-bit numbers 16 bits.
NORMS = aten_packets(
    "cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm miopen_batch_norm_backward "
    "native_batch_norm native_batch_norm_backward native_group_norm native_group_norm_backward "
    "native_layer_norm native_layer_norm_backward"
)
# Ops whose kernels take floating arguments of one dtype alone, and would promote in float32.
UNPROMOTED = {
    op.overloadpacket for op in (*MATMULS, *CONVOLUTIONS, *CONVOLUTION_BACKWARD)
} | aten_packets(
    "_embedding_bag _embedding_bag_forward_only _cudnn_rnn _thnn_fused_gru_cell "
    "_thnn_fused_lstm_cell addbmm_ addmm_ addmv_ baddbmm_ grid_sampler_2d grid_sampler_3d "
    "index_add index_add_ index_put index_put_ linalg_cross masked_scatter masked_scatter_ "
    "mkldnn_rnn_layer scatter scatter_ scatter_add scatter_add_"
)
ADDMM_ACTIVATION = next(iter(aten_packets("_addmm_activation"))).default
OPENED = FAST_PATHS | {"_trilinear", "conv_tbc", "conv_tbc_backward"}
# In-place ops and those with `out`, each with the op that returns what they write.
VARIANTS: dict[Any, Any] = {
    variant: op for op in SUPPORTED for variant in variants(op) if variant not in SUPPORTED
}
# Arguments an op writes to without its schema saying so.
WRITES = {aten.native_batch_norm.default: ("running_mean", "running_var")}


class Emulated16(Arithmetic):
    """A region in which mprun rounds 16-bit results.

    Args:
        rounding: stochastic or nearest.
        overflow: infinity or saturate.
        partials: what matmuls and convolutions accumulate in: float32 or float16.
        seed: of the random bits.
    """

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
        self._site = 0
        self._warns = True  # of results recomputed with other bits

    def begin_step(self, step: int) -> None:
        self._step, self._site = step, 0

    def end_step(self) -> None:
        self._step = None

    def round(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`x` rounded to `dtype`."""
        x = x.float()  # a float64 passes through float32
        if self._step is None or not self._stochastic:
            return round_nearest(x, dtype, self._overflow)
        if self._warns and in_recomputation():
            self._warns = False
            warnings.warn(RECOMPUTED, stacklevel=2)
        self._site += 1
        return stochastic(x, dtype, key(self._seed, self._step, SITE, self._site), self._overflow)

    def repetition(self) -> AbstractContextManager[object]:
        """A region for a recomputation: its results get the bits of those that follow now."""
        return _Repetition(self, self._site)

    def swap_count(self, site: int, warns: bool) -> tuple[int, bool]:
        """Count results from `site` on, warn of recomputed ones or not; returns the old values."""
        before = self._site, self._warns
        self._site, self._warns = site, warns
        return before

    @contextmanager
    def region(self) -> Iterator[None]:
        # Fused attention would hide its results from the mode, and so would one in float32.
        cuda: Any = torch.backends.cuda
        before = cuda.fp16_bf16_reduction_math_sdp_allowed()
        cuda.allow_fp16_bf16_reduction_math_sdp(True)
        try:
            with unfused(), _EmulationMode(self, self._partials):
                yield
        finally:
            cuda.allow_fp16_bf16_reduction_math_sdp(before)


class _Repetition:
    """Rounds with the bits of an earlier region's results; can be entered again (not nested)."""

    def __init__(self, arithmetic: Emulated16, site: int) -> None:
        self._arithmetic = arithmetic
        self._site = site

    def __enter__(self) -> None:
        self._before = self._arithmetic.swap_count(self._site, warns=False)

    def __exit__(self, *_: object) -> None:
        self._arithmetic.swap_count(*self._before)


def same_rounding() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Makes `torch.utils.checkpoint` recompute activations with the random bits they had.

    For its argument `context_fn`; under other arithmetic it does nothing:

        checkpoint(block, x, use_reentrant=False, context_fn=same_rounding)

    The gradients are then bit for bit those without checkpointing. Without it the recomputed
    activations are rounded anew, and the gradients belong to another forward pass than the loss.
    Where autocast casts a weight that several blocks share, the cast it keeps from the first block
    is not repeated, and the bits of the others differ.

    Returns:
        The regions of the forward pass and of its recomputation.
    """
    for mode in dispatch_modes():
        if isinstance(mode, _EmulationMode):
            return nullcontext(), mode.arithmetic.repetition()
    return nullcontext(), nullcontext()


def partials_substitutions(ops: Iterable[Any] = SUPPORTED) -> tuple[OpSubstitution, ...]:
    """The substitutions that float16 partials mean, one for each op they apply to."""
    reason = f"float16 partials: sums of {BLOCK} products in float32, added up in float16"
    names = sorted(recorded_name(op) for op in ops)
    return tuple(OpSubstitution(name, "float16", reason) for name in names)


class BlockedConvolutions(Arithmetic):
    """Native arithmetic but for float16 convolutions, whose partials are float16.

    For GPUs: cuBLAS has a switch for matmuls (`backend_flags`), cuDNN has none.
    """

    columns: Mapping[str, object] = {"partials_dtype": "float16"}
    substitutions = partials_substitutions(CONVOLUTION_OPS)

    def region(self) -> AbstractContextManager[object]:
        return _BlockedMode(self.occurred)


class _BlockedMode(TorchDispatchMode):
    def __init__(self, occurred: set[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._occurred = occurred

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in CONVOLUTION_OPS or args[0].dtype != torch.float16:
            return func(*args, **(kwargs or {}))
        self._occurred.add(func)
        result = blocked(func, tree_map(_widen, args), Tensor.half, kwargs)
        return tree_map(lambda x: x.half() if isinstance(x, Tensor) else x, result)


class _EmulationMode(TorchDispatchMode):
    def __init__(self, arithmetic: Emulated16, partials: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arithmetic = arithmetic
        self._round = arithmetic.round
        self._occurred = arithmetic.occurred
        self._partials = partials

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        moves = func.is_view or torch.Tag.inplace_view in func.tags
        if moves or func.overloadpacket in UNTOUCHED:
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        if (kernel := opened(func, args, OPENED)) is not None:
            with self:
                return kernel(*args, **kwargs)
        target = _target(func, args, kwargs)
        if target is None:
            return func(*args, **kwargs)
        self._occurred.add(func)
        wide_args, wide_kwargs = tree_map(_widen, args), tree_map(_widen, kwargs)
        if self._partials and target == torch.float16:
            result = self._in_blocks(func, wide_args, wide_kwargs)
        else:
            result = func(*wide_args, **wide_kwargs)
        stored: dict[int, Tensor] = {}
        for low, wide in _written(func, (args, kwargs), (wide_args, wide_kwargs)):
            stored[id(wide)] = low.copy_(self._round(wide, low.dtype))

        def finished(x: Any, dtype: torch.dtype) -> Any:
            return stored[id(x)] if id(x) in stored else self._rounded(x, dtype)

        if func.overloadpacket in NORMS:
            first, *others = result
            return (finished(first, args[0].dtype), *(finished(x, target) for x in others))
        return tree_map(lambda x: finished(x, target), result)

    def _in_blocks(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The float32 result of an op, its products added up in float16 where it has any."""
        if func is ADDMM_ACTIVATION:
            gelu = kwargs.pop("use_gelu", False)
            result = self._in_blocks(aten.addmm.default, args, kwargs)
            return _gelu(result) if gelu else result.relu()
        op = VARIANTS.get(func, func)
        if op not in SUPPORTED:
            return func(*args, **kwargs)
        out = kwargs.pop("out", args[0]) if op is not func else None
        result = blocked(op, args, lambda x: self._round(x, torch.float16), kwargs)
        return result if out is None else out.resize_(result.shape).copy_(result)

    def _rounded(self, x: Any, dtype: torch.dtype) -> Any:
        if isinstance(x, Tensor) and x.dtype == torch.float32 and dtype in LOW:
            return self._round(x, dtype)
        return x

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if to.dtype in LOW and source.dtype != to.dtype and source.is_floating_point():
            source = self._round(source.float(), to.dtype)
        return to.copy_(source, non_blocking)


def _gelu(x: Tensor) -> Tensor:
    """As kernels that end in it compute it: by the approximation on CUDA."""
    return gelu(x, approximate="tanh" if x.is_cuda else "none")


def _target(func: Any, args: Any, kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype PyTorch would give the result, where 16-bit numbers take part; else None.

    A dtype among the arguments decides; otherwise tensors are promoted, those without dimensions
    counting only where there are no others. Of an op in `NORMS`, all results but the first.

    Raises:
        RuntimeError: dtypes are mixed that the op's own kernel does not take together.
    """
    leaves = tree_leaves((args, kwargs))
    named = [x for x in leaves if isinstance(x, torch.dtype) and x.is_floating_point]
    tensors = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    if not any(d in LOW for d in (*named, *(t.dtype for t in tensors))):
        return None
    if named:
        return named[-1]
    _check_mixed(func.overloadpacket, [t.dtype for t in tensors])
    decisive = [t for t in tensors if t.dim()] or tensors
    return reduce(torch.promote_types, (t.dtype for t in decisive))


def _check_mixed(op: Any, dtypes: Sequence[torch.dtype]) -> None:
    """Refuse floating arguments' dtypes as kernels do: computed in float32, all would be taken."""
    refused = len(set(dtypes)) > 1 and op in UNPROMOTED
    if op in NORMS:
        refused = not {*dtypes} <= {dtypes[0], torch.float32}
    if refused:
        names = " and ".join(dtype_name(d) for d in dict.fromkeys(dtypes))
        raise RuntimeError(f"{op}: floating arguments of one dtype are needed; got {names}")


def _widen(x: Any) -> Any:
    if isinstance(x, Tensor) and x.dtype in LOW:
        return x.float()
    return torch.float32 if isinstance(x, torch.dtype) and x in LOW else x


Arguments = tuple[Any, Mapping[str, Any]]
"""Positional and keyword arguments."""


def _written(func: Any, call: Arguments, wide: Arguments) -> Iterator[tuple[Tensor, Tensor]]:
    """The 16-bit tensors an op writes to, each with the float32 one written instead."""
    for position, argument in enumerate(schema_of(func).arguments):
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if not marked and argument.name not in WRITES.get(func, ()):
            continue
        pair = [_argument(x, position, argument.name) for x in (call, wide)]
        for low, instead in zip(*map(tree_leaves, pair), strict=True):
            if isinstance(low, Tensor) and low.dtype in LOW:
                yield low, instead


def _argument(call: Arguments, position: int, name: str) -> Any:
    args, kwargs = call
    return args[position] if position < len(args) else kwargs.get(name)
