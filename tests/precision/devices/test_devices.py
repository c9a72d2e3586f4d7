"""Names of devices, what they lack, and what that changes."""

from __future__ import annotations

import pytest
import torch

from mprun.config.schema import DEVICES
from mprun.precision import devices
from mprun.train.clock import Clock, EventClock, WaitingClock, clock_for
from mprun.train.sums import DeviceReadback, MetricReadback, readback_for


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two Intel GPUs, as far as names go."""
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )


def test_the_configuration_knows_the_same_kinds() -> None:
    assert tuple(devices.BACKENDS) == DEVICES


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("auto", "xpu"),
        ("cpu:0", "cpu"),
        ("xpu", "xpu"),
        ("xpu:1", "xpu:1"),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_names_of_devices(wanted: str, found: str) -> None:
    assert devices.find(wanted) == torch.device(found)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ("xpu:2", "there are 2 here; legal here: auto, cpu, xpu, xpu:0 to xpu:1"),
        ("cuda", "PyTorch finds no CUDA here; legal here: auto, cpu, xpu"),
        ("tpu", "not a device that mprun knows (cpu, cuda, xpu, mps, hpu"),
        ("xpu:-1", "not a device that mprun knows"),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_what_is_not_here_is_refused(wanted: str, reason: str) -> None:
    with pytest.raises(ValueError, match="legal here") as refused:
        devices.find(wanted)
    assert reason in str(refused.value)


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_accelerators() -> None:
    assert devices.find("auto") == torch.device("cpu")
    assert devices.accelerator() is None
    assert devices.in_use() == []
    with pytest.raises(ValueError, match=r"legal here: auto, cpu$"):
        devices.find("cuda:1")


def test_the_clock_and_the_readback_follow_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(clock_for(torch.device("cpu"))) is Clock
    for kind, backend in devices.BACKENDS.items():
        if kind == "cpu":
            continue
        device = torch.device(kind)
        expected = EventClock if backend.events else WaitingClock
        assert type(clock_for(device)) is expected, kind
        if not (backend.events and backend.float64):
            assert type(readback_for(device)) is MetricReadback, kind
    monkeypatch.setitem(devices.BACKENDS, "cpu", devices.Backend("as a GPU"))
    assert type(readback_for(torch.device("cpu"))) is DeviceReadback


def test_a_waiting_clock_waits_on_both_sides_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(devices, "synchronize", lambda device: waited.append(device.type))
    clock = WaitingClock(torch.device("mps"))
    clock.start()
    assert waited == ["mps"]
    clock.stop()
    assert waited == ["mps", "mps"]
    (time,) = clock.take()
    assert time.ms >= 0


def test_float32_takes_the_place_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.wide(torch.ones(2)).dtype == torch.float64
    monkeypatch.setitem(devices.BACKENDS, "cpu", devices.Backend("narrow", float64=False))
    assert devices.wide(torch.ones(2, dtype=torch.float16)).dtype == torch.float32


def test_random_numbers_of_the_cpu_are_kept() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with devices.random_numbers_kept([torch.device("cpu")]):
        torch.rand(5)
    assert torch.equal(torch.get_rng_state(), before)
    devices.restore_random_states({"cuda:7": torch.zeros(16, dtype=torch.uint8)})  # not here
