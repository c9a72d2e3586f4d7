"""resnet's weights and batch-norm statistics are those of a raw PyTorch loop, bit for bit.

The loop is written out, with torchvision's model and torch's schedule.
`speed=plain`, the same thread count; the tolerance is zero because no operation differs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torchvision.models import resnet18

from mprun.cli.main import main
from mprun.data import DataRequest, image_splits

STEPS, BATCH, RATE = 3, 4, 0.01


def raw_loop(bf16: bool) -> torch.nn.Module:
    """The trained model."""
    request = DataRequest(source="generated", validation_fraction=0.1)
    train = image_splits("FashionMNIST", request).train
    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    for _, index in zip(range(STEPS), order.split(BATCH), strict=False):
        images = train.inputs[index].float() / 255
        images = ((images - 0.2860) / 0.3530).repeat(1, 3, 1, 1)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(images)
        F.cross_entropy(output.float(), train.targets[index]).backward()
        optimizer.step()
        schedule.step()
    return model


@pytest.mark.representative("bf16_mixed")
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
def test_weights_and_statistics_equal_a_raw_loop_bit_for_bit(precision: str) -> None:
    words = ["recipe=resnet", f"precision={precision}", "speed=plain", "device=cpu", "run.dir=run"]
    words += ["data.source=generated", "data.eval_limit=4", f"train.batch_size={BATCH}"]
    assert main([*words, f"train.max_steps={STEPS}"]) == 0
    ours = torch.load(Path("run/checkpoints/last.pt"), weights_only=True)["trainer"]["model"]

    raw = raw_loop(precision == "bf16_mixed").state_dict()
    assert raw.keys() == ours.keys()
    for key, value in raw.items():
        assert torch.equal(value, ours[key]), f"{key} differs"
