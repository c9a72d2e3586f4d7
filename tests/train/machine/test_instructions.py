"""Which instructions a CPU has, as systems list them, and which of them oneDNN may not use."""

from __future__ import annotations

import platform

import pytest
import torch

from mprun.train.machine import machine as module
from mprun.train.machine.machine import (
    INSTRUCTIONS,
    NEEDED,
    architecture,
    instructions,
    linux_flags,
)

SAPPHIRE_RAPIDS = """\
processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse4_2 avx avx2 avx512f avx512bw avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8
bugs\t\t: spectre_v1

processor\t: 1
flags\t\t: fpu sse4_2 avx avx2 avx512f avx512bw avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8
"""
GRAVITON = """\
processor\t: 0
Features\t: fp asimd evtstrm aes asimdhp cpuid asimdrdm sve asimdfhm i8mm bf16
CPU part\t: 0xd40
"""


def with_cpuinfo(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(module, "content", lambda path: text)


def test_linux_lists_the_sets_of_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cpuinfo(monkeypatch, SAPPHIRE_RAPIDS)
    # cpuinfo has reported it on this processor; the system's list counts
    found = instructions("Linux", "x86_64", {"amx_fp16": True})
    assert found == {
        "AVX2": True,
        "AVX512": True,
        "AVX512-BF16": True,
        "AVX512-FP16": True,
        "AMX-BF16": True,
        "AMX-FP16": False,
    }


def test_linux_lists_the_sets_of_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cpuinfo(monkeypatch, GRAVITON)
    found = instructions("Linux", "aarch64", {})
    assert found == {"FP16": True, "BF16": True, "SVE": True, "SME": False}


def test_cores_of_two_kinds_have_what_all_of_them_have() -> None:
    both = "Features : fp bf16 svei8mm\nFeatures : fp bf16 i8mm\n"
    assert linux_flags(both) == {"fp", "bf16"}  # whole words


def test_cpuinfo_is_read_where_linux_has_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cpuinfo(monkeypatch, "processor : 0\n")
    assert instructions("Linux", "x86_64", {"avx2": True}) == {"AVX2": True}


def test_other_systems_are_described_by_cpuinfo() -> None:
    words = {"avx2": True, "avx512_f": False, "avx512_bf16": False, "architecture": "x86_64"}
    found = instructions("Windows", "x86_64", words)
    assert found == {"AVX2": True, "AVX512": False, "AVX512-BF16": False}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("AMD64", "x86_64"), ("x86_64", "x86_64"), ("arm64", "aarch64"), ("ppc64le", "ppc64le")],
)
def test_architectures_have_one_name(
    name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: name)
    assert architecture() == expected


def test_this_machine_s_answer_agrees_with_pytorch_s() -> None:
    """Two sources for one processor; a set PyTorch's kernels use must be among the instructions."""
    found = instructions(platform.system(), architecture(), torch.cpu.get_capabilities())
    level = torch.backends.cpu.get_cpu_capability()
    if level in ("AVX2", "AVX512"):
        assert found[level]
    for name, there in found.items():
        word = INSTRUCTIONS[architecture()][name].cpuinfo
        if name != "AMX-FP16":  # https://github.com/pytorch/cpuinfo/issues/312
            assert torch.cpu.get_capabilities().get(word, there) == there


def test_the_tables_name_the_same_sets() -> None:
    x86 = set(INSTRUCTIONS["x86_64"])
    assert {name for sets in NEEDED["x86_64"].values() for name in sets} <= x86
    for name, rows in NEEDED.items():
        assert set().union(*map(set, rows.values())) <= set(INSTRUCTIONS[name])
