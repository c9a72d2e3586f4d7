"""How long does a whole training take, from its command to its end, by mprun and by its peers?

    python -m benchmarks.whole_command [--runs N] [--bf16]

The training is the `linear` recipe: 500 steps of about a millisecond, so that most of the time is
spent on starting, and a step is too short to hide what a library does around it. Processes take
turns, each timed from outside, files in the page cache; a peer is the least script that its
documentation gives for such a loop. mprun does what its command does: it also writes the record.
The figures are medians, and their ratio to mprun's with its 95 % interval.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from datetime import date

from benchmarks.alternate import compared
from benchmarks.start_up import seconds
from mprun.train.machine.machine import cpu_name, usable_cores

SETUP = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(64, 1024), torch.randn(64, 512)
model = nn.Linear(1024, 512)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
bf16 = sys.argv[1] == "bf16"
"""
RAW = """
for _ in range(500):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
print(loss.item())
"""
FABRIC = """
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed" if bf16 else "32-true")
model, optimizer = fabric.setup(model, optimizer)
for _ in range(500):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    fabric.backward(loss)
    optimizer.step()
print(loss.item())
"""
TRAINER = """
from lightning.pytorch import LightningModule, Trainer
class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss
    def configure_optimizers(self):
        return optimizer
class Source:
    def __iter__(self):
        return iter([(x, y)] * 500)
trainer = Trainer(accelerator="cpu", devices=1, precision="bf16-mixed" if bf16 else "32-true",
                  max_epochs=1, logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), Source())
print(trainer.callback_metrics["train_loss"].item())
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, mixed_precision="bf16" if bf16 else "no")
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(500):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
print(loss.item())
"""
KERAS = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras
keras.config.set_dtype_policy("mixed_bfloat16" if bf16 else "float32")
layers = [keras.layers.Input((1024,)), keras.layers.Dense(512)]
model = keras.Sequential([*layers, keras.layers.Activation("linear", dtype="float32")])
model.compile(keras.optimizers.SGD(1e-3), keras.losses.MeanSquaredError())
print(model.fit(x, y, batch_size=64, epochs=500, verbose=0).history["loss"][-1])
"""
MPRUN = "import sys; from mprun.cli.main import main; sys.exit(main(sys.argv[1:]))"
PEERS = {
    "raw loop": SETUP + RAW,
    "Lightning Fabric": SETUP + FABRIC,
    "Lightning Trainer": SETUP + TRAINER,
    "Accelerate": SETUP + ACCELERATE,
    "Keras 3 on torch": SETUP + KERAS,
}


def main() -> None:
    """Print medians and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast, not float32")
    args = parser.parse_args()
    overrides = ["recipe=linear", "device=cpu"]
    overrides += ["precision=bf16_mixed" if args.bf16 else "precision=fp32"]
    rows: dict[str, list[float]] = {name: [] for name in ("mprun", *PEERS)}
    with tempfile.TemporaryDirectory() as folder:
        for n in range(args.runs + 1):
            round_s = {"mprun": seconds(MPRUN, *overrides, f"run.dir={folder}/{n}")}
            for name, code in PEERS.items():
                round_s[name] = seconds(code, "bf16" if args.bf16 else "fp32")
            if n:  # the first round reads the files
                for name, took_s in round_s.items():
                    rows[name].append(took_s)
    mode = "bf16_mixed" if args.bf16 else "fp32"
    print(
        f"{date.today()}  {cpu_name()}, {usable_cores()} cores; linear, {mode}; {args.runs} rounds"
    )
    for name, times in rows.items():
        over = compared(rows["mprun"], times)
        print(
            f"{name:18} {statistics.median(times):6.2f} s ({min(times):.2f} to {max(times):.2f}), "
            f"over mprun {over.ratio:5.2f} [{over.low:.2f}, {over.high:.2f}]"
        )


if __name__ == "__main__":
    main()
