"""Labels: unique, and no longer than they need be."""

from __future__ import annotations

from pathlib import Path

from mprun.study.compare.load import distinguish
from tests.each import each

LONG = "x" * 100
# Configurations of variants of one name to their labels
CASES: dict[str, tuple[list[str], list[str]]] = {
    "what differs": (
        ["train: {lr: 0.001, epochs: 5}", "train: {lr: 0.002, epochs: 5}"],
        ["fp32 (train.lr=0.001)", "fp32 (train.lr=0.002)"],
    ),
    "what makes no variant is no difference": (
        [
            "{seed: 1, run: {dir: a}, data: {root: x}, train: {log_every: 1, lr: 1}}",
            "{seed: 2, run: {dir: b}, data: {root: y}, train: {log_every: 2, lr: 2}}",
        ],
        ["fp32 (train.lr=1)", "fp32 (train.lr=2)"],
    ),
    "values as a user types them": (
        ["{a: null, b: true}", "{a: [x, 1], b: false}"],
        ["fp32 (a=null, b=true)", "fp32 (a=[x,1], b=false)"],
    ),
    "a field that one lacks": (
        ["precision: {layers: {fc1: fp16}}", "precision: {layers: {}}"],
        ["fp32 (precision.layers.fc1=fp16)", "fp32 (precision.layers={})"],
    ),
    "many differences": (
        [f"{{a: {i}, b: {i}, c: {i}, d: {i}, e: {i}}}" for i in range(3)],
        [f"fp32 (a={i}, b={i}, c={i}, 2 more)" for i in range(3)],
    ),
    "long differences": (
        [f"a: {LONG}1", f"a: {LONG}2"],
        [f"fp32 (a={'x' * 21}...)", f"fp32 (a={'x' * 21}...) #2"],
    ),
    **{
        f"no configuration: {text}": ([text, "train: {lr: 1}"], ["fp32", "fp32 (train.lr=1)"])
        for text in ("[", "- 1", "3", "", "a: !!python/object:os.system x")
    },
}


def folders(configs: list[str]) -> list[Path]:
    """Folders with these configurations."""
    paths = [Path(f"run{i}") for i in range(len(configs))]
    for path, config in zip(paths, configs, strict=True):
        path.mkdir()
        (path / "config.yaml").write_text(config, encoding="utf-8")
    return paths


@each("case", CASES)
def test_equal_names_are_told_apart_by_their_configurations(case: str) -> None:
    configs, labels = CASES[case]
    n = len(configs)
    assert distinguish(["fp32"] * n, ["native"] * n, folders(configs)) == labels


def test_different_names_stay_and_no_configuration_is_read() -> None:
    names, missing = ["fp32", "bf16_mixed"], [Path("nowhere")] * 2
    assert distinguish(names, ["native"] * 2, missing) == names


def test_native_and_emulated_runs_of_one_configuration() -> None:
    paths = folders(["execution: auto", "execution: auto"])
    assert distinguish(["tf32", "tf32"], ["native", "emulated"], paths) == [
        "tf32 (execution=native)",
        "tf32 (execution=emulated)",
    ]
