"""An answer of mprun as code: one short Python file for each way people train.

    pytorch.py      a loop in plain PyTorch
    lightning.py    a LightningModule and its Trainer
    accelerate.py   a loop with Hugging Face Accelerate
    trainer.py      the Hugging Face Trainer
    fsdp2.py        a loop with PyTorch's fully_shard (FSDP2), for torchrun

Each has `train(model, loss_fn, batches, lr=...)`, where `batches` gives pairs (input, target) of
tensors. The framework's own words are used where they mean the same as the measured mode. Where
they do not, mprun's public parts do it, or a comment says `no equivalent: ...` or `differs: ...`.
"""

from __future__ import annotations

from collections.abc import Callable

from mprun.records.training_answer import TrainingAnswer
from mprun.report.snippet_fsdp2 import fsdp2_lines
from mprun.report.snippet_parts import SnippetParts, indented

FOLDER = "snippets"


def snippets(answer: TrainingAnswer) -> dict[str, str]:
    """File name, in the folder `snippets`, to Python code: one for each framework."""
    parts = SnippetParts(answer)
    writers: dict[str, Callable[[SnippetParts], list[str]]] = {
        "pytorch.py": _pytorch_lines,
        "lightning.py": _lightning_lines,
        "accelerate.py": _accelerate_lines,
        "trainer.py": _trainer_lines,
        "fsdp2.py": fsdp2_lines,
    }
    return {f"{FOLDER}/{name}": "\n".join(write(parts)) + "\n" for name, write in writers.items()}


# ---- PyTorch -------------------------------------------------------------------------------------


def _pytorch_lines(parts: SnippetParts) -> list[str]:
    body = [*parts.set_up(), f"optimizer = {parts.optimizer()}"]
    body += [f"scaler = {parts.scaler()}"] * parts.scales
    step = [
        "x, y = x.to(DEVICE), y.to(DEVICE)",
        "optimizer.zero_grad()",
        *parts.forward("model", "x"),
        "loss = loss_fn(output, y)",
        *_scaled_step(parts),
    ]
    body += ["for x, y in batches:", *indented(step), "return model"]
    head = parts.head("plain PyTorch", parts.imports(), parts.clip_note())
    return [*head, *_function(parts, body)]


def _scaled_step(parts: SnippetParts) -> list[str]:
    clip = f"torch.nn.utils.clip_grad_norm_(model.parameters(), {parts.answer.clip_norm})"
    if not parts.scales:
        return ["loss.backward()", *[clip] * parts.clips, "optimizer.step()"]
    clipped = ["scaler.unscale_(optimizer)", clip] if parts.clips else []
    return ["scaler.scale(loss).backward()", *clipped, "scaler.step(optimizer)", "scaler.update()"]


def _function(parts: SnippetParts, body: list[str]) -> list[str]:
    return [
        f"def train(model, loss_fn, batches, lr={parts.answer.lr!r}):",
        '    """One step for each (input, target) of `batches`; the trained model."""',
        *indented(body),
    ]


# ---- Lightning -----------------------------------------------------------------------------------


def _lightning_lines(parts: SnippetParts) -> list[str]:
    scaled_by_hand = parts.scales and parts.by_mprun
    mixed = "from lightning.pytorch.plugins import MixedPrecision"
    plugged = scaled_by_hand or parts.float16_autocast
    imports = ["import lightning"] + [mixed] * plugged
    imports += ["import contextlib"] * scaled_by_hand
    notes = parts.clip_note()
    if parts.scales and not plugged:
        notes += ["no equivalent: a loss scale with bf16-mixed; here the loss is not scaled"]
    lines = parts.head("Lightning", parts.imports(*imports), notes)
    if scaled_by_hand:
        lines += [
            "class ScaledLoss(MixedPrecision):",
            '    """The loss scale of 16-mixed without its autocast."""',
            "",
            "    def forward_context(self):",
            "        return contextlib.nullcontext()",
            "",
            "",
        ]
    return [*lines, *_lightning_module(parts), "", "", *_function(parts, _lightning_body(parts))]


def _lightning_module(parts: SnippetParts) -> list[str]:
    precision = "precision, " if parts.by_mprun else ""
    kept = ["self.precision = precision"] if parts.by_mprun else []
    forward = [
        line.replace("precision.", "self.precision.")
        for line in parts.forward("self.model", "x", by_hand=False)
    ]
    loss = ["return self.loss_fn(output, y)"]
    if parts.autocast:
        loss = [
            "with torch.autocast(DEVICE, enabled=False):  # the loss in float32",
            "    return self.loss_fn(output.float(), y)",
        ]
    optimizer = parts.optimizer("self.model.parameters()")
    optimizer = optimizer.replace("precision.policy", "self.precision.policy")
    optimizer = optimizer.replace("lr=lr", "lr=self.lr")
    return [
        "class Training(lightning.LightningModule):",
        f"    def __init__(self, {precision}model, loss_fn, lr):",
        "        super().__init__()",
        *indented([*kept, "self.model, self.loss_fn, self.lr = model, loss_fn, lr"], 8),
        "",
        "    def training_step(self, batch, index):",
        "        x, y = batch",
        *indented([*forward, *loss], 8),
        "",
        "    def configure_optimizers(self):",
        f"        return {optimizer}",
    ]


def _lightning_body(parts: SnippetParts) -> list[str]:
    precision = 'precision="bf16-mixed"' if parts.autocast else 'precision="32-true"'
    body = parts.set_up()
    if parts.float16_autocast or (parts.scales and parts.by_mprun):
        plugin = "ScaledLoss" if parts.by_mprun else "MixedPrecision"
        # By its name, "16-mixed" becomes bf16-mixed on a CPU.
        body += [f'plugin = {plugin}("16-mixed", DEVICE, {parts.scaler()})']
        precision = "plugins=[plugin]"
    clip = [f"gradient_clip_val={parts.answer.clip_norm},"] if parts.clips else []
    accelerator = "gpu" if parts.on_cuda else "cpu"
    options = [
        f"{precision},",
        f'accelerator="{accelerator}",',
        *clip,
        "devices=1,",
        "max_epochs=1,",
        "logger=False,",
        "enable_checkpointing=False,",
    ]
    made = (
        "Training(precision, model, loss_fn, lr)"
        if parts.by_mprun
        else ("Training(model, loss_fn, lr)")
    )
    return [
        *body,
        "trainer = lightning.Trainer(",
        *indented(options),
        ")",
        f"trainer.fit({made}, iter(batches))",
        "return model",
    ]


# ---- Accelerate and the Trainer ------------------------------------------------------------------


def _fp16_by_hand(parts: SnippetParts) -> bool:
    """Whether Accelerate refuses the mode: its fp16 needs a GPU."""
    return parts.float16_autocast and not parts.on_cuda


def _own_scaler(parts: SnippetParts) -> bool:
    """Whether the GradScaler is not the one of Accelerate's fp16."""
    return parts.scales and not (parts.float16_autocast and parts.on_cuda)


def _accelerate_notes(parts: SnippetParts) -> list[str]:
    notes = parts.clip_note()
    if _fp16_by_hand(parts):
        notes += ["no equivalent: fp16 of Accelerate on a CPU; torch.autocast and GradScaler do it"]
    if _own_scaler(parts) and parts.clips:
        notes += [f"no equivalent: clipping to {parts.answer.clip_norm} beside a loss scale"]
    return notes


def _word(parts: SnippetParts) -> str:
    """Accelerate's `mixed_precision`."""
    if not parts.autocast or _fp16_by_hand(parts):
        return "no"
    return "fp16" if parts.compute == "torch.float16" else "bf16"


def _accelerate_lines(parts: SnippetParts) -> list[str]:
    by_hand, own_scaler = _fp16_by_hand(parts), _own_scaler(parts)
    imports = ["from accelerate import Accelerator"]
    options = "" if parts.on_cuda else ", cpu=True"
    if parts.float16_autocast and not by_hand:
        imports = ["from accelerate import Accelerator, GradScalerKwargs"]
        given = parts.scaler().partition("DEVICE, ")[2]
        options += f", kwargs_handlers=[GradScalerKwargs({given}]"
    clip = f"accelerator.clip_grad_norm_(model.parameters(), {parts.answer.clip_norm})"
    clips = parts.clips and not own_scaler
    step = [
        "x, y = x.to(accelerator.device), y.to(accelerator.device)",
        "optimizer.zero_grad()",
        *parts.forward("model", "x", by_hand),
        "accelerator.backward(loss_fn(output, y))",
        *[clip] * clips,
        "optimizer.step()",
    ]
    body = [
        f'accelerator = Accelerator(mixed_precision="{_word(parts)}"{options})',
        *[f"accelerator.scaler = {parts.scaler()}"] * own_scaler,
        *parts.set_up(),
        f"optimizer = {parts.optimizer()}",
        "model, optimizer = accelerator.prepare(model, optimizer)",
        "for x, y in batches:",
        *indented(step),
        "return accelerator.unwrap_model(model)",
    ]
    head = parts.head("Accelerate", parts.imports(*imports), _accelerate_notes(parts))
    return [*head, *_function(parts, body)]


def _trainer_lines(parts: SnippetParts) -> list[str]:
    by_hand, own_scaler = _fp16_by_hand(parts), _own_scaler(parts)
    imports = parts.imports("from transformers import Trainer, TrainingArguments")
    head = parts.head("the Hugging Face Trainer", imports, _accelerate_notes(parts))
    scaled = own_scaler or (parts.float16_autocast and not by_hand)
    loss = [
        *parts.forward("model", 'inputs["x"]', by_hand),
        'loss = loss_fn(output, inputs["y"])',
        "return (loss, output) if return_outputs else loss",
    ]
    override = "def compute_loss(self, model, inputs, return_outputs=False, **kwargs):"
    clip = parts.answer.clip_norm if parts.clips and not own_scaler else 0.0
    word = _word(parts)
    options = [
        "output_dir=output_dir,",
        *[f"{word}=True,"] * (word != "no"),
        *["use_cpu=True,"] * (not parts.on_cuda),
        f"max_grad_norm={clip},",
        "num_train_epochs=1,",
        "per_device_train_batch_size=1,  # an item of `batches` is a whole batch",
        'lr_scheduler_type="constant",',
        "remove_unused_columns=False,",
        'save_strategy="no",',
        'report_to="none",',
    ]
    body = [
        *parts.set_up(),
        f"optimizer = {parts.optimizer()}",
        "",
        "class Training(Trainer):",
        *indented([override, *indented(loss)]),
        "",
        "trainer = Training(",
        "    model,",
        "    TrainingArguments(",
        *indented(options, 8),
        "    ),",
        '    data_collator=lambda items: {"x": items[0][0], "y": items[0][1]},',
        "    train_dataset=list(batches),",
        "    optimizers=(optimizer, None),",
        ")",
        *[f"trainer.accelerator.scaler = {parts.scaler()}"] * scaled,
        "trainer.train()",
        "return model",
    ]
    lines = _function(parts, body)
    lines[0] = lines[0].replace("):", ', output_dir="trainer"):')
    return [*head, *lines]
