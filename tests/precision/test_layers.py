"""Modules kept in float32: names, globs, errors, and what they compute in."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn

from mprun.cli import main
from mprun.precision.caster import AutocastCaster
from mprun.precision.layers import compute_in, computing_in, resolve


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)
    )


def test_an_exact_name_wins_over_a_glob() -> None:
    assert resolve(model(), {"0": "fp32", "1*": "fp32"}) == {
        "0": "fp32",
        "1": "fp32",
        "1.0": "fp32",
        "1.1": "fp32",
    }
    assert resolve(model(), {"1.0": "a", "1.*": "b"}) == {"1.0": "a", "1.1": "b"}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"1.*": "fp32", "*.0": "fp32"}, r"1\.\* and \*\.0 both fit module '1\.0'"),
        ({"9": "fp32"}, "no module is named '9'.*legal: 0, 1, 1.0, 1.1, 2"),
        ({"1.9": "fp32"}, "did you mean '1.[01]'"),
        ({"x*": "fp32"}, "no module is named 'x\\*'"),
    ],
)
def test_mistakes_name_what_is_legal(layers: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(model(), layers)


def test_a_kept_module_computes_in_float32_inside_autocast() -> None:
    net = model()
    compute_in(net, {"2": torch.float32}, AutocastCaster("cpu", torch.bfloat16).layer_region)
    seen: dict[int, torch.dtype] = {}
    for i in (0, 2):
        net[i].register_forward_hook(lambda m, a, out, i=i: seen.update({i: out.dtype}))
    with torch.autocast("cpu", torch.bfloat16):
        out = net(torch.randn(3, 4))
    assert seen == {0: torch.bfloat16, 2: torch.float32}
    out.sum().backward()
    assert net[2].weight.grad is not None


def test_it_equals_autocast_switched_off_by_hand() -> None:
    torch.manual_seed(0)
    net, x = model(), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = net[1](net[0](x))
        with torch.autocast("cpu", enabled=False):
            by_hand = net[2](hidden.float())
    compute_in(net, {"2": torch.float32}, AutocastCaster("cpu", torch.bfloat16).layer_region)
    with torch.autocast("cpu", torch.bfloat16):
        ours = net(x)
    assert torch.equal(ours, by_hand)


def test_by_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=fashion_mnist", "data.source=generated", "precision=bf16_mixed"]
    words += ["train.max_steps=1", "data.eval_limit=32", "run.dir=run"]
    assert main([*words, "precision.layers={fc*: fp32, conv1: fp32}"]) == 0
    from pathlib import Path

    from mprun.record import read_summary

    layers = read_summary(Path("run"))["effective"]["layers"]
    assert layers == {"fc1": "fp32", "fc2": "fp32", "conv1": "fp32"}
    assert main([*words, "precision.layers={fc9: fp32}"]) == 2
    assert "no module is named 'fc9'; did you mean 'fc2'" in capsys.readouterr().err
    assert main([*words, "precision.layers={fc1: fp64}"]) == 2
    assert "fp32" in capsys.readouterr().err


def test_by_a_file() -> None:
    from pathlib import Path

    from mprun.record import read_summary

    Path("layers.yaml").write_text("fc1: fp32\n", encoding="utf-8")
    words = ["recipe=fashion_mnist", "data.source=generated", "precision=bf16_mixed"]
    words += ["train.max_steps=1", "data.eval_limit=32", "run.dir=run"]
    assert main([*words, "precision.layers_file=layers.yaml"]) == 0
    assert read_summary(Path("run"))["effective"]["layers"] == {"fc1": "fp32"}
    Path("layers.yaml").write_text("fc1: int4\n", encoding="utf-8")
    assert main([*words, "precision.layers_file=layers.yaml"]) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_modules_can_compute_in_another_dtype_for_a_while(fails: bool) -> None:
    m, x = model(), torch.randn(2, 4)
    caster = AutocastCaster("cpu", torch.bfloat16)
    compute_in(m, {"2": torch.float32}, caster.layer_region)
    lasting = m[2].forward
    with (
        suppress(KeyError),
        computing_in(m, {"0": torch.bfloat16, "1.0": torch.bfloat16}, caster.layer_region),
    ):
        assert m[1](m[0](x)).dtype == torch.bfloat16
        assert m(x).dtype == torch.float32  # the last layer is
        if fails:
            raise KeyError
    assert m[1](m[0](x)).dtype == torch.float32
    assert "forward" not in vars(m[0])
    with computing_in(m, {"2": torch.bfloat16}, caster.layer_region):
        assert m[2].forward is not lasting
    assert m[2].forward is lasting
