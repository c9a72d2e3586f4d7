"""A run's forward and backward pass once more, in another precision, beside the run.

A probe has a model of its own, made from the plan: what is tried on it leaves weights, running
statistics and random numbers of the run as they are. Dropout draws what it draws in the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.resources import files

import yaml  # type: ignore[import-untyped]
from torch import Tensor, nn

from mprun.assemble.machine_choices import choose_fp32_fallback
from mprun.assemble.plan import Plan
from mprun.assemble.precision_parts import build_arithmetic, build_caster
from mprun.data import Batch
from mprun.numerics.gradients import LargestGradients
from mprun.numerics.updates import own_random_numbers
from mprun.precision import Clip, Policy, Precision, StaticLossScale, backend_flags
from mprun.precision.policy import torch_dtype

EXACT = "fp32"
"""The policy of reference passes."""


def shipped_policy(name: str) -> Policy:
    """The policy of a file in conf/precision."""
    text = (files("mprun.conf") / "precision" / f"{name}.yaml").read_text(encoding="utf-8")
    return Policy(**{"overflow": "infinity", **yaml.safe_load(text)})


def as_planned_in(chosen: Plan, short: str) -> Policy:
    """The plan's way of computing, with another 16-bit dtype.

    Args:
        chosen: the plan; of a float32 mode the mixed mode is taken.
        short: fp16 or bf16.
    """
    old = chosen.policy
    stored_low = old.casting == "none" and old.is_low
    policy = shipped_policy(f"{short}_{'true' if stored_low else 'mixed'}")
    output = policy.output_dtype if old.output_dtype == "float32" else policy.compute_dtype
    casting = old.casting if chosen.op_lists else policy.casting
    return replace(policy, casting=casting, output_dtype=output)


def _dtypes(layers: Mapping[str, str]) -> dict[str, str]:
    """Layers without their rounding, which is that of the run and not of a probe's policy."""
    return {name: "fp16" if mode == "half_sr_full" else mode for name, mode in layers.items()}


class Probe:
    """A model like the plan's, in another precision.

    Args:
        chosen: the plan of the run.
        policy: the precision; float32 leaves layers of their own and op lists out.
    """

    def __init__(self, chosen: Plan, policy: Policy) -> None:
        exact = policy.name == EXACT
        self._plan = replace(
            chosen,
            policy=policy,
            execution="native",
            op_lists=None if exact else chosen.op_lists,
            layers={} if exact else _dtypes(chosen.layers),
            fp32_fallback=choose_fp32_fallback(
                chosen.config.speed.name, policy, "native", chosen.device
            ),
        )
        self.loss = 0.0
        """The mean loss of the last pass, unscaled."""
        self._scale = StaticLossScale(1.0, chosen.device)
        self._precision = Precision(
            policy,
            build_caster(self._plan),
            build_arithmetic(self._plan),
            self._scale,
            Clip(),
            layers=self._plan.layers,
        )
        with self._untouched():
            model = chosen.recipe.model()
        self.model = self._precision.prepare(model, chosen.device, chosen.speed.torch_memory_format)

    def gradients(
        self,
        run: nn.Module,
        batch: Batch,
        scale: float = 1.0,
        seen: LargestGradients | None = None,
        inside: Callable[[nn.Module], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> dict[str, Tensor]:
        """The unscaled gradients of the run's next step, in float64, by parameter.

        Args:
            run: the run's model, whose weights and buffers are taken.
            batch: the step's samples.
            scale: the loss scale.
            seen: is told of the loss; enter its `following` of `model` around the call.
            inside: makes a region of the probe's model, with the run's weights, to compute in.
        """
        self.model.load_state_dict(run.state_dict())
        self.model.train()
        self.model.zero_grad()
        self._scale.tensor.fill_(scale)
        with self._untouched(), backend_flags(self._plan.policy), inside(self.model):
            self._pass(batch, seen)
            return {
                name: p.grad.double() / scale
                for name, p in self.model.named_parameters()
                if p.grad is not None
            }

    def _pass(self, batch: Batch, seen: LargestGradients | None) -> None:
        precision, size = self._precision, self._plan.batch.micro
        dtype = torch_dtype(self._plan.policy.input_dtype)
        precision.begin_step(1)
        self.loss = 0.0
        for x, y in zip(batch.inputs.split(size), batch.targets.split(size), strict=True):
            inputs = x.to(dtype) if x.is_floating_point() else x
            output = precision.forward(self.model, inputs)
            loss = precision.loss(self._plan.recipe.loss, output, y, len(y) / batch.size)
            if seen is not None:
                seen.follow(loss)
            precision.backward(loss)
            self.loss += loss.item()

    def _untouched(self) -> AbstractContextManager[None]:
        return own_random_numbers([self._scale.tensor])
