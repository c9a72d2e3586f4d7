"""Linear layers with torchao's float8 products, on GPUs that have them.

torchao's `Float8Linear` takes the place of a layer. Its three recipes are the modes of the same
names, and its emulation gives the bits of `gemms.py`. The formats in blocks (mxfp8, nvfp4) have no
native products here: torchao's need Blackwell GPUs and are prototypes.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec

import torch
from torch import nn

RECIPES = {
    "fp8_tensorwise": "tensorwise",
    "fp8_rowwise": "rowwise",
    "fp8_rowwise_hp": "rowwise_with_gw_hp",
}
"""The modes with native products, to torchao's names."""
FLOAT8_FROM = {"fp8_tensorwise": (8, 9), "fp8_rowwise": (9, 0), "fp8_rowwise_hp": (9, 0)}
"""CUDA's compute capability of the first GPUs with such products: Ada, Hopper."""


def why_not_native(gemms: str, device: torch.device) -> str | None:
    """Why products in these formats are emulated on a device; None where they need not be."""
    if gemms not in RECIPES:
        return "mprun has no native products " + (
            "of single layers" if gemms == "layers" else f"in {gemms}"
        )
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"{device.type} has no float8 matmuls"
    capability = torch.cuda.get_device_capability(device)
    if capability < FLOAT8_FROM[gemms]:
        return (
            f"this GPU has compute capability {capability[0]}.{capability[1]}, and {gemms} needs "
            f"{FLOAT8_FROM[gemms][0]}.{FLOAT8_FROM[gemms][1]}"
        )
    if find_spec("torchao") is None:
        return "torchao is not installed: pip install 'mprun[float8]'"
    return None


def convert_natively(
    model: nn.Module, names: Collection[str], gemms: str, emulate: bool = False
) -> None:
    """Replace linear layers, by their names in `model`, by torchao's; parameters stay.

    Args:
        model: on the device it trains on.
        names: the layers.
        gemms: a key of `RECIPES`.
        emulate: torchao's own emulation, which runs everywhere.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(RECIPES[gemms])
    if emulate:  # the recipes have no argument for it, and the class is frozen
        object.__setattr__(config, "emulate", True)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)
