"""What is known of a machine without timing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mprun.train.machine import machine as module
from mprun.train.machine.doctor_result import Cuda, Machine
from mprun.train.machine.machine import (
    INSTRUCTIONS,
    architecture,
    compiled_code,
    cpu_quota,
    examine_machine,
    onednn,
    tensor_cores,
    threads_to_measure,
)
from tests.schema import conforms
from tests.train.machine import machine

CPU = torch.device("cpu")


def test_this_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # read at the start of the process: text alone
    monkeypatch.setenv("MKL_NUM_THREADS", "")
    found = examine_machine(CPU)
    assert conforms(found, Machine)
    assert list(found.instructions) == list(INSTRUCTIONS.get(architecture(), {}))
    assert set(found.hardware.accelerated) == {"bfloat16", "float16"}
    assert found.threads == torch.get_num_threads()
    assert found.variables["OMP_NUM_THREADS"] == "7"
    assert "MKL_NUM_THREADS" not in found.variables
    assert found.cuda is None


def test_a_system_without_load_or_capabilities_has_unknowns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "getloadavg")
    monkeypatch.setattr(module.platform, "system", lambda: "Plan9")
    monkeypatch.setattr(module, "architecture", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    found = examine_machine(CPU)
    assert conforms(found, Machine)
    assert found.load_average is None
    assert found.instructions["AVX2"] is True
    assert found.instructions["AMX-BF16"] is None


# ---- oneDNN --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "version"),
    [
        ("- Intel(R) MKL-DNN v3.13.3 (Git Hash 1)", "3.13.3"),
        ("- oneDNN v4.0 (Git Hash 1)", "4.0"),
        ("PyTorch built with:\n  - GCC 13", None),
    ],
)
def test_the_version_is_found_in_either_spelling(
    shown: str, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.__config__, "show", lambda: shown)
    assert onednn().version == version


# ---- GPUs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((6, 1), []),
        ((7, 5), ["float16"]),
        ((8, 0), ["float16", "tf32", "bfloat16"]),
        ((8, 9), ["float16", "tf32", "bfloat16", "float8"]),
        ((9, 0), ["float16", "tf32", "bfloat16", "float8"]),
    ],
)
def test_tensor_cores_by_compute_capability(
    capability: tuple[int, int], expected: list[str]
) -> None:
    assert tensor_cores(capability) == expected


class Properties:
    multi_processor_count = 132


@pytest.mark.parametrize(("hip", "units"), [(None, ["float16"]), ("6.4", None)])
def test_a_gpu_is_described(
    hip: str | None, units: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**34))
    assert module.cuda(torch.device("cuda")) == Cuda(
        compute_capability="7.5",
        tensor_cores=units,
        multiprocessors=132,
        memory_free_bytes=2**30,
    )


@pytest.mark.parametrize(
    ("available", "tool", "built_for", "expected"),
    [
        (True, None, "13.0", "cpu asked for"),
        (False, None, "13.0", None),
        (False, "/usr/bin/nvidia-smi", None, "no cuda in torch"),
        (False, "/usr/bin/nvidia-smi", "13.0", "not usable"),
    ],
)
def test_why_no_gpu_is_examined(
    available: bool,
    tool: str | None,
    built_for: str | None,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(module.shutil, "which", lambda name: tool)
    monkeypatch.setattr(module, "DRIVER", Path("no/such/file"))
    assert module.gpu_unused() == expected


# ---- a container's share of the cores ------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "x y"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.5),
        ({}, None),  # a system without control groups
    ],
    ids=str,
)
def test_a_quota_is_read_from_control_groups_of_both_versions(
    files: dict[str, str], cores: float | None, tmp_path: Path
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert cpu_quota(tmp_path) == cores


# ---- how many threads rates are measured with ----------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "threads"),
    [
        ({}, 8),
        ({"load_average": 1.1}, 6),
        ({"load_average": 7.9}, 1),
        ({"load_average": 4.0, "threads": 4}, 4),
        ({"load_average": None}, 8),
        ({"cores_total": None, "load_average": 50.0}, 8),
        ({"cpu_quota": 2.5}, 2),
        # 4 of 16 cores are this process's; the load is the whole machine's
        ({"cores_total": 16, "threads": 4, "load_average": 13.5}, 2),
    ],
    ids=str,
)
def test_threads_are_those_that_have_a_core(changes: dict[str, Any], threads: int) -> None:
    assert threads_to_measure(machine("AVX2", **changes)) == threads


@given(
    st.integers(1, 256),
    st.integers(1, 256),
    st.none() | st.floats(0, 1000),
    st.none() | st.floats(0.01, 256),
)
def test_there_is_one_thread_and_never_more_than_pytorch_s(
    threads: int, cores: int, load: float | None, quota: float | None
) -> None:
    where = machine(threads=threads, cores_total=cores, load_average=load, cpu_quota=quota)
    assert 1 <= threads_to_measure(where) <= threads


def test_folders_of_compiled_code_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/here")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/there")
    assert compiled_code() == "/here, /there"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert compiled_code().endswith("/.triton/cache")
    assert "torchinductor_" in compiled_code()
