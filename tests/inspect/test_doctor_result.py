"""What doctor found on the terminal, from machines made up."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from rich.console import Console

from mprun.inspect.machine_examination import conclusions, findings
from mprun.records.console.fitted_table import FittedTable
from mprun.train.machine.doctor_result import (
    Examination,
    Machine,
    machine_table,
    rates_table,
)
from tests.schema import conforms
from tests.train.machine import (
    H100,
    WITH_BF16,
    Speedups,
    gpu,
    machine,
    measured,
    modes,
    rates,
    ratio,
)

BOTH: Speedups = {"bfloat16": 4.21, "float16": 0.026}


def examined(where: Machine = WITH_BF16, **changes: Any) -> Examination:
    """An examination of a machine with fast bfloat16 and slow float16."""
    found = measured(where, BOTH, modes(("matmul",)), **changes)
    return replace(found, findings=findings(found), conclusions=conclusions(found))


def shown(part: FittedTable | str) -> list[str]:
    """The lines of a part, each run of spaces as one."""
    console = Console(file=io.StringIO(), force_terminal=False)
    console.print(part, highlight=False, markup=False, soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def row(found: Examination, what: str) -> str:
    """The text beside `what` in the machine's table."""
    lines = shown(machine_table(found))
    return next(line.removeprefix(f"{what} ") for line in lines if line.startswith(f"{what} "))


def test_the_examination_made_up_is_what_the_schema_says() -> None:
    assert conforms(examined(), Examination)


# ---- the machine ---------------------------------------------------------------------------------


def test_a_cpu_is_described() -> None:
    found = examined()
    assert row(found, "device") == "cpu, Some CPU"
    assert row(found, "memory") == "16 GiB"
    assert row(found, "cores") == "8 usable of 8; threads by default 8"
    assert row(found, "CPU instructions") == (
        "AVX2 yes, AVX512 yes, AVX512-BF16 yes, AVX512-FP16 no, AMX-BF16 no, AMX-FP16 no; "
        "PyTorch's own kernels: AVX512"
    )
    assert row(found, "oneDNN") == "3.13.3; takes bfloat16 yes, float16 no"
    assert row(found, "environment") == "-"
    assert row(found, "versions") == "mprun 0.1.0, python 3.12.0, torch 2.11.0, cuda -"
    assert row(found, "examined") == "2024-02-29T12:00:00+00:00, rates in 4.2 s"
    assert not [line for line in shown(machine_table(found)) if "GPU" in line]


def test_what_is_not_known_is_said_to_be_unknown() -> None:
    where = machine(
        architecture="riscv64",
        load_average=None,
        cores_total=None,
        onednn={"version": None, "bfloat16": None},
    )
    where.hardware.memory_bytes = None
    found = examined(where)
    assert row(found, "memory") == "unknown"
    assert row(found, "load before") == "unknown"
    assert row(found, "cores").startswith("8 usable of unknown")
    assert row(found, "CPU instructions").startswith("unknown on this architecture")
    assert row(found, "oneDNN") == "unknown version; takes bfloat16 unknown, float16 yes"


def test_a_gpu_is_described() -> None:
    found = examined(H100)
    assert row(found, "GPU") == "compute capability 9.0, 132 multiprocessors, 64 GiB free"
    assert row(found, "tensor cores") == "float16, tf32, bfloat16, float8"
    assert row(examined(gpu("6.1")), "tensor cores") == "none"
    other = gpu("9.4")
    assert other.cuda
    other.cuda.tensor_cores = None
    assert row(examined(other), "tensor cores") == "unknown"


# ---- rates and modes -----------------------------------------------------------------------------


def test_rates_have_spread_interval_and_number() -> None:
    found = rates({"bfloat16": 4.0, "float16": 0.5})
    found[1].speedup = ratio(4.0, 3.5, 4.25)
    lines = shown(rates_table(found, 6))
    assert lines[1].startswith("measured rates of matmuls in 6 threads: median")
    assert shown(rates_table(found, 1))[1].startswith("measured rates of matmuls in 1 thread: ")
    assert shown(rates_table(found, None))[1].startswith("measured rates of matmuls: median")
    assert "1000000000 operations fp32 100 (90.9-110) 1 25" in lines
    assert "1000000000 operations bf16 400 (364-440) 4.00 [3.50-4.25] 25" in lines
    assert "1000000000 operations fp16 50.0 (45.5-55.0) 0.50 [0.50-0.51] 25" in lines
    assert any("[its 95 % interval]" in line for line in lines)  # not taken for rich's markup
