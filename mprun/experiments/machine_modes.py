"""The modes of `conf/precision/` on a machine: execution, substitutions and loss scale of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, cast

import torch

from mprun.assemble.dtype_choices import build_policy
from mprun.assemble.machine_choices import choose_execution
from mprun.config import Config, compose
from mprun.config.validate import loss_scale_kind
from mprun.config.variants import modes
from mprun.precision import Policy
from mprun.precision.execution import arithmetic_for, choose_fp32_fallback
from mprun.precision.policy import NAMED
from mprun.records.doctor_record import Format, Mode, OpName

ATEN: dict[OpName, str] = {
    "matmul": "aten.mm",
    "convolution": "aten.convolution",
    "convolution_backward": "aten.convolution_backward",
}
"""The measured ops, and their names in substitutions."""


def examine_modes(device: torch.device, accelerated: dict[str, bool]) -> list[Mode]:
    """A row for each mode, in the order of the table in `mprun.precision.policy`.

    Args:
        device: the device.
        accelerated: 16-bit dtype to whether its matmuls are faster than float32's, as measured.
    """
    order = {name: n for n, name in enumerate(NAMED)}
    names = sorted(modes(), key=lambda name: order.get(name, len(order)))
    configs = [compose([f"precision={n}", f"device={device.type}"]).config for n in names]
    return list(_rows(configs, device, accelerated))


def format_of(policy: Policy) -> Format:
    """The number format of a mode's matmuls and convolutions."""
    return "tf32" if policy.tf32 else cast(Format, policy.compute_dtype)


def _rows(
    configs: Sequence[Config], device: torch.device, accelerated: dict[str, bool]
) -> Iterator[Mode]:
    # Measured once for all modes with the same arithmetic.
    fp32_fallback: dict[tuple[str, str], str] = {}
    for config in configs:
        policy = build_policy(config)
        chosen = choose_execution(config.execution.name, policy, device, config.speed.name)
        execution = chosen.name
        alike = (policy.compute_dtype, execution)
        if alike not in fp32_fallback:
            fp32_fallback[alike] = choose_fp32_fallback(
                config.speed.name, policy, execution, device
            )
        arithmetic = arithmetic_for(policy, execution, fp32_fallback[alike], config.seed)
        substituted = {s.op for s in arithmetic.substitutions}
        native = execution == "native"
        yield Mode(
            name=policy.name,
            format=format_of(policy),
            execution=cast(Literal["native", "emulated"], execution),
            why_emulated=chosen.why_emulated,
            accelerated=accelerated.get(policy.compute_dtype) if native else None,
            substituted=[op for op, name in ATEN.items() if name in substituted],
            loss_scale=loss_scale_kind(config, ()),
            products_of_8_bits=native and policy.gemms != "none",
        )
