"""The parts that the snippets of all frameworks share: lines of Python for an answer.

An answer is carried out in one of two ways:

    by the framework   float32, and autocast with the framework's own lists and loss scale
    by mprun           16-bit parameters, op lists, layers in a precision of their own: the
                       framework computes in float32, and `mprun.Precision` stands around the
                       model

In the second way the framework's own 16-bit modes would do something else: Lightning's `bf16-true`
rounds the targets of the loss too, and an optimizer of PyTorch in bfloat16 loses small updates.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from mprun.records.training_answer import TrainingAnswer

MAX_INTERVAL = 2**31 - 1
"""A growth interval that no training reaches."""


def torch_name(dtype: object) -> str:
    """`torch.bfloat16`."""
    return f"torch.{dtype}"


class SnippetParts:
    """Lines of code for one answer; lists of lines have no indentation of their own."""

    def __init__(self, answer: TrainingAnswer) -> None:
        self.answer = answer
        self.by_mprun = bool(
            answer.stores_low or answer.lists or answer.layers or answer.changes
        ) or (not answer.is_shipped)
        self.autocast = answer.casts and not self.by_mprun
        """Whether the framework's own autocast does it."""
        self.compute = torch_name(answer.columns["compute_dtype"])
        self.scales = answer.scale.kind != "none"
        self.float16_autocast = self.autocast and answer.columns["compute_dtype"] == "float16"
        self.on_cuda = answer.device == "cuda"

    # ---- the top of a file -----------------------------------------------------------------------

    def head(self, framework: str, imports: Sequence[str], notes: Sequence[str] = ()) -> list[str]:
        """Docstring, imports, the device and the switches."""
        answer = self.answer
        lines = [f'"""{_quoted(answer.title)} in {framework}.', ""]
        lines += [part for note in answer.notes for part in _wrapped(_quoted(note))]
        lines += ['"""', ""]
        lines += sorted(imports, key=lambda line: (line.startswith("from"), line))
        lines += ["", f'DEVICE = "{answer.device}"  # what the answer was measured on']
        lines += [part for note in (*self.notes(), *notes) for part in _commented(note)]
        if answer.lists is not None:
            lines += [*_names("LOWER", answer.lists.lower), *_names("FLOAT32", answer.lists.fp32)]
            lines += _names("WIDEST", answer.lists.promote)
        if answer.layers:
            lines += [f"LAYERS = {dict(answer.layers)!r}"]
        return [*lines, "", "", *self._switches(), "", ""]

    def imports(self, *more: str) -> list[str]:
        """Import lines: torch, mprun where it is used, the module of another optimizer."""
        optimizer = self.answer.optimizer or "torch.optim.AdamW"
        module = optimizer.rpartition(".")[0]
        other = [f"import {module}"] if not module.startswith("torch.optim") else []
        own = ["import mprun"] * self.by_mprun
        own += ["import mprun.precision"] * self._names_precision
        own += ["import dataclasses"] * (bool(self.answer.changes) and self.answer.is_shipped)
        return ["import torch", *own, *other, *more]

    @property
    def _names_precision(self) -> bool:
        """Whether a line says `mprun.precision.`: for op lists, and for a user's own mode."""
        return self.answer.lists is not None or not self.answer.is_shipped

    def notes(self) -> Iterator[str]:
        """What these files cannot do, or leave out."""
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

    def _switches(self) -> list[str]:
        tf32 = bool(self.answer.columns["tf32"])
        what = "TensorFloat-32" if tf32 else "IEEE float32, not TensorFloat-32"
        lines = [
            "def set_switches():",
            f'    """float32 matmuls and convolutions compute in {what}."""',
            f'    torch.set_float32_matmul_precision("{"high" if tf32 else "highest"}")',
            f"    torch.backends.cudnn.allow_tf32 = {tf32}",
        ]
        for short in ("bf16", "fp16"):
            name = f"allow_{short}_reduced_precision_reduction"
            lines += [f"    torch.backends.cuda.matmul.{name} = False"]
        return lines

    # ---- lines inside functions ------------------------------------------------------------------

    def set_up(self) -> list[str]:
        """Switches, and the model in its precision on its device."""
        if not self.by_mprun:
            return ["set_switches()", "model.to(DEVICE)", *self._compiled()]
        made = [*self._lists_lines(), *self._precision(), "precision.prepare(model)"]
        return ["set_switches()", *made, *self._compiled()]

    def _compiled(self) -> list[str]:
        return ["model.compile()"] if self.answer.compile else []

    def _lists_lines(self) -> list[str]:
        if self.answer.lists is None:
            return []
        first = "" if self.answer.lists.first_input else ", first_input=False"
        return [f"lists = mprun.precision.op_lists(LOWER, FLOAT32, WIDEST{first})"]

    def _precision(self) -> list[str]:
        answer = self.answer
        options = ", layers=LAYERS" if answer.layers else ""
        options += ", op_lists=lists" if answer.lists is not None else ""
        mode, lines = f'"{answer.mode}"', []
        if not answer.is_shipped or answer.changes:
            columns = answer.changes if answer.is_shipped else answer.columns
            make = ["mprun.precision.Policy(", f'    name="{answer.mode}",']
            if answer.is_shipped:
                make = ["dataclasses.replace(", f'    mprun.policy("{answer.mode}"),']
            lines = [f"policy = {make[0]}", make[1]]
            lines += [*(f"    {name}={value!r}," for name, value in columns.items()), ")"]
            mode = "policy"
        call = f'precision = mprun.Precision({mode}, device=DEVICE, execution="native"{options})'
        return [*lines, call]

    def optimizer(self, parameters: str = "model.parameters()", seed: str = "") -> str:
        """The expression that makes the optimizer."""
        path = self.answer.optimizer or "torch.optim.AdamW"
        options = "".join(f", {k}={v!r}" for k, v in self.answer.optimizer_args.items())
        if not (self.answer.stores_low or self._low_layers()):
            return f"{path}({parameters}, lr=lr{options})"
        given = f"precision.policy, {path}, {parameters}, lr=lr{options}{seed}"
        return f"mprun.optim.for_policy({given})"

    @property
    def rounds(self) -> bool:
        """Whether mprun's optimizer writes 16 bits."""
        return self.answer.stores_low or self._low_layers()

    def _low_layers(self) -> bool:
        return any(value != "fp32" for value in self.answer.layers.values())

    def scaler(self) -> str:
        """The expression of a GradScaler."""
        scale = self.answer.scale
        if scale.kind == "none":  # a framework's fp16 would make one of its own
            return "torch.amp.GradScaler(DEVICE, enabled=False)"
        if scale.kind == "static":
            given = f"init_scale={scale.value!r}, growth_interval={MAX_INTERVAL}"
        else:
            given = f"init_scale={scale.value!r}"
            if (scale.growth_factor, scale.backoff_factor, scale.growth_interval) != (2, 0.5, 2000):
                given += (
                    f", growth_factor={scale.growth_factor!r}, "
                    f"backoff_factor={scale.backoff_factor!r}, "
                    f"growth_interval={scale.growth_interval!r}"
                )
        return f"torch.amp.GradScaler(DEVICE, {given})"

    @property
    def clips(self) -> bool:
        """Whether clipping can be done beside a GradScaler: it cannot unscale 16-bit gradients."""
        return self.answer.clip_norm is not None and not (self.scales and self.rounds)

    def clip_note(self) -> list[str]:
        """The note where the answer clips and the file does not."""
        if self.answer.clip_norm is None or self.clips:
            return []
        return [
            f"no equivalent: clipping to {self.answer.clip_norm} (GradScaler cannot unscale "
            "float16 gradients first); mprun.Precision(..., max_norm=...).step does it"
        ]

    def forward(self, model: str, x: str, by_hand: bool = True) -> list[str]:
        """`output = ...`: floating outputs in float32.

        Args:
            model, x: expressions.
            by_hand: whether autocast is written out; else the framework enters it.
        """
        if self.by_mprun:
            return [f"output = precision.forward({model}, {x})"]
        if self.autocast and by_hand:
            return [
                f"with torch.autocast(DEVICE, dtype={self.compute}):",
                f"    output = {model}({x})",
                "output = output.float()",
            ]
        return [f"output = {model}({x})"]


def indented(lines: Sequence[str], by: int = 4) -> list[str]:
    """The lines further to the right; empty ones stay empty."""
    return [" " * by + line if line else line for line in lines]


def _quoted(text: str) -> str:
    """Text that can stand in a docstring: from a record, so without quotes and backslashes."""
    clean = " ".join(text.split())
    return (
        "".join(c if c.isprintable() else "?" for c in clean).replace("\\", "/").replace('"', "'")
    )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 98)


def _commented(text: str) -> list[str]:
    return textwrap.wrap(
        _quoted(text).replace("'", '"'), 98, initial_indent="# ", subsequent_indent="# "
    )


def _names(variable: str, names: Sequence[str]) -> list[str]:
    """`VARIABLE = "a b c".split()`, wrapped."""
    if not names:
        return [f"{variable} = []"]
    wrapped = textwrap.wrap(" ".join(names), 90)
    return [f'{variable} = """', *indented(wrapped), '""".split()']
