"""An answer of `mprun advise` as code: one short Python file for each framework.

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
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jinja2

from mprun.config.schema import LossScaleConfig

FOLDER = "snippets"
NAMES = ("pytorch.py", "lightning.py", "trainer.py")
# A growth interval that no training reaches; GradScaler counts steps in int32
MAX_INTERVAL = 2**31 - 1


def snippets(answer: Snippet) -> dict[str, str]:
    """File name, in the folder `snippets`, to Python code: one for each framework."""
    made = _environment()
    return {f"{FOLDER}/{name}": made.get_template(f"{name}.j2").render(s=answer) for name in NAMES}


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
    environment.filters |= {
        "repr": repr,
        "quoted": _quoted,
        "indented": _indented,
        "block": lambda text: text.removesuffix("\n"),  # the template's own line has an end
    }
    return environment


@dataclass(frozen=True)
class ListsAnswer:
    """Ops cast by name: `mprun.precision.op_lists`."""

    lower: tuple[str, ...]
    fp32: tuple[str, ...]
    promote: tuple[str, ...]
    first_input: bool


@dataclass(kw_only=True)
class Snippet:
    """How to train, in which precision: what code for another loop needs, as the templates ask."""

    title: str  # `bf16_sr for recipe mnist`
    notes: tuple[str, ...]  # Where it comes from: comments at the top of the code
    device: str  # What it was measured on: cpu or cuda
    execution: str  # native or emulated
    mode: str  # The mode's name
    columns: Mapping[str, Any]  # The whole row of the mode, without its name
    is_shipped: bool  # Whether `mprun.policy(mode)` exists
    changes: Mapping[str, Any]  # Columns that differ from those of the shipped mode
    lists: ListsAnswer | None
    layers: dict[str, str]  # Modules in a precision of their own
    scale: LossScaleConfig  # Its name is none, static or dynamic, and its value is set
    optimizer: str | None  # The import path of its class; None: the recipe makes its own
    optimizer_args: Mapping[str, Any]  # Without `lr`
    lr: float
    clip_norm: float | None
    compile: bool
    left_out: tuple[str, ...]  # What the code does not contain: `train.accumulate=4`

    def __post_init__(self) -> None:
        stored = ("param_dtype", "momentum_dtype", "variance_dtype")
        stores_low = any(self.columns[key] != "float32" for key in stored)
        # Frameworks' own 16-bit modes would do something else: Lightning's `bf16-true` rounds the
        # targets of the loss too, and an optimizer of PyTorch in bfloat16 loses small updates
        special = stores_low or self.lists or self.layers or self.changes
        self.by_mprun = bool(special) or not self.is_shipped
        self.autocast = self.columns["casting"] != "none" and not self.by_mprun
        """Whether the framework's own autocast does it."""
        self.compute = f"torch.{self.columns['compute_dtype']}"
        self.tf32 = bool(self.columns["tf32"])
        self.scales = self.scale.name != "none"
        self.float16_autocast = self.autocast and self.columns["compute_dtype"] == "float16"
        self.on_cuda = self.device == "cuda"
        self.rounds = stores_low or any(x != "fp32" for x in self.layers.values())
        """Whether mprun's optimizer writes 16 bits."""
        self.clips = self.clip_norm is not None and not (self.scales and self.rounds)
        """Whether clipping can be done beside a GradScaler: it cannot unscale 16-bit gradients."""
        self.policy_columns = self.changes if self.is_shipped else self.columns
        # The Trainer is built on Accelerate
        self.fp16_by_hand = self.float16_autocast and not self.on_cuda
        """Whether Accelerate refuses the mode: its fp16 needs a GPU."""
        self.own_scaler = self.scales and not (self.float16_autocast and self.on_cuda)
        """Whether the GradScaler is not the one of Accelerate's fp16."""

    @property
    def source_lines(self) -> list[str]:
        """Where the answer comes from, as lines of a docstring."""
        return [line for note in self.notes for line in textwrap.wrap(_quoted(note), 98)]

    def imports(self, more: Sequence[str]) -> list[str]:
        """Import lines: torch, and mprun where it is used."""
        needed = {
            "import torch": True,
            "import mprun": self.by_mprun,
            "import mprun.precision": self.lists is not None or not self.is_shipped,
            "import dataclasses": bool(self.changes) and self.is_shipped,
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
        if self.execution == "emulated":
            yield (
                "no equivalent: it was measured with emulated arithmetic; here PyTorch's kernels "
                "compute"
            )
        if self.columns["rounding_scope"] == "all":
            yield (
                "no equivalent: rounding of every result; only the stored parameters are rounded "
                'stochastically. mprun.Precision("half_sr_full") alone rounds every result'
            )
        if self.columns["partials_dtype"] == "float16":
            yield "no equivalent: partial sums in float16; here they are float32"
        if self.scale.name == "static":
            yield "no equivalent: GradScaler halves a static loss scale at an overflow"
        if self.optimizer is None:
            yield "no equivalent: the recipe makes its own optimizer; put it where AdamW stands"
        for text in self.left_out:
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
        mode = "policy" if self.policy_columns else f'"{self.mode}"'
        options = ", layers=LAYERS" if self.layers else ""
        options += ", op_lists=lists" if self.lists is not None else ""
        return f'{mode}, device=DEVICE, execution="native"{options}'

    def optimizer_call(
        self,
        parameters: str = "model.parameters()",
        policy: str = "precision.policy",
        lr: str = "lr",
    ) -> str:
        """The expression that makes the optimizer."""
        path = self.optimizer or "torch.optim.AdamW"
        options = "".join(f", {k}={v!r}" for k, v in self.optimizer_args.items())
        if not self.rounds:
            return f"{path}({parameters}, lr={lr}{options})"
        return f"mprun.optim.for_policy({policy}, {path}, {parameters}, lr={lr}{options})"

    @property
    def scaler(self) -> str:
        """The expression of a GradScaler."""
        return f"torch.amp.GradScaler(DEVICE, {self.scaler_options})"

    @property
    def scaler_options(self) -> str:
        """Its arguments behind the device."""
        scale = self.scale
        if scale.name == "none":  # a framework's fp16 would make one of its own
            return "enabled=False"
        given = f"init_scale={scale.value!r}"
        if scale.name == "static":
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
        if self.clip_norm is None or self.clips:
            return []
        return [
            f"no equivalent: clipping to {self.clip_norm} (GradScaler cannot unscale "
            "float16 gradients first); mprun.Precision(..., max_norm=...).step does it"
        ]

    # ---- the Trainer, which is built on Accelerate -----------------------------------------------

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
            notes += [f"no equivalent: clipping to {self.clip_norm} beside a loss scale"]
        return notes


def _indented(text: str, by: int = 4) -> str:
    return textwrap.indent(text.rstrip("\n"), " " * by)


def _quoted(text: str) -> str:
    """Text that can stand in a docstring: from a record, so without quotes and backslashes."""
    clean = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return clean.replace("\\", "/").replace('"', "'")
