"""How far each mode's first step is from float32's: signal-to-quantisation-noise ratios.

    python -m benchmarks.sqnr

For each recipe and mode, one forward and backward pass of the initial model on the first batch, as
the run itself would do it. SQNR = 10 log10(sum of squares of the float32 values / sum of squares of
the differences), in dB: 6 dB a bit. Gradients are unscaled; all parameters' are taken together.
"""

from __future__ import annotations

from datetime import date

import torch
from torch import Tensor

from mprun.config import compose
from mprun.precision import backend_flags
from mprun.precision.rounding import sqnr_db
from mprun.train.assemble import build_parts, make_plan
from mprun.train.machine.machine import cpu_name

MODES = ("tf32", "bf16_mixed", "fp16_mixed")


def first_step(recipe: str, precision: str) -> tuple[Tensor, Tensor]:
    """Outputs and gradients of a mode's first step, each as one flat float64 tensor."""
    args = [f"recipe={recipe}", f"precision={precision}", "device=cpu", "train.batch_size=64"]
    plan = make_plan(compose(args).config, ())
    with backend_flags(plan.policy, plan.native_tf32):
        parts = build_parts(plan)
        batch = next(parts.train.epoch(None))
        output = parts.precision.forward(parts.model, *batch.parts[0].inputs[:-1])
        loss = parts.precision.loss(parts.recipe.loss, output, batch.parts[0].content)
        parts.precision.backward(loss)
    scale = parts.precision.loss_scale.tensor
    factor = 1.0 if scale is None else scale.item()
    gradients = [
        p.grad.double().flatten() / factor for p in parts.model.parameters() if p.grad is not None
    ]
    return output.detach().double().flatten(), torch.cat(gradients)


def main() -> None:
    """Print a line per recipe and mode."""
    print(f"{date.today()}  {cpu_name()}, torch {torch.__version__}, batch 64, seed 0")
    for recipe in ("linear", "mnist", "fashion_mnist"):
        exact = first_step(recipe, "fp32")
        for mode in MODES:
            low = first_step(recipe, mode)
            out, grad = (sqnr_db(a, b) for a, b in zip(exact, low, strict=True))
            print(f"{recipe:14} {mode:11} outputs {out:6.1f} dB   gradients {grad:6.1f} dB")


if __name__ == "__main__":
    main()
