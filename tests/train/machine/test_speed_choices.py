"""The table of choices that change a step's time and not what it computes."""

from __future__ import annotations

import pytest
import torch

from mprun.train.machine.speed_choices import SpeedChoice, choose


@pytest.mark.parametrize(
    ("speed", "device", "dtype", "optimizer", "amx", "memory_format", "implementation"),
    [
        ("plain", "cpu", "float32", "adamw", False, "contiguous", "forloop"),
        ("plain", "cpu", "bfloat16", "sgd", False, "contiguous", "forloop"),
        ("plain", "cuda", "float32", "adamw", False, "contiguous", "foreach"),
        ("auto", "cuda", "float32", "adamw", False, "contiguous", "fused"),
        ("auto", "cuda", "bfloat16", "sgd", False, "contiguous", "foreach"),
        # What reads on the device whether a step is skipped
        ("auto", "cuda", "float16", "sgd", False, "contiguous", "fused"),
        ("auto", "cuda", "float16", "rmsprop", False, "contiguous", "triton"),
        ("auto", "cpu", "float32", "adamw", True, "channels_last", "fused"),
        ("auto", "cpu", "bfloat16", "adamw", True, "contiguous", "fused"),
        ("auto", "cpu", "bfloat16", "adamw", False, "channels_last", "fused"),
        ("auto", "cpu", "float16", "adamw", False, "contiguous", "fused"),
        ("auto", "cpu", "float32", "sgd", False, "channels_last", "forloop"),
        ("auto", "cpu", "bfloat16", "rmsprop", True, "contiguous", "forloop"),
    ],
)
def test_the_table(
    speed: str,
    device: str,
    dtype: str,
    optimizer: str,
    amx: bool,
    memory_format: str,
    implementation: str,
) -> None:
    expected = SpeedChoice(memory_format, implementation)
    assert choose(speed, device, dtype, optimizer, amx) == expected


def test_images_take_the_memory_format_and_keep_their_values() -> None:
    images, rows = torch.rand(2, 3, 4, 4), torch.rand(2, 3)
    last = SpeedChoice("channels_last", "forloop")
    assert last.torch_memory_format is torch.channels_last
    assert last.inputs(images).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last.inputs(images), images)
    assert last.inputs(rows) is rows
