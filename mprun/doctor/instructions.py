"""Which instructions for number formats a CPU has, and which of them oneDNN may use.

The operating system is asked first. Its list is of what a process may use: AMX, for one, needs the
kernel to save its registers. cpuinfo, which PyTorch would ask, reads the processor itself and has
reported AMX-FP16 where there was none (https://github.com/pytorch/cpuinfo/issues/312); it answers
for systems that have no list.

oneDNN compiles its kernels for the best instructions it finds, unless an environment variable
limits it (oneDNN's developer guide, "CPU Dispatcher Control"). A value it does not know is
ignored, an empty one is none, case does not matter, and ONEDNN_MAX_CPU_ISA goes before the older
DNNL_MAX_CPU_ISA even with a value it ignores (tried on oneDNN 3.13).
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Words(NamedTuple):
    """What an instruction set is called by Linux, by macOS and by cpuinfo."""

    linux: str
    macos: str | None
    cpuinfo: str


INSTRUCTIONS: dict[str, dict[str, Words]] = {
    "x86_64": {
        "AVX2": Words("avx2", "hw.optional.avx2_0", "avx2"),
        "AVX512": Words("avx512f", "hw.optional.avx512f", "avx512_f"),
        "AVX512-BF16": Words("avx512_bf16", None, "avx512_bf16"),
        "AVX512-FP16": Words("avx512_fp16", None, "avx512_fp16"),
        "AMX-BF16": Words("amx_bf16", None, "amx_bf16"),
        "AMX-FP16": Words("amx_fp16", None, "amx_fp16"),
    },
    "aarch64": {
        "FP16": Words("asimdhp", "hw.optional.arm.FEAT_FP16", "fp16_arith"),
        "BF16": Words("bf16", "hw.optional.arm.FEAT_BF16", "bf16"),
        "SVE": Words("sve", None, "sve"),
        "SME": Words("sme", "hw.optional.arm.FEAT_SME", "sme"),
    },
}
"""By architecture: the sets that decide which format is fast, by the names mprun shows."""

NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "bfloat16": ("AVX512-BF16", "AMX-BF16"),
        "float16": ("AVX512-FP16", "AMX-FP16"),
    },
    "aarch64": {"bfloat16": ("BF16",), "float16": ("FP16",)},
}
"""By architecture and format: the sets any of which makes the format fast."""

SAME_ARCHITECTURE = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}

_AVX2 = frozenset({"AVX2"})
_AVX512 = _AVX2 | {"AVX512"}
_BF16 = _AVX512 | {"AVX512-BF16"}
_FP16 = _BF16 | {"AVX512-FP16"}
_AMX = _FP16 | {"AMX-BF16"}
_AMX_FP16 = _AMX | {"AMX-FP16"}
ALLOWED: dict[str, frozenset[str]] = {
    "SSE41": frozenset(),
    "AVX": frozenset(),
    "AVX2": _AVX2,
    "AVX2_VNNI": _AVX2,
    "AVX2_VNNI_2": _AVX2,
    "AVX512_CORE": _AVX512,
    "AVX512_CORE_VNNI": _AVX512,
    "AVX512_CORE_BF16": _BF16,
    "AVX512_CORE_FP16": _FP16,
    "AVX10_1_512": _FP16,
    "AVX512_CORE_AMX": _AMX,
    "AVX10_1_512_AMX": _AMX,
    "AVX512_CORE_AMX_FP16": _AMX_FP16,
    "AVX10_1_512_AMX_FP16": _AMX_FP16,
    "AVX10_2": _FP16,
    "AVX10_2_512": _FP16,
    "AVX10_2_AMX_2": _AMX_FP16,
    "AVX10_2_512_AMX_2": _AMX_FP16,
    "DEFAULT": _AMX_FP16,
}
"""By the values of the variable: the sets of `INSTRUCTIONS` oneDNN may use on x86."""

LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def architecture() -> str:
    """The processor's architecture by Linux's name: x86_64, aarch64, ..."""
    name = platform.machine().lower()
    return SAME_ARCHITECTURE.get(name, name)


def onednn_limit(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """The variable that holds oneDNN's limit and its value in upper case, known or not."""
    for name in LIMITS:
        if environment.get(name):
            return name, environment[name].upper()
    return None


def instructions(system: str, machine: str, capabilities: Mapping[str, object]) -> dict[str, bool]:
    """The sets of `INSTRUCTIONS` that this CPU has or has not; one not known is not in it.

    Args:
        system: the operating system as `platform.system` names it.
        machine: the architecture.
        capabilities: cpuinfo's words (`torch.cpu.get_capabilities`).
    """
    rows = INSTRUCTIONS.get(machine, {})
    if system == "Linux" and (flags := linux_flags(_read(Path("/proc/cpuinfo")))):
        return {name: words.linux in flags for name, words in rows.items()}
    found = {
        name: bool(capabilities[w.cpuinfo]) for name, w in rows.items() if w.cpuinfo in capabilities
    }
    if system == "Darwin":
        found |= macos_instructions(_sysctl(), machine)
    return found


def linux_flags(text: str) -> frozenset[str]:
    """What all cores in the text of /proc/cpuinfo share; empty where it has no such line."""
    lists = [
        frozenset(line.partition(":")[2].split())
        for line in text.splitlines()
        if line.split(":", 1)[0].strip() in ("flags", "Features")
    ]
    return frozenset.intersection(*lists) if lists else frozenset()


def macos_instructions(text: str, machine: str) -> dict[str, bool]:
    """What `sysctl hw.optional` says; a name this version of macOS lacks is not in it."""
    values = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    rows = INSTRUCTIONS.get(machine, {})
    return {name: values[w.macos].strip() == "1" for name, w in rows.items() if w.macos in values}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _sysctl() -> str:
    command = ["sysctl", "hw.optional"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
