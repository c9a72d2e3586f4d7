"""The table of other hardware, and what a configuration would not do there."""

import pytest

from mprun.inspect.check.check_result import TARGETS as NAMES
from mprun.inspect.check.check_result import ModeChecks
from mprun.inspect.check.check_targets import (
    TABLE,
    TARGETS,
    Configuration,
    FormatUse,
    figure,
    refused_or_different,
    target_findings,
    target_lines,
)

FORMATS = ("bfloat16", "float16", "tf32", "fp8", "mxfp8", "nvfp4", "float16 partials", "float64")
GIB = 2**30


def figures(name: str, native: bool = False) -> dict[str, str]:
    """What a target does with each format that it does not run as asked."""
    said = {
        x: figure(refused_or_different(name, Configuration({x: FormatUse()}, native)))
        for x in FORMATS
    }
    return {x: how for x, how in said.items() if how != "as asked"}


def kinds(name: str, wanted: Configuration) -> list[str]:
    return [x.kind for x in refused_or_different(name, wanted)]


def test_each_target_of_the_settings_has_a_row_with_sources() -> None:
    assert (*TARGETS,) == NAMES
    for target in TARGETS.values():
        for row in (target, *target.lacks.values()):
            assert {*row.source.split(", ")} <= {*TABLE.sources}
        assert target.memory_gib == sorted(target.memory_gib)


@pytest.mark.parametrize(
    ("name", "different"),
    [
        ("t4", {"bfloat16", "tf32", "fp8", "mxfp8", "nvfp4"}),
        ("v100", {"bfloat16", "tf32", "fp8", "mxfp8", "nvfp4"}),
        ("a100", {"fp8", "mxfp8", "nvfp4"}),
        ("h100", {"mxfp8", "nvfp4"}),
        ("mps", {"tf32", "fp8", "mxfp8", "nvfp4", "float16 partials", "float64"}),
        (
            "cpu-avx2",
            {"bfloat16", "float16", "tf32", "fp8", "mxfp8", "nvfp4", "float16 partials"},
        ),
    ],
)
def test_a_target_has_the_formats_of_its_hardware(name: str, different: set[str]) -> None:
    expected = dict.fromkeys(different, "differs")
    if name == "mps":
        expected["float64"] = "refused"
    assert figures(name) == expected


def test_native_execution_is_refused_where_only_an_emulation_can_be() -> None:
    assert figures("h100", native=True) == dict.fromkeys(("mxfp8", "nvfp4"), "refused")
    t4 = figures("t4", native=True)
    assert t4.pop("bfloat16") == "differs"  # PyTorch's own kernels compute it
    assert {*t4.values()} == {"refused"}


def test_float32_and_what_the_hardware_has_give_nothing() -> None:
    for name in TARGETS:
        assert kinds(name, Configuration()) == []
        assert kinds(name, Configuration({"float32": FormatUse("layer")})) == []
    assert kinds("h100", Configuration({"bfloat16": FormatUse()}, True, False, 80 * GIB)) == []


@pytest.mark.parametrize("name", ["t4", "v100", "a100", "h100", "mps"])
def test_float16_without_a_loss_scale_is_found_on_each_gpu(name: str) -> None:
    uses = {"float16": FormatUse()}
    assert kinds(name, Configuration(uses, scaled=True)) == []
    (found,) = refused_or_different(name, Configuration(uses, scaled=False))
    assert found.kind == "target_differs"
    assert "loss_scale=none" in found.text


def test_a_step_that_needs_more_memory_than_any_model_has_is_refused() -> None:
    assert kinds("t4", Configuration(peak_bytes=16 * GIB)) == []
    (refused,) = refused_or_different("t4", Configuration(peak_bytes=17 * GIB))
    assert (refused.kind, refused.text) == ("target_refuses", "a step takes 17 GiB, and it has 16")
    (larger,) = refused_or_different("v100", Configuration(peak_bytes=17 * GIB))
    assert (larger.kind, "32 GiB" in larger.text) == ("target_differs", True)
    assert kinds("mps", Configuration(peak_bytes=1000 * GIB)) == []


def test_a_finding_names_the_targets_the_module_and_what_was_measured() -> None:
    wanted = Configuration({"bfloat16": FormatUse("head", measured="the first step agrees")})
    (found,) = target_findings(["t4", "h100", "v100", "t4"], wanted)
    assert found.module == "head"
    assert found.text.startswith("on t4, v100: bfloat16: no units")
    assert found.text.endswith("rounded; the first step agrees")
    (unmeasured,) = target_findings(["cpu-avx2"], Configuration({"bfloat16": FormatUse()}))
    assert unmeasured.text.endswith("not run here in that arithmetic")


def test_the_lines_say_which_modes_run_as_asked() -> None:
    modes = [
        ModeChecks("fp32", "fp32", figures={"target t4": "as asked", "target h100": "as asked"}),
        ModeChecks("bf16", "bf16", figures={"target t4": "differs", "target h100": "as asked"}),
        ModeChecks("late", "fp32"),
    ]
    t4 = "t4: as asked: fp32; differs: bf16; not checked: late"
    assert list(target_lines(["t4"], modes)) == [t4]
    assert list(target_lines(["h100"], modes[:2])) == ["h100: runs as asked"]
    assert "CUDA 12.6" in next(target_lines(["v100"], modes))
