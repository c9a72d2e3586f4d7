"""Snippets of other frameworks: each is run, and computes in the dtypes that mprun computes in."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mprun
from mprun.config import compose
from mprun.precision import op_lists
from mprun.precision._torch import tree_leaves
from mprun.precision._torch_switches import backend_switches, set_backend_switches
from mprun.study.advise import plan_answer
from mprun.study.report.snippets import Snippet, snippets
from mprun.train.assemble import make_plan

MODES = ("fp32", "bf16_mixed", "fp16_mixed", "bf16_true", "fp16_true", "bf16_sr", "half_sr")
FILES = ("pytorch.py", "lightning.py", "trainer.py")
LINEAR = ("recipe=linear", "device=cpu", "execution=native", "train.optimizer.name=adamw")

Row = tuple[str, tuple[torch.dtype, ...], torch.dtype]
COMPUTES = {
    *("addmm", "native_layer_norm", "gelu", "_softmax", "exp", "mul", "add", "mean", "linear"),
}
"""ATen ops of the model below, without casts."""


class Rows(TorchDispatchMode):
    """Notes op, floating input dtypes, output dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name in COMPUTES:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            made = next(x for x in tree_leaves(result) if isinstance(x, Tensor))
            self.rows.append((name, tuple(x.dtype for x in given), made.dtype))
        return result


class Model(nn.Module):
    """A linear layer, a norm, an exponential, a softmax, a linear layer; keeps its last trace."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with Rows() as trace:
            h = self.norm(self.first(x))
            h = nn.functional.gelu(h) + torch.exp(torch.softmax(h, -1)) * 0.5
            result: Tensor = self.last(h)
        traces.append(trace.rows)
        return result


traces: list[list[Row]] = []


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 8, generator=draw), torch.randint(4, (4,), generator=draw))
        for _ in range(2)
    ]


def answer_of(mode: str, *more: str) -> Snippet:
    composed = compose([*LINEAR, f"precision={mode}", *more])
    return plan_answer(make_plan(composed.config, ()), ("Made by a test.",))


def with_lists(mode: str, layers: dict[str, str], fp32: tuple[str, ...]) -> Snippet:
    composed = compose([*LINEAR, f"precision={mode}"])
    every = ("linear", "layer_norm", "gelu", "softmax", "exp", "mul")
    lists = op_lists([name for name in every if name not in fp32], fp32)
    plan = make_plan(composed.config, ())
    policy = dataclasses.replace(plan.policy, casting="op_lists")
    plan = dataclasses.replace(plan, op_lists=lists, layers=layers, policy=policy)
    return plan_answer(plan, ("Made by a test.",))


def own_trace(mode: str, **options: Any) -> list[Row]:
    """mprun's own forward pass of the model."""
    precision = mprun.Precision(mode, device="cpu", execution="native", **options)
    model = precision.prepare(Model())
    precision.begin_step()
    output = precision.forward(model, batches()[0][0])
    assert output.dtype == torch.float32
    return traces.pop()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for files; the switches are as before at the end."""
    traces.clear()
    before = backend_switches()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the frameworks' own, about workers and logging
        yield tmp_path
    set_backend_switches(before)
    for state in (AcceleratorState, GradientState, PartialState):  # one mode in a process
        state._reset_state()


numbers = itertools.count()


def module(text: str, folder: Path) -> ModuleType:
    """The file as a user imports it."""
    path = folder / f"snippet_{next(numbers)}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def trained(text: str, file: str, folder: Path) -> tuple[nn.Module, list[Tensor]]:
    """The model after two steps, and its losses."""
    losses: list[Tensor] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        assert output.dtype == torch.float32
        loss = nn.functional.cross_entropy(output, target)
        losses.append(loss.detach())
        return loss

    options = {"output_dir": str(folder / "trainer")} if file == "trainer.py" else {}
    before = [p.detach().clone() for p in Model().parameters()]
    model = module(text, folder).train(Model(), loss_fn, batches(), lr=0.01, **options)
    after = [p.float() for p in model.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return model, losses


def check(text: str, file: str, folder: Path, wanted: list[Row]) -> nn.Module:
    model, losses = trained(text, file, folder)
    assert len(traces) == 2
    assert traces[0] == traces[1] == wanted
    assert all(loss.dtype == torch.float32 and loss.isfinite() for loss in losses)
    return model


# Transformers' Trainer takes a second for each training: in every run, once for each kind of code.
OTHERS = ["pytorch.py-*", "lightning.py-*"]


@pytest.mark.representative(*OTHERS, "trainer.py-bf16_mixed")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("file", FILES)
def test_each_snippet_computes_in_the_dtypes_of_mprun(file: str, mode: str, folder: Path) -> None:
    text = snippets(answer_of(mode))[f"snippets/{file}"]
    model = check(text, file, folder, own_trace(mode))
    stored = {p.dtype for p in model.parameters()}
    assert stored == {getattr(torch, answer_of(mode).columns["param_dtype"])}


LISTS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "ops": ({}, ("exp", "softmax")),
    "layers": ({"norm": "fp32", "last": "fp32"}, ()),
}


@pytest.mark.representative(*OTHERS, "trainer.py-ops-bf16_mixed")
@pytest.mark.parametrize("mode", ["bf16_mixed", "fp16_mixed"])
@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("file", FILES)
def test_op_lists_and_float32_layers(file: str, kind: str, mode: str, folder: Path) -> None:
    layers, fp32 = LISTS[kind]
    answer = with_lists(mode, layers, fp32)
    lists = op_lists(answer.lists.lower, answer.lists.fp32, answer.lists.promote)
    wanted = own_trace(mode, layers=layers, op_lists=lists)
    assert any(row[2] == torch.float32 for row in wanted)
    assert any(row[2] != torch.float32 for row in wanted)
    text = snippets(answer)[f"snippets/{file}"]
    assert ("init_scale=65536.0" in text) == (mode == "fp16_mixed")
    check(text, file, folder, wanted)


# ---- faults that the comparison has to find ------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "right", "wrong"),
    [
        ("bf16_mixed", "dtype=torch.bfloat16", "dtype=torch.float16"),
        ("bf16_mixed", "with torch.autocast(DEVICE, dtype=torch.bfloat16):", "if True:"),
        ("bf16_sr", '"bf16_sr"', '"half_sr"'),
    ],
)
def test_a_snippet_in_another_precision_is_noticed(
    mode: str, right: str, wrong: str, folder: Path
) -> None:
    text = snippets(answer_of(mode))["snippets/pytorch.py"]
    assert text.count(right) == 1
    trained(text.replace(right, wrong), "pytorch.py", folder)
    assert traces[0] != own_trace(mode)


# ---- what the text says --------------------------------------------------------------------------


def test_the_words_of_each_framework_on_cuda() -> None:
    text = snippets(dataclasses.replace(answer_of("fp16_mixed"), device="cuda"))
    words = {
        "pytorch.py": "torch.amp.GradScaler(DEVICE",
        "lightning.py": 'MixedPrecision("16-mixed"',
        "trainer.py": "fp16=True",
    }
    for file, word in words.items():
        assert word in text[f"snippets/{file}"]


@pytest.mark.parametrize("file", FILES)
def test_fp16_of_accelerate_on_a_cpu_is_named_as_missing(file: str) -> None:
    text = snippets(answer_of("fp16_mixed"))[f"snippets/{file}"]
    assert ("# no equivalent: fp16 of Accelerate on a CPU" in text) == (file == "trainer.py")


def test_the_switches_of_float32_and_tf32(folder: Path) -> None:
    answer = dataclasses.replace(answer_of("fp32"), mode="tf32")
    tf32 = dataclasses.replace(answer, columns={**answer.columns, "tf32": True})
    for given, level in ((answer, "ieee"), (tf32, "tf32")):
        for text in snippets(given).values():
            module(text, folder).set_switches()
            assert torch.backends.cuda.matmul.fp32_precision == level
            assert torch.backends.cudnn.allow_tf32 == (level == "tf32")
            assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"left_out": ("train.accumulate=4",)}, "# not in this file: train.accumulate=4"),
        ({"optimizer": None}, "# no equivalent: the recipe makes its own optimizer"),
        ({"execution": "emulated"}, "# no equivalent: it was measured with emulated arithmetic"),
    ],
)
def test_what_a_snippet_cannot_do_is_a_comment(changes: dict[str, Any], note: str) -> None:
    answer = dataclasses.replace(answer_of("bf16_sr"), **changes)
    assert all(note in text for text in snippets(answer).values())


@pytest.mark.representative("pytorch.py-*", "*-fp16_mixed-more0", "*-fp16_mixed-more3")
@pytest.mark.parametrize(
    "more",
    [
        ("train.clip_norm=1.0",),
        ("train.optimizer.name=sgd", "train.optimizer.momentum=0.9"),
        ("precision.momentum_dtype=bfloat16",),
        ("loss_scale=static", "loss_scale.value=64"),
        ("loss_scale=none",),
    ],
)
@pytest.mark.parametrize(
    "mode",
    [
        "fp16_mixed",
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("bf16_mixed", "half_sr")),
    ],
)
@pytest.mark.parametrize("file", FILES)
def test_settings_beside_the_precision_run_too(
    file: str, mode: str, more: tuple[str, ...], folder: Path
) -> None:
    answer = answer_of(mode, *more)
    text = snippets(answer)[f"snippets/{file}"]
    trained(text, file, folder)
    assert [row[2] for row in traces[0]] == [row[2] for row in own_trace(mode)]
    if answer.clip_norm is not None and "clip_norm=1.0" not in text:
        clipped = ("clip_grad_norm_(", "max_grad_norm=1.0", "gradient_clip_val=1.0")
        assert any(word in text for word in clipped) or "no equivalent: clipping" in text


def test_text_of_a_record_stays_text(folder: Path) -> None:
    hostile = ('"""\nimport os\nraise SystemExit', "a\\", "# \x1b[31m")
    answer = dataclasses.replace(
        answer_of("fp32"), title='"""\nraise SystemExit', notes=hostile, left_out=hostile
    )
    for text in snippets(answer).values():
        module(text, folder)


def test_compiled_models_are_compiled() -> None:
    answer = answer_of("bf16_mixed", "speed.compile=true")
    assert all("model.compile()" in text for text in snippets(answer).values())
