"""mprun on the accelerator of this machine, beside its CPU: `python -m benchmarks.first_hour`.

Without an accelerator the same tests run on the CPU, but for those that ask what only a GPU has.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mprun
from mprun.cli.main import main
from mprun.config import compose
from mprun.optim import SGD, AdamW, RMSprop
from mprun.precision import backend_flags, devices
from mprun.precision.gemms import RECIPES, why_not_native
from mprun.records.run_record import read_lines, read_summary
from mprun.train.assemble import build_parts, make_plan
from mprun.train.clock import clock_for
from mprun.train.loop import Limits, Trainer

DEVICE = devices.find("auto")
STEPS = 10 if DEVICE.type == "cpu" else 40
MODES = (
    *("fp32", "tf32", "fp16_mixed", "bf16_mixed", "fp16_true", "bf16_true", "bf16_sr", "half_sr"),
    *("half_sr_full", "fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_hp", "mxfp8", "nvfp4"),
)
MNIST = [
    *("recipe=mnist", "recipe.model.units=32", "data.source=generated", "data.train_limit=640"),
    *("data.eval_limit=64", "train.batch_size=64", f"train.max_steps={STEPS}"),
]
on_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="asks what only CUDA has")


def losses(folder: str) -> list[float]:
    return [line["loss"] for line in read_lines(Path(folder)) if line["kind"] == "step"]


@pytest.mark.representative("half_sr")
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_as_on_the_cpu(mode: str) -> None:
    assert main([*MNIST, f"precision={mode}", f"device={DEVICE}", "run.dir=there"]) == 0
    assert main([*MNIST, f"precision={mode}", "device=cpu", "run.dir=here"]) == 0
    there, here = losses("there"), losses("here")
    assert len(there) == STEPS
    # one pass in 8 bits or fewer; then rounding in another order is carried on by each step
    assert there[0] == pytest.approx(here[0], rel=1e-3)
    assert sum(there[-5:]) == pytest.approx(sum(here[-5:]), rel=0.2)
    summary = read_summary(Path("there"))
    assert summary.hardware.device == DEVICE.type
    if mode in RECIPES and why_not_native(mode, DEVICE) is None:
        assert summary.execution == "native"


@on_cuda
@pytest.mark.parametrize("kind", ["none", "static", "dynamic"])
def test_no_step_waits_for_the_device(kind: str) -> None:
    words = [*MNIST, "precision=fp16_mixed", f"loss_scale={kind}", "device=cuda"]
    plan = make_plan(compose([*words, "train.optimizer.name=adamw"]).config, ())
    with backend_flags(plan.policy):
        parts = build_parts(plan)
        trainer = Trainer(parts, Limits(None, None, None))
        batch = next(parts.train.epoch(None)).trained
        for _ in range(3):
            trainer.optimizer_step(batch)
        torch.cuda.synchronize()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(5):
                    trainer.optimizer_step(batch)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = [str(x.message) for x in caught if "synchronizing" in str(x.message)]
    assert waits == []


def test_the_clock_agrees_with_the_wall() -> None:
    side = 256 if DEVICE.type == "cpu" else 4096
    x = torch.randn(side, side, device=DEVICE)
    clock = clock_for(DEVICE)
    for _ in range(3):
        x = (x @ x).tanh()
    devices.synchronize(DEVICE)
    began = time.perf_counter()
    for _ in range(50):
        clock.start()
        for _ in range(4):
            x = (x @ x).tanh()
        clock.stop()
    times = clock.take()
    devices.synchronize(DEVICE)
    wall_ms = (time.perf_counter() - began) * 1e3
    assert len(times) == 50
    measured_ms = sum(x.ms for x in times)
    assert measured_ms <= wall_ms * 1.01
    if DEVICE.type == "cuda":  # a CPU that others use does other things between two steps
        assert measured_ms == pytest.approx(wall_ms, rel=0.1)


@on_cuda
@pytest.mark.parametrize("mode", ["fp32", "bf16_mixed", "half_sr"])
def test_the_counted_memory_is_what_the_allocator_gives(mode: str) -> None:
    words = ["recipe=mnist", "recipe.model.units=4096", "data.source=generated"]
    words += ["data.train_limit=4096", "data.eval_limit=64", "train.batch_size=2048"]
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    assert main([*words, f"precision={mode}", "train.max_steps=10", "run.dir=run"]) == 0
    memory = read_summary(Path("run")).memory_bytes
    assert memory.allocator_peak is not None
    # the samples lie on the device too, and an allocator rounds each tensor up
    samples = 4096 * 28 * 28
    assert memory.peak * 0.9 <= memory.allocator_peak <= (memory.peak + samples) * 1.3 + 2**26


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (AdamW, {"rounding": "stochastic", "seed": 7}),
        (AdamW, {"rounding": "kahan"}),
        (SGD, {"rounding": "stochastic", "momentum": 0.9, "seed": 7}),
        (RMSprop, {"rounding": "stochastic", "seed": 7}),
    ],
)
def test_rounding_gives_the_cpus_bits(kind: Any, options: dict[str, Any], dtype: Any) -> None:
    kept: list[Tensor] = []
    for place in (devices.CPU, DEVICE):
        p = nn.Parameter(torch.randn(10_003, generator=seeded(1)).to(dtype).to(place))
        optimizer = kind([p], lr=1e-2, **options)
        for step in range(5):
            p.grad = torch.randn(10_003, generator=seeded(step)).to(dtype).to(place)
            optimizer.step()
        kept.append(p.detach().cpu())
    differ = (kept[0] != kept[1]).sum().item()
    # float16: a quotient that differs in float32's last bit moves one in 2^13 roundings
    assert differ <= (0 if dtype == torch.bfloat16 else 10_003 * 1e-3)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@on_cuda
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", sorted(RECIPES))
def test_native_float8_trains_eager_and_compiled(mode: str, compiled: bool) -> None:
    if why := why_not_native(mode, DEVICE):
        pytest.skip(why)
    words = ["recipe=char_gpt", "data.source=generated", "train.max_steps=10", "train.batch_size=8"]
    words += [f"precision={mode}", f"speed.compile={str(compiled).lower()}", "run.dir=run"]
    assert main(words) == 0
    summary = read_summary(Path("run"))
    assert (summary.execution, summary.backend.compile) == ("native", compiled)
    found = losses("run")
    assert found[-1] < found[0]


@on_cuda
@pytest.mark.parametrize("mode", ["bf16_mixed", "fp16_mixed"])
def test_a_step_with_cuda_graphs_is_the_step_without(mode: str) -> None:
    found = []
    for compiled in (None, "reduce-overhead"):
        torch.manual_seed(0)
        precision = mprun.Precision(mode)
        layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
        model = precision.prepare(layers.to(DEVICE))
        optimizer = mprun.optim.for_policy(mode, torch.optim.AdamW, model.parameters(), lr=1e-3)
        called = model if compiled is None else torch.compile(model, mode=compiled)
        x = torch.randn(32, 64, generator=seeded(3)).to(DEVICE)
        with precision.switches():
            for _ in range(8):
                optimizer.zero_grad()
                precision.begin_step()
                loss = precision.loss(
                    nn.functional.mse_loss, precision.forward(called, x), x[:, :1]
                )
                precision.backward(loss)
                precision.step(optimizer)
                precision.update()
        found.append(float(loss))
    assert found[1] == pytest.approx(found[0], rel=2e-2)  # other fusions cast at other places


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_one_process_by_torchrun(kind: str) -> None:
    words = [*MNIST, "precision=bf16_mixed", f"parallel={kind}", f"device={DEVICE.type}"]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=1", "-m", "mprun", *words, "run.dir=run"),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert read_summary(Path("run")).status == "completed"
