"""Fused kernels under emulation: one op each, with the inner dtype of the real kernel.

A fused kernel keeps its inner results in float32 and rounds what it stores. An emulation that
rounds after each op inside of it is up to twice as wrong as the hardware. So these ops are computed
as their kernels do it; with float16 partials nothing is fused, as their sums are those of ops:

    attention   scores and softmax in float32; probabilities and gradients of scores are rounded,
                because a 16-bit product reads them (PyTorch, `FlashAttentionKernel.cpp`; Dao,
                "FlashAttention-2", 2023). Where no fused kernel takes the call, PyTorch computes
                the chain of ops in float32, and so does this.
    lstm        oneDNN's layer for bfloat16 on CPUs (`mkldnn/RNN.cpp`): a step in float32; states,
                gates and their gradients are rounded. In other cases PyTorch computes a chain of
                ops. Norms, softmax and losses are single ops already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from mprun.precision._torch import aten_packets, is_transformed, no_dispatch

Round = Callable[[Tensor, torch.dtype], Tensor]  # Rounds a float32 tensor to a 16-bit dtype

# The second calls the first, where a mode no longer sees it
WITH_ATTENTION = ("scaled_dot_product_attention", "multi_head_attention_forward")
ARGUMENTS = 9  # Of `torch.lstm`, as `nn.LSTM` calls it
ON_CPU = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


@contextmanager
def fused_kernels(round_: Round) -> Iterator[None]:
    """Inside, attention on a CPU is one op, and a layer of an LSTM in bfloat16 too.

    Code inside that asks for `SDPBackend.MATH` gets the chain of ops, as natively: the fused kernel
    has no second derivative.
    """
    with sdpa_kernel(ON_CPU), _FusedKernels(round_):
        yield


class _FusedKernels(TorchFunctionMode):
    def __init__(self, round_: Round) -> None:
        super().__init__()
        self._round = round_

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        query = args[0] if args else kwargs.get("query")
        if name in WITH_ATTENTION and isinstance(query, Tensor) and not query.is_cpu:
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        if name == "lstm" and len(args) == ARGUMENTS and has_kernel(*args):
            with torch.autocast("cpu", enabled=False):
                return lstm(self._round, *args)
        return func(*args, **kwargs)


def has_kernel(x: Tensor, states: Any, parameters: Any, *options: Any) -> bool:
    """Whether oneDNN has a kernel for this call of `torch.lstm`."""
    if isinstance(states, Tensor) or x.device.type != "cpu":  # a packed sequence's batch sizes
        return False
    if any(map(is_transformed, (x, *parameters))):  # `torch.func` goes through the chain of ops
        return False
    has_biases, layers, _dropout, _train, bidirectional, _batch_first = options
    per_layer = (4 if has_biases else 2) * (2 if bidirectional else 1)
    if len(parameters) != per_layer * layers:  # projections
        return False
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") == torch.bfloat16
    return {y.dtype for y in (x, *states, *parameters)} == {torch.bfloat16}


def lstm(
    round_: Round,
    x: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`torch.lstm`, each layer and direction as one op. Arguments and results are as its own."""
    x, hidden, cells, *parameters = (y.bfloat16() for y in (x, *states, *parameters))
    x = x.transpose(0, 1) if batch_first else x
    count, directions = 4 if has_biases else 2, 2 if bidirectional else 1
    last_hidden, last_cells = [], []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            own = parameters[number * count : (number + 1) * count]
            steps = x.flip(0) if direction else x
            output, cell = LstmLayer.apply(round_, steps, hidden[number], cells[number], *own)
            last_hidden.append(output[-1])
            last_cells.append(cell)
            outputs.append(output.flip(0) if direction else output)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < layers - 1:
            x = torch.nn.functional.dropout(x, dropout)
    x = x.transpose(0, 1) if batch_first else x
    return x, torch.stack(last_hidden), torch.stack(last_cells)


class LstmLayer(torch.autograd.Function):
    """A layer of an LSTM in one direction (Hochreiter and Schmidhuber, 1997, with forget gates)."""

    @staticmethod
    def forward(
        ctx: Any,
        round_: Round,
        x: Tensor,
        hidden: Tensor,
        cell: Tensor,
        of_inputs: Tensor,
        of_hidden: Tensor,
        *biases: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Bfloat16 [steps, batch, inputs], first states [batch, size], weights [4 size, ...]."""
        dtype = x.dtype
        with no_dispatch():
            # Without dispatch: the emulation would round the result of each op in here
            wide = x.float() @ of_inputs.float().t()
            if biases:  # PyTorch hands oneDNN their sum, in 16 bits
                first, second = biases
                wide += round_(first.float() + second.float(), dtype).float()
            recurrent, h, c = of_hidden.float().t(), hidden.float(), cell.float()
            all_gates, all_cells, outputs = [], [cell], []
            for step in range(len(x)):
                i, f, g, o = (wide[step] + h @ recurrent).chunk(4, -1)
                i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
                c = f * c + i * g
                low = round_(o * c.tanh(), dtype)
                all_gates.append(torch.cat((i, f, g, o), -1))
                all_cells.append(round_(c, dtype))
                outputs.append(low)
                h, c = low.float(), all_cells[-1].float()
            output, gates = torch.stack(outputs), round_(torch.stack(all_gates), dtype)
        ctx.save_for_backward(x, hidden, of_inputs, of_hidden, output, gates, *biases, *all_cells)
        ctx.round, ctx.biases = round_, len(biases)
        return output, all_cells[-1]

    @staticmethod
    def backward(ctx: Any, of_output: Tensor, of_last: Tensor) -> Any:
        x, hidden, of_inputs, of_hidden, output, gates, *cells = ctx.saved_tensors
        biases, cells = cells[: ctx.biases], cells[ctx.biases :]
        if torch.is_grad_enabled():  # these gradients are differentiated again
            given = (x, hidden, cells[0], of_inputs, of_hidden, *biases)
            return None, *_lstm_gradients(given, (of_output, of_last), ctx.needs_input_grad[1:])
        dtype, round_ = x.dtype, ctx.round
        with no_dispatch():
            recurrent = of_hidden.float()
            of_h, of_c = torch.zeros_like(hidden, dtype=torch.float32), of_last.float()
            all_changes = []
            for step in reversed(range(len(x))):
                i, f, g, o = gates[step].float().chunk(4, -1)
                of_h = of_h + of_output[step].float()
                squashed = cells[step + 1].float().tanh()
                of_c = of_c + of_h * o * (1 - squashed * squashed)
                # Before the activations, in the order of the gates: input, forget, cell, output
                changes = (
                    of_c * g * i * (1 - i),
                    of_c * cells[step].float() * f * (1 - f),
                    of_c * i * (1 - g * g),
                    of_h * squashed * o * (1 - o),
                )
                low = round_(torch.cat(changes, -1), dtype)
                all_changes.append(low)
                of_h, of_c = low.float() @ recurrent, of_c * f
            changed = torch.stack(all_changes[::-1]).float()
            flat = changed.flatten(0, 1)
            before = torch.cat((hidden.unsqueeze(0), output[:-1])).float().flatten(0, 1)
            results = (
                changed @ of_inputs.float(),
                of_h,
                of_c,
                flat.t() @ x.float().flatten(0, 1),
                flat.t() @ before,
                *[flat.sum(0)] * ctx.biases,
            )
            return None, *(round_(result, dtype) for result in results)


def _lstm_gradients(
    given: tuple[Tensor, ...], arrived: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    """As `LstmLayer.backward`, with a graph: of the chain of ops in float32, rounded at its end."""
    with torch.autocast("cpu", enabled=False):
        x, hidden, cell, *weights = (y.float() for y in given)
        states = (hidden.unsqueeze(0), cell.unsqueeze(0))
        options = (len(weights) > 2, 1, 0.0, False, False, False)
        output, _, last = torch.lstm(x, states, weights, *options)
        wide = [y.float() for y in arrived]
        wanted = [y for y, is_needed in zip(given, needed, strict=True) if is_needed]
        made = torch.autograd.grad((output, last.squeeze(0)), wanted, wide, create_graph=True)
    gradients = iter(made)
    return [next(gradients) if is_needed else None for is_needed in needed]


def attention(
    round_: Round,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`_scaled_dot_product_flash_attention_for_cpu`: the output, and each row's log of the sum.

    All are in 16 bits, [batch, heads, queries, size]; keys and values may have fewer heads, in
    groups.
    """
    dtype = query.dtype
    scores = _scores(query, key, is_causal, attn_mask, scale)
    # A row that is masked as a whole has -inf alone, and -inf less -inf would be NaN
    largest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    exponents = (scores - largest).exp_()
    total = exponents.sum(-1, keepdim=True)
    # Rounded before the division: the kernel multiplies these, and divides the sum of products
    low = round_(exponents, dtype).float()
    output = low @ _heads(value, query)
    # A query that may see no key gets 0, as from the kernel
    output = torch.where(total > 0, output / total, 0.0)
    # As the kernel's, [batch, queries, heads, size] in memory.
    output = output.transpose(1, 2).contiguous().transpose(1, 2)
    return round_(output, dtype), (largest + total.log()).squeeze(-1)


def attention_backward(
    round_: Round,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Its backward op: the gradients of query, key and value."""
    dtype = query.dtype
    keys, values = _heads(key, query), _heads(value, query)
    scores = _scores(query, key, is_causal, attn_mask, scale)
    lse = logsumexp.unsqueeze(-1)
    # Rows without a key have no finite logarithm
    probabilities = torch.where(lse.isfinite(), (scores - lse).exp_(), 0.0)
    wide = gradient.float()
    of_values = round_(probabilities, dtype).float().transpose(-1, -2) @ wide
    of_probabilities = wide @ values.transpose(-1, -2)
    # FlashAttention-2's D: in each row the sum of probabilities times their gradients
    shared = (wide * output.float()).sum(-1, keepdim=True)
    of_scores = round_(probabilities * (of_probabilities - shared), dtype).float()
    factor = _scale(query, scale)
    of_query = (of_scores @ keys) * factor
    of_keys = (of_scores.transpose(-1, -2) @ query.float()) * factor
    results = (of_query, _grouped(of_keys, key), _grouped(of_values, value))
    return tuple(round_(x.contiguous(), dtype) for x in results)  # type: ignore[return-value]


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _heads(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values in float32, repeated for the queries of their group."""
    groups = query.shape[1] // x.shape[1]
    return x.float() if groups == 1 else x.float().repeat_interleave(groups, 1)


def _grouped(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of repeated keys or values, summed over each group."""
    groups = gradient.shape[1] // x.shape[1]
    return gradient if groups == 1 else gradient.unflatten(1, (x.shape[1], groups)).sum(2)


def _scores(
    query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None
) -> Tensor:
    scores = query.float() @ _heads(key, query).transpose(-1, -2)
    scores = scores * _scale(query, scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


_NAME = "_scaled_dot_product_flash_attention_for_cpu"
# Ops to what computes them; the first argument is the rounding
FUSED: dict[Any, Callable[..., Any]] = {
    next(iter(aten_packets(_NAME))).default: attention,
    next(iter(aten_packets(f"{_NAME}_backward"))).default: attention_backward,
}
