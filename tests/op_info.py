"""PyTorch's table of its operators with sample inputs (`OpInfo`)."""

from __future__ import annotations

import functools
import itertools
import sys
import types
import unittest
from typing import Any
from unittest import mock

import torch


@functools.cache
def op_infos() -> tuple[Any, ...]:
    """Every entry of `op_db` that takes float32.

    The table is part of PyTorch's test machinery, whose import needs the package `expecttest` for
    a base class. A stand-in is enough, as none of its tests run here. The import also forbids to
    set backend switches for the rest of the process, which is kept from happening.
    """
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    before = sys.modules.get("expecttest")
    sys.modules["expecttest"] = before or stub
    try:
        with mock.patch.object(torch.backends, "disable_global_flags"):
            from torch.testing._internal.common_methods_invocations import op_db
    finally:
        if before is None:
            del sys.modules["expecttest"]
    own = (op for op in op_db if torch.float32 in op.dtypes and "jiterator" not in op.name)
    return tuple(own)


def title(op: Any) -> str:
    """An entry's name, with that of its variant."""
    variant = f" ({op.variant_test_name})" if op.variant_test_name else ""
    return f"{op.name}{variant}"


def samples(op: Any, count: int, requires_grad: bool = False) -> list[Any]:
    """The first sample inputs in float32; the same ones in every call."""
    torch.default_generator.manual_seed(0)
    wanted = requires_grad and op.supports_autograd
    drawn = op.sample_inputs("cpu", torch.float32, requires_grad=wanted)
    return list(itertools.islice(drawn, count))
