"""What one of several processes holds: against FSDP2 itself, and against counts by hand."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mprun.recipes.char_gpt import Gpt
from mprun.train.parallel.model_blocks import (
    ReplicatedModel,
    ShardedModel,
    blocks_of,
    cast_modules,
    checkpointed,
)
from mprun.watch.memory_recorder import (
    ProcessRule,
    StepMemory,
    fake_tensors,
    memory,
)
from tests.torch_version import torch_is

WIDTH = 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(torch.relu(self.up(x)))
        return x + change


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, WIDTH), nn.Linear(WIDTH, 7)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x)
        return result


BLOCKS = [f"blocks.{n}" for n in range(4)]
LAYERS = cast_modules(Net())


# ---- FSDP2 itself --------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Sums the storages alive after each op; FSDP2 frees one by making it empty."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.peak = 0

    def add(self, tensor: Any) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = weakref.ref(storage)
            weakref.finalize(storage, self.storages.pop, storage._cdata, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, Tensor):
                self.add(x)
        alive = [storage() for storage in list(self.storages.values())]
        self.peak = max(self.peak, sum(s.nbytes() for s in alive if s is not None))
        return result


@pytest.fixture
def processes(request: pytest.FixtureRequest) -> Iterator[int]:
    """A group of processes of which this one is the first, and the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def a_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, casts: bool
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if casts else nullcontext():
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()

    return step


def peak_of_fsdp2(
    world_size: int,
    x: Tensor,
    policy: MixedPrecisionPolicy,
    checkpoints: bool,
    make: Callable[[], nn.Module],
) -> int:
    model, mesh = make(), init_device_mesh("cpu", (world_size,))
    for module in (*(block for _, block in blocks_of(model)), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step = a_step(model, optimizer, x, casts=False)
    step()
    live = LiveBytes()
    for parameter in model.parameters():
        for tensor in (parameter, *optimizer.state[parameter].values()):
            live.add(tensor)
    live.add(x)
    with checkpointed(model) if checkpoints else nullcontext(), live:
        step()
    return live.peak


def counted(
    rule: ProcessRule, samples: int, casts: bool = False, checkpoints: bool = False
) -> StepMemory:
    with fake_tensors(), ExitStack() as stack:
        model = Net()
        if checkpoints:
            stack.enter_context(checkpointed(model, random_states=False))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        x = torch.empty(samples, 10)
        return memory(a_step(model, optimizer, x, casts), model, optimizer, [x], rule=rule)


@pytest.mark.representative(
    "2-512-fp32-whole",
    "2-512-bf16_mixed-whole",
    "16-4-fp32-checkpoints",
    "4-256-bf16_mixed-checkpoints",
)
@pytest.mark.parametrize("checkpoints", [False, True], ids=["whole", "checkpoints"])
@pytest.mark.parametrize("casts", [False, True], ids=["fp32", "bf16_mixed"])
@pytest.mark.parametrize(
    ("processes", "samples"),
    [(2, 512), (4, 256), (16, 4)],
    indirect=["processes"],
)
def test_the_peak_is_that_of_fsdp2(
    processes: int, samples: int, casts: bool, checkpoints: bool
) -> None:
    dtype = torch.bfloat16 if casts else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    rule = ShardedModel(processes, BLOCKS, dict.fromkeys(LAYERS, 2) if casts else {}, 4)
    ours = counted(rule, samples, casts, checkpoints)
    theirs = peak_of_fsdp2(processes, torch.ones(samples, 10), policy, checkpoints, Net)
    if torch_is(2, 13) or not torch_is(2, 12):
        assert ours.peak_bytes == theirs
    else:  # a loop variable of 2.12 keeps what the last block gave to the reduce-scatter
        block = sum(p.numel() for p in Net().blocks[0].parameters())
        assert 0 <= theirs - ours.peak_bytes <= block * torch.float32.itemsize
    assert ours.peak.phase == "backward"


@pytest.mark.representative("*-1")
@pytest.mark.parametrize("samples", [1, 12])
@pytest.mark.parametrize("processes", [8], indirect=True)
def test_the_peak_of_a_gpt_is_that_of_fsdp2(processes: int, samples: int) -> None:
    make = partial(Gpt, vocabulary=65, context=64, layers=3, heads=4, width=128)
    ids = torch.zeros(samples, 64, dtype=torch.long)
    with fake_tensors():
        model, fake = make(), torch.zeros(samples, 64, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        rule = ShardedModel(processes, [path for path, _ in blocks_of(model)], {}, 4)
        step = a_step(model, optimizer, fake, casts=False)
        ours = memory(step, model, optimizer, [fake], rule=rule)
    assert ours.peak_bytes == peak_of_fsdp2(processes, ids, MixedPrecisionPolicy(), False, make)


# ---- DistributedDataParallel itself --------------------------------------------------------------


def peak_of_ddp(x: Tensor, dtype: torch.dtype) -> int:
    model = Net()
    replica = DistributedDataParallel(
        model, find_unused_parameters=True, gradient_as_bucket_view=True
    )
    live, sent = LiveBytes(), list[Tensor]()

    def hook(bucket: Any) -> Any:
        sent.append(bucket.buffer().to(dtype))  # until the sum is there
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    # the type of `bucket`, as text, would be refused
    replica.register_comm_hook(None, lambda state, bucket: hook(bucket))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        replica(x).square().mean().backward()
        sent.clear()
        optimizer.step()

    step()
    for parameter in model.parameters():
        for tensor in (parameter, parameter.grad, *optimizer.state[parameter].values()):
            live.add(tensor)
    live.add(x)
    with live:
        step()
    return live.peak


SCALARS = 256
"""Bytes of the loss, its copies and the map of parameters in use, which are not counted."""


@pytest.mark.parametrize("samples", [4, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("processes", [2], indirect=True)
def test_the_peak_is_that_of_ddp(processes: int, samples: int, dtype: torch.dtype) -> None:
    ours = counted(ReplicatedModel(dtype.itemsize), samples)
    assert ours.peak_bytes == pytest.approx(
        peak_of_ddp(torch.ones(samples, 10), dtype), abs=SCALARS
    )


# ---- by hand -------------------------------------------------------------------------------------

# ---- blocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_of_checkpointed_blocks_are_the_same(dropout: float) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    x, gradients = torch.randn(2, 5, 16), []
    for checkpoints in (False, True):
        model.zero_grad()
        torch.manual_seed(0)
        with checkpointed(model) if checkpoints else nullcontext():
            model(x).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert all("forward" not in vars(module) for module in model.modules())


def test_blocks_are_the_repeated_modules_with_most_parameters() -> None:
    assert [path for path, _ in blocks_of(Net())] == BLOCKS
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    encoder = nn.Sequential(
        nn.Embedding(99999, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    )
    assert [path for path, _ in blocks_of(encoder)] == ["1.layers.0", "1.layers.1"]


def test_layers_are_blocks_where_nothing_else_is_repeated() -> None:
    mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    assert [path for path, _ in blocks_of(mlp)] == ["0", "2"]
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.LayerNorm(8))
    assert [path for path, _ in blocks_of(net)] == ["1", "2"]
    assert blocks_of(nn.ReLU()) == []
