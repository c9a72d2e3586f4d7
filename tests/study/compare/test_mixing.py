"""What runs of one comparison must have in common."""

from __future__ import annotations

from typing import Any

import pytest

from mprun.errors import UsageError
from mprun.study.compare.notes import ASPECTS, check_mixing, common_texts
from tests.study.compare.folders import run_of

OTHER: list[tuple[str, dict[str, Any], str]] = [
    (
        "recipes",
        {"recipe": "fashion_mnist"},
        "recipe=mnist in 2 runs; recipe=fashion_mnist in 1 run",
    ),
    ("data", {"data__name": "glyphs"}, "name=MNIST in 2 runs; name=glyphs in 1 run"),
    ("data", {"data__source": "generated"}, "source=local in 2 runs; source=generated in 1 run"),
    ("data", {"data__train_samples": 5}, "train_samples=48000 in 2 runs; train_samples=5 in 1 run"),
    ("hardware", {"hardware__device": "cuda"}, "device=cpu in 2 runs; device=cuda in 1 run"),
    ("hardware", {"hardware__name": "GPU"}, "name=Some CPU (AVX512) in 2 runs; name=GPU in 1 run"),
    ("hardware", {"hardware__cores": 4}, "cores=2 in 2 runs; cores=4 in 1 run"),
    ("hardware", {"backend__threads": 1}, "threads=2 in 2 runs; threads=1 in 1 run"),
    ("code", {"mprun_version": "9"}, "mprun=0.1.0 in 2 runs; mprun=9 in 1 run"),
    ("code", {"git_commit": "abc"}, "commit=None in 2 runs; commit=abc in 1 run"),
    ("code", {"versions__torch": "3"}, "torch=2.11.0 in 2 runs; torch=3 in 1 run"),
    ("code", {"versions__numpy": "2"}, "numpy=None in 2 runs; numpy=2 in 1 run"),
]


@pytest.mark.parametrize(("aspect", "changes", "text"), OTHER, ids=str)
def test_what_differs_is_refused_with_values_counts_and_the_fix(
    aspect: str, changes: dict[str, Any], text: str
) -> None:
    runs = [run_of(), run_of("bf16_mixed"), run_of("bf16_mixed", 1, **changes)]
    with pytest.raises(UsageError) as caught:
        check_mixing(runs, [])
    said = str(caught.value)
    assert f"the runs differ in {aspect} ({text})" in said
    assert said.endswith(f"allow it with compare.mix=[{aspect}]")
    assert check_mixing(runs, [aspect]) == [f"mixed {aspect}: {text}"]
    others = [name for name in ASPECTS if name != aspect]
    with pytest.raises(UsageError):
        check_mixing(runs, others)


def test_all_that_differs_is_said_at_once_and_what_was_allowed_stays_so() -> None:
    runs = [run_of(), run_of(seed=1, backend__threads=1, recipe="x", mprun_version="2")]
    with pytest.raises(UsageError) as caught:
        check_mixing(runs, ["code"])
    said = str(caught.value)
    assert "in recipes (recipe=mnist in 1 run; recipe=x in 1 run)" in said
    assert "in hardware (threads=2 in 1 run; threads=1 in 1 run)" in said
    assert "mprun=" not in said
    assert said.endswith("compare.mix=[recipes,hardware,code]")


def test_runs_alike_may_differ_in_what_was_measured() -> None:
    runs = [run_of(seed=i, step_ms=i + 1.0, accuracy=0.1 * i) for i in range(3)]
    assert check_mixing([*runs, run_of(hardware__accelerated={})], []) == []


def test_metrics_are_never_mixed() -> None:
    with pytest.raises(
        UsageError, match=r"different metrics \(accuracy in 1 run, loss in 2 runs\)"
    ):
        check_mixing([run_of(), *(run_of(seed=i, metric="loss") for i in (1, 2))], list(ASPECTS))


def test_words_for_what_runs_have_in_common() -> None:
    runs = [run_of(seed=i, git_commit=f"{'ab' * 20}-dirty") for i in range(3)]
    assert common_texts(runs) == {
        "recipe": "mnist",
        "data": "MNIST (local)",
        "hardware": "cpu, Some CPU (AVX512), 2 cores, 2 threads",
        "code": "mprun 0.1.0 (abababababab-dirty), torch 2.11.0, python 3.12.0",
    }
    mixed = [*runs, run_of(data__source="generated")]
    assert common_texts(mixed)["data"] == "MNIST (local) / MNIST (generated)"
