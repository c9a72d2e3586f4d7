"""What an audit reports: the closed list of kinds, and one finding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

# Every kind of finding, and what it means
KINDS = {
    "lost_update": "a step leaves most of a module's weights, or of its biases, unchanged",
    "loaded_in_16_bits": "16-bit parameters whose optimizer loses small updates",
    "norm_in_16_bits": "the weights of a normalization are among them",
    "embedding_in_16_bits": "the weights of an embedding are among them",
    "state_in_16_bits": "an optimizer keeps its moments in 16 bits and rounds them to nearest",
    "repeated_cast": "a forward pass casts the same weights to the same dtype again and again",
    "tf32": "float32 matmuls or convolutions are computed in TensorFloat-32 or bfloat16",
    "reduced_precision_reduction": "16-bit matmuls or attention accumulate in less than float32",
}


@dataclass(frozen=True)
class AuditFinding:
    """One thing that is wrong."""

    kind: str
    """One of `KINDS`."""
    module: str
    """A name of `named_modules()`; empty for the model itself."""
    text: str
    """What is wrong."""
    fix: str
    """What to do, in one line."""


def fewest_modules(
    model: nn.Module, wanted: set[nn.Parameter], among: set[nn.Parameter], prefix: str = ""
) -> Iterator[str]:
    """The names of the fewest modules that have all `wanted` parameters and no others of `among`.

    A module that has both kinds as its own parameters is named too.
    """
    held = among.intersection(model.parameters())
    if not held & wanted:
        return
    own = among.intersection(model.parameters(recurse=False))
    if held <= wanted or own & wanted:
        yield prefix
        return
    for name, child in model.named_children():
        yield from fewest_modules(child, wanted, among, f"{prefix}.{name}" if prefix else name)
