"""Labels: unique, and no longer than they need be."""

from __future__ import annotations

from pathlib import Path

import pytest

from mprun.study.compare.load import distinguish

NATIVE = ["native"] * 9


def folders(*configs: str) -> list[Path]:
    """Folders with these configurations."""
    paths = [Path(f"run{i}") for i in range(len(configs))]
    for path, config in zip(paths, configs, strict=True):
        path.mkdir()
        (path / "config.yaml").write_text(config, encoding="utf-8")
    return paths


def labels(*configs: str, name: str = "fp32") -> list[str]:
    n = len(configs)
    return distinguish([name] * n, NATIVE[:n], folders(*configs))


def test_different_names_stay_and_no_configuration_is_read() -> None:
    missing = [Path("nowhere")] * 2
    assert distinguish(["fp32", "bf16_mixed"], NATIVE[:2], missing) == ["fp32", "bf16_mixed"]


def test_names_that_meet_are_told_apart_by_what_differs() -> None:
    paths = folders("train: {lr: 0.001, epochs: 5}", "train: {lr: 0.002, epochs: 5}", "{}")
    assert distinguish(["a", "a", "b"], NATIVE[:3], paths) == [
        "a (train.lr=0.001)",
        "a (train.lr=0.002)",
        "b",
    ]


def test_what_makes_no_variant_is_no_difference() -> None:
    a = "{seed: 1, run: {dir: a}, data: {root: x}, train: {log_every: 1, lr: 1}}"
    b = "{seed: 2, run: {dir: b}, data: {root: y}, train: {log_every: 2, lr: 2}}"
    assert labels(a, b) == ["fp32 (train.lr=1)", "fp32 (train.lr=2)"]


def test_values_are_written_as_a_user_types_them() -> None:
    assert labels("{a: null, b: true}", "{a: [x, 1], b: false}") == [
        "fp32 (a=null, b=true)",
        "fp32 (a=[x,1], b=false)",
    ]


def test_a_field_that_one_lacks_is_named_where_it_is() -> None:
    assert labels("precision: {layers: {fc1: fp16}}", "precision: {layers: {}}") == [
        "fp32 (precision.layers.fc1=fp16)",
        "fp32 (precision.layers={})",
    ]


def test_many_and_long_differences_are_cut_and_labels_stay_unique() -> None:
    first, second, third = (f"{{a: {i}, b: {i}, c: {i}, d: {i}, e: {i}}}" for i in range(3))
    assert labels(first, second, third)[0] == "fp32 (a=0, b=0, c=0, 2 more)"


def test_where_the_configuration_does_not_tell_a_number_does() -> None:
    long = "x" * 100
    assert labels(f"a: {long}1", f"a: {long}2") == [
        f"fp32 (a={'x' * 21}...)",
        f"fp32 (a={'x' * 21}...) #2",
    ]


@pytest.mark.parametrize("config", ["[", "- 1", "3", "", "a: !!python/object:os.system x"], ids=str)
def test_a_configuration_that_is_none_costs_no_comparison(config: str) -> None:
    assert labels(config, "train: {lr: 1}") == ["fp32", "fp32 (train.lr=1)"]


def test_native_and_emulated_runs_of_one_configuration() -> None:
    paths = folders("execution: auto", "execution: auto")
    assert distinguish(["tf32", "tf32"], ["native", "emulated"], paths) == [
        "tf32 (execution=native)",
        "tf32 (execution=emulated)",
    ]
