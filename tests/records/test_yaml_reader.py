"""The one loader of YAML: plain values alone, bounded in size and depth."""

from __future__ import annotations

import math

import pytest
from omegaconf import OmegaConf

from mprun.config import compose
from mprun.records.reader import DEEPEST, MAX_VALUES, NotYamlError, load_yaml
from tests.fuzz.damage import BROKEN_YAML

PLAIN = ("just text", "- a\n- list", "17")
"""YAML, but no configuration."""


@pytest.mark.parametrize("text", [x for x in BROKEN_YAML if "\udcff" not in x])
def test_what_is_refused_raises_one_kind_of_error(text: str) -> None:
    if text in PLAIN:
        assert isinstance(load_yaml(text), str | int | list)
        return
    with pytest.raises(NotYamlError) as caught:
        load_yaml(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize("mode", ["fp32", "bf16_mixed"])
def test_a_configuration_is_read_as_omegaconf_reads_it(mode: str) -> None:
    resolved = compose(["recipe=mnist", f"precision={mode}", "train.lr=1e-7"]).resolved
    assert load_yaml(OmegaConf.to_yaml(OmegaConf.create(resolved))) == resolved


def test_scalars() -> None:
    text = "[1e-3, 1.5e3, 1_000, 0x10, 1e5x, 2020-13-45, no, ~, .5, -1E+2, '1e-3', 1.0e-05, <<]"
    assert load_yaml(text) == [
        *(1e-3, 1.5e3, 1000, 16, "1e5x", "2020-13-45", False, None, 0.5, -100.0, "1e-3"),
        *(1e-5, "<<"),
    ]
    inf, nan = load_yaml("[-.inf, .nan]")
    assert (inf, math.isnan(nan)) == (-math.inf, True)


def test_a_line_is_named() -> None:
    with pytest.raises(NotYamlError, match=r"^line 3: the key 'a' is written twice$"):
        load_yaml("a: 1\nb: 2\na: 3\n")
    with pytest.raises(NotYamlError, match=r"^line 2: "):
        load_yaml("a: 1\nb: !!python/name:os.system\n")


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
@pytest.mark.parametrize("depth", [DEEPEST + 1, 500, 5_000, 500_000])
def test_deep_nesting_is_refused(opening: str, depth: int) -> None:
    with pytest.raises(NotYamlError):
        load_yaml(opening * depth)


def test_aliases_count_as_often_as_they_are_used() -> None:
    row = ", ".join(["x"] * 10)
    text = f"a0: &a0 [{row}]\n"
    for n in range(1, 40):
        text += f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n"
    with pytest.raises(NotYamlError, match=f"more than {MAX_VALUES:,} values"):
        load_yaml(text)
    merged = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 40)
    )
    with pytest.raises(NotYamlError):
        load_yaml(merged)
