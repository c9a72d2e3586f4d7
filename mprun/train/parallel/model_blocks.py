"""The blocks of a model: the parts that FSDP2 shards.

A transformer's blocks are its layers. They are recognized by their class: it is repeated, has parts
of its own, and holds the most parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from mprun.precision.gemms import has_own_products

# Modules whose weights autocast casts wherever they are used
CASTS_WEIGHTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # Modules that only hold others


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of each block, in the order of the model.

    Blocks are the outermost modules of the class that appears at least twice and holds the most
    parameters. Classes whose modules have parts with parameters come before layers such as
    `nn.Linear`, containers such as `nn.Sequential` do not count. Without such a class, blocks are
    the model's direct children with parameters.
    """
    classes = _repeated(model)
    composite = [
        own for own in classes if any(_parameters([x]) for _, m in own for x in m.children())
    ]
    best = max(composite or classes, key=lambda own: _parameters([m for _, m in own]), default=[])
    if best:
        return best
    return [(path, m) for path, m in model.named_children() if _parameters([m])]


def _repeated(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """The outermost modules of each class that has two or more with parameters."""
    by_class: dict[type, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        own = by_class.setdefault(type(module), [])
        outer = [f"{name}." for name, _ in own]  # a block inside one of its class belongs to that
        if path and not path.startswith(tuple(outer)) and _parameters([module]):
            own.append((path, module))
    return [
        own for kind, own in by_class.items() if len(own) > 1 and not issubclass(kind, CONTAINERS)
    ]


def _parameters(modules: Sequence[nn.Module]) -> int:
    """Numbers in the parameters of the modules, shared ones once."""
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})


def cast_modules(model: nn.Module) -> list[str]:
    """Paths of the modules whose parameters autocast casts, without those that share some.

    Layers whose products have formats of their own read their weights as they are stored.
    """
    uses = Counter(p for m in model.modules() for p in m.parameters(recurse=False))
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, CASTS_WEIGHTS)
        and not has_own_products(module)
        and all(uses[p] == 1 for p in module.parameters())
    ]
