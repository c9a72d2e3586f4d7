"""An answer of mprun as code: one short Python file for each way people train.

    pytorch.py      a loop in plain PyTorch
    lightning.py    a LightningModule and its Trainer
    accelerate.py   a loop with Hugging Face Accelerate
    trainer.py      the Hugging Face Trainer
    fsdp2.py        a loop with PyTorch's fully_shard (FSDP2), for torchrun

Each is a template in `templates/`, with `train(model, loss_fn, batches, lr=...)`, where `batches`
gives pairs (input, target) of tensors. An answer is carried out in one of two ways:

    by the framework   float32, and autocast with the framework's own lists and loss scale
    by mprun           16-bit parameters, op lists, layers in a precision of their own: the
                       framework computes in float32, and `mprun.Precision` stands around the
                       model

What neither can do, a comment in the file reports: `no equivalent: ...` or `differs: ...`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import jinja2

FOLDER = "snippets"
NAMES = ("pytorch.py", "lightning.py", "accelerate.py", "trainer.py", "fsdp2.py")
# A growth interval that no training reaches; GradScaler counts steps in int32
MAX_INTERVAL = 2**31 - 1


@dataclass(frozen=True)
class ScaleAnswer:
    """The loss scale."""

    kind: str  # none, static or dynamic
    value: float  # The static factor, or the initial one
    growth_factor: float
    backoff_factor: float
    growth_interval: int


@dataclass(frozen=True)
class ListsAnswer:
    """Ops cast by name: `mprun.precision.op_lists`."""

    lower: tuple[str, ...]
    fp32: tuple[str, ...]
    promote: tuple[str, ...]
    first_input: bool


@dataclass(frozen=True, kw_only=True)
class TrainingAnswer:
    """Everything that code for another loop needs."""

    title: str  # `bf16_sr for recipe mnist`
    notes: tuple[str, ...]  # Where it comes from: comments at the top of the code
    device: str  # What it was measured on: cpu or cuda
    execution: str  # native or emulated
    mode: str  # The mode's name
    columns: Mapping[str, Any]  # The whole row of the mode, without its name
    is_shipped: bool  # Whether `mprun.policy(mode)` exists
    changes: Mapping[str, Any]  # Columns that differ from those of the shipped mode
    lists: ListsAnswer | None
    layers: Mapping[str, str]  # Modules in a precision of their own
    scale: ScaleAnswer
    optimizer: str | None
    """The import path of PyTorch's or another class; None: the recipe makes its own."""
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)  # Without `lr`
    lr: float
    clip_norm: float | None
    compile: bool = False
    left_out: tuple[str, ...] = ()
    """Parts of the training that the code does not contain: `train.accumulate=4`."""

    @property
    def stores_low(self) -> bool:
        """Whether parameters or moments have 16 bits, so that the optimizer has to round."""
        stored = ("param_dtype", "momentum_dtype", "variance_dtype")
        return any(self.columns[key] != "float32" for key in stored)

    @property
    def casts(self) -> bool:
        """Whether ops cast their inputs."""
        return bool(self.columns["casting"] != "none")


def snippets(answer: TrainingAnswer) -> dict[str, str]:
    """File name, in the folder `snippets`, to Python code: one for each framework."""
    facts = Snippet(answer)
    return {
        f"{FOLDER}/{name}": _environment().get_template(f"{name}.j2").render(s=facts)
        for name in NAMES
    }


@cache
def _environment() -> jinja2.Environment:
    folder = files("mprun.study.report") / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # it is Python, not HTML; `_quoted` cleans the text of records
    )
    environment.filters |= {"repr": repr, "indented": _indented, "block": _block}
    return environment


class Snippet:
    """What the templates ask of an answer."""

    def __init__(self, answer: TrainingAnswer) -> None:
        self.answer = answer
        self.title = _quoted(answer.title)
        # Frameworks' own 16-bit modes would do something else: Lightning's `bf16-true` rounds the
        # targets of the loss too, and an optimizer of PyTorch in bfloat16 loses small updates
        self.by_mprun = bool(
            answer.stores_low or answer.lists or answer.layers or answer.changes
        ) or (not answer.is_shipped)
        self.autocast = answer.casts and not self.by_mprun
        """Whether the framework's own autocast does it."""
        self.compute = f"torch.{answer.columns['compute_dtype']}"
        self.tf32 = bool(answer.columns["tf32"])
        self.scales = answer.scale.kind != "none"
        self.float16_autocast = self.autocast and answer.columns["compute_dtype"] == "float16"
        self.on_cuda = answer.device == "cuda"
        self.layers = dict(answer.layers)
        self.rounds = answer.stores_low or any(x != "fp32" for x in answer.layers.values())
        """Whether mprun's optimizer writes 16 bits."""
        self.clips = answer.clip_norm is not None and not (self.scales and self.rounds)
        """Whether clipping can be done beside a GradScaler: it cannot unscale 16-bit gradients."""
        self.policy_columns = answer.changes if answer.is_shipped else answer.columns

    @property
    def source_lines(self) -> list[str]:
        """Where the answer comes from, as lines of a docstring."""
        return [line for note in self.answer.notes for line in textwrap.wrap(_quoted(note), 98)]

    def imports(self, more: Sequence[str]) -> list[str]:
        """Import lines: torch, mprun where it is used, the module of another optimizer."""
        answer = self.answer
        module = (answer.optimizer or "torch.optim.AdamW").rpartition(".")[0]
        needed = {
            "import torch": True,
            f"import {module}": not module.startswith("torch.optim"),
            "import mprun": self.by_mprun,
            "import mprun.precision": answer.lists is not None or not answer.is_shipped,
            "import dataclasses": bool(answer.changes) and answer.is_shipped,
        }
        lines = [*(line for line, is_needed in needed.items() if is_needed), *more]
        return sorted(lines, key=lambda line: (line.startswith("from"), line))

    def comments(self, more: Sequence[str]) -> list[str]:
        """What a file cannot do, or leaves out, as comments."""
        lines = []
        for note in (*self._notes(), *more):
            text = _quoted(note).replace("'", '"')  # a comment has no docstring to end
            lines += textwrap.wrap(text, 98, initial_indent="# ", subsequent_indent="# ")
        return lines

    def _notes(self) -> Iterator[str]:
        answer = self.answer
        if answer.execution == "emulated":
            yield (
                "no equivalent: it was measured with emulated arithmetic; here PyTorch's kernels "
                "compute"
            )
        if answer.columns["rounding_scope"] == "all":
            yield (
                "no equivalent: rounding of every result; only the stored parameters are rounded "
                'stochastically. mprun.Precision("half_sr_full") alone rounds every result'
            )
        if answer.columns["partials_dtype"] != "float32":
            yield "no equivalent: partial sums in float16; here they are float32"
        if answer.scale.kind == "static":
            yield "no equivalent: GradScaler halves a static loss scale at an overflow"
        if answer.optimizer is None:
            yield "no equivalent: the recipe makes its own optimizer; put it where AdamW stands"
        for text in answer.left_out:
            yield f"not in this file: {text}"

    def names(self, variable: str, names: Sequence[str]) -> str:
        """`VARIABLE = "a b c".split()`, wrapped."""
        if not names:
            return f"{variable} = []"
        wrapped = textwrap.fill(
            " ".join(names), 94, initial_indent="    ", subsequent_indent="    "
        )
        return f'{variable} = """\n{wrapped}\n""".split()'

    @property
    def precision_arguments(self) -> str:
        """Those of `mprun.Precision`."""
        mode = "policy" if self.policy_columns else f'"{self.answer.mode}"'
        options = ", layers=LAYERS" if self.answer.layers else ""
        options += ", op_lists=lists" if self.answer.lists is not None else ""
        return f'{mode}, device=DEVICE, execution="native"{options}'

    def optimizer(
        self,
        parameters: str = "model.parameters()",
        seed: str = "",
        policy: str = "precision.policy",
        lr: str = "lr",
    ) -> str:
        """The expression that makes the optimizer."""
        path = self.answer.optimizer or "torch.optim.AdamW"
        options = "".join(f", {k}={v!r}" for k, v in self.answer.optimizer_args.items())
        if not self.rounds:
            return f"{path}({parameters}, lr={lr}{options})"
        return f"mprun.optim.for_policy({policy}, {path}, {parameters}, lr={lr}{options}{seed})"

    @property
    def scaler(self) -> str:
        """The expression of a GradScaler."""
        return f"torch.amp.GradScaler(DEVICE, {self.scaler_options})"

    @property
    def scaler_options(self) -> str:
        """Its arguments behind the device."""
        scale = self.answer.scale
        if scale.kind == "none":  # a framework's fp16 would make one of its own
            return "enabled=False"
        given = f"init_scale={scale.value!r}"
        if scale.kind == "static":
            return f"{given}, growth_interval={MAX_INTERVAL}"
        if (scale.growth_factor, scale.backoff_factor, scale.growth_interval) == (2, 0.5, 2000):
            return given  # PyTorch's defaults
        return (
            f"{given}, growth_factor={scale.growth_factor!r}, "
            f"backoff_factor={scale.backoff_factor!r}, growth_interval={scale.growth_interval!r}"
        )

    @property
    def clip_notes(self) -> list[str]:
        """The note where the answer clips and the file does not."""
        if self.answer.clip_norm is None or self.clips:
            return []
        return [
            f"no equivalent: clipping to {self.answer.clip_norm} (GradScaler cannot unscale "
            "float16 gradients first); mprun.Precision(..., max_norm=...).step does it"
        ]

    # ---- Accelerate, and the Trainer that is built on it -----------------------------------------

    @cached_property
    def fp16_by_hand(self) -> bool:
        """Whether Accelerate refuses the mode: its fp16 needs a GPU."""
        return self.float16_autocast and not self.on_cuda

    @cached_property
    def own_scaler(self) -> bool:
        """Whether the GradScaler is not the one of Accelerate's fp16."""
        return self.scales and not (self.float16_autocast and self.on_cuda)

    @property
    def accelerate_word(self) -> str:
        """Accelerate's `mixed_precision`."""
        if not self.autocast or self.fp16_by_hand:
            return "no"
        return "fp16" if self.float16_autocast else "bf16"

    @property
    def accelerate_notes(self) -> list[str]:
        """What Accelerate cannot do."""
        notes = self.clip_notes
        if self.fp16_by_hand:
            notes += [
                "no equivalent: fp16 of Accelerate on a CPU; torch.autocast and GradScaler do it"
            ]
        if self.own_scaler and self.clips:
            notes += [f"no equivalent: clipping to {self.answer.clip_norm} beside a loss scale"]
        return notes

    # ---- FSDP2 -----------------------------------------------------------------------------------

    @property
    def gathered(self) -> str:
        """The dtype that weights are gathered in, as an expression."""
        stored = self.answer.columns["param_dtype"]
        if stored != "float32":
            return f"torch.{stored}"
        return self.compute if self.autocast else "None"

    @property
    def fsdp2_notes(self) -> list[str]:
        """What FSDP2 cannot do, or does in another way."""
        notes, columns = self.clip_notes, self.answer.columns
        if self.autocast:
            notes += [
                f"differs: weights are gathered in {columns['compute_dtype']}, also those that "
                "autocast leaves in float32 (of norms); param_dtype=None gathers float32, as "
                "measured"
            ]
        if columns["accum_dtype"] != columns["param_dtype"]:
            notes += ["no equivalent: float32 gradients of 16-bit parameters; FSDP2 stores 16 bits"]
        if self.answer.layers:
            notes += [
                "LAYERS that are globs have to be written out: each module is sharded by itself"
            ]
        return notes


def _indented(text: str, by: int = 4) -> str:
    """The lines of a block further to the right, without the last line's end."""
    return textwrap.indent(text.rstrip("\n"), " " * by)


def _block(text: str) -> str:
    """A block without the last line's end, which the template's own line has."""
    return text.removesuffix("\n")


def _quoted(text: str) -> str:
    """Text that can stand in a docstring: from a record, so without quotes and backslashes."""
    clean = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return clean.replace("\\", "/").replace('"', "'")
