"""Mistakes in a recipe's own code, by real runs: one line with error, place and remedy."""

from __future__ import annotations

import multiprocessing
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from mprun.cli.main import main
from mprun.errors import first_line
from mprun.records.run_record import read_summary
from mprun.train.assemble import recipe_loading
from tests.run.processes import Forking

pytestmark = pytest.mark.usefixtures("native_is_fast", "quick_runs")

PARTS = {
    "head": """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
METRIC = ("loss", "min")
""",
    "model": "def model():\n    return nn.Linear(4, 1)\n",
    "data": """
def data():
    x = torch.linspace(-1, 1, 64).view(16, 4)
    return {"train": (x, x[:, :1]), "validation": (x[:4], x[:4, :1])}
""",
    "loss": "def loss(output, batch):\n    return F.mse_loss(output, batch[1])\n",
}
RUN = ("train.max_steps=2", "train.batch_size=8", "train.lr=0.01", "device=cpu", "run.dir=r")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Files that other tests ran are forgotten."""
    monkeypatch.setattr(recipe_loading, "_loaded", {})
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    line: str
    """The last of stderr."""
    mark: int
    """The line of the recipe that has the comment HERE."""


def ended(
    capfd: pytest.CaptureFixture[str], *words: str, command: str = "train", **parts: str
) -> Ended:
    """Run a command on the recipe with other parts; everything else in stderr is a notice."""
    text = "".join((PARTS | parts).values())
    Path("mine.py").write_text(text, encoding="utf-8")
    marks = [n for n, line in enumerate(text.splitlines(), 1) if line.endswith("# HERE")]
    status = main([command, "recipe=mine.py", *RUN, *words])
    captured = capfd.readouterr()
    assert "Traceback" not in captured.err + captured.out
    lines = captured.err.splitlines()
    assert sum(line.startswith("mprun: ") for line in lines) == 1, captured.err
    return Ended(status, lines[-1], marks[0] if marks else 0)


def written_traceback() -> str:
    return Path("r/traceback.txt").read_text(encoding="utf-8")


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
{forward}
def model():
    return Net()
"""


def net(forward: str) -> str:
    """A model with this forward, indented by a level."""
    return NET.format(forward="".join(f"    {line}\n" for line in forward.splitlines()))


READS = """
class Points(Dataset):
    def __len__(self): return 16
    def __getitem__(self, i):
        {body}
def data():
    return {{"train": Points(), "validation": None}}
"""

IN_RUNS: dict[str, tuple[dict[str, str], str, list[str]]] = {
    "loss": (
        {"loss": "def loss(output, batch):\n    return helper(batch)\n"
         "def helper(batch):\n    return batch['y']  # HERE\n"},
        "in helper",
        ["TypeError"],
    ),
    "forward": (
        {"model": net("def forward(self, x):\n    raise ValueError('so not')  # HERE")},
        "in Net.forward",
        ["ValueError: so not"],
    ),
    "optimizer": (
        {"optimizer": "def optimizer(model):\n    return torch.optim.SGD(model.nope)  # HERE\n"},
        "in optimizer",
        ["AttributeError"],
    ),
    "metric": (
        {
            "metrics": "class Off:\n    def update(self, output, batch):\n"
            "        raise KeyError('gone')  # HERE\n    def compute(self): return 0\n"
            "def metrics(): return {'off': Off()}\n"
        },
        "in Off.update",
        ["metric 'off': update raised KeyError: 'gone'"],
    ),
    "item": (
        {"data": READS.format(body="raise ValueError(f'bad row')  # HERE")},
        "in Points.__getitem__",
        ["ValueError: bad row"],
    ),
    "embedding": (
        {
            "model": net(
                "def forward(self, x):\n"
                "    return F.embedding(x.long() + 9, self.layer.weight)  # HERE"
            )
        },
        "in Net.forward",
        ["index out of range in self", "num_embeddings"],
    ),
    "classes": (
        {"loss": "def loss(output, batch):\n"
         "    return F.nll_loss(output, batch[1][:, 0].long() + 5)  # HERE\n"},
        "in loss",
        ["is out of bounds", "0 to the number of outputs - 1"],
    ),
    "dtype of classes": (
        {"loss": "def loss(output, batch):\n"
         "    return F.cross_entropy(output, batch[1][:, 0])  # HERE\n"},
        "in loss",
        ["Long", "target.long()", "mse_loss"],
    ),
    "float64": (
        {"loss": "def loss(output, batch):\n"
         "    return (torch.ones(8, 8).double() @ output).mean()  # HERE\n"},
        "in loss",
        ["same dtype", "x.float()"],
    ),
    "no Exception": (
        {
            "model": "class Own(BaseException): pass\n"
            + net("def forward(self, x):\n    raise Own('mine')  # HERE")
        },
        "in Net.forward",
        ["Own: mine"],
    ),
    "no text": (
        {"loss": "class Bad(Exception):\n    def __str__(self): return 1 / 0\n"
         "    __repr__ = __str__\n"
         "def loss(output, batch):\n    raise Bad()  # HERE\n"},
        "in loss",
        ["Bad: its text cannot be shown: __str__ raised ZeroDivisionError"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", IN_RUNS)
def test_a_mistake_in_a_run_is_one_line_with_its_place(
    case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    parts, function, fragments = IN_RUNS[case]
    status, line, mark = ended(capfd, **parts)
    assert status == 1
    assert re.search(rf"\(mine\.py:{mark or '[0-9]+'}, {re.escape(function)}\)", line) or (
        sys.version_info < (3, 11)
    ), line
    assert all(fragment in line for fragment in fragments), line
    assert "the traceback is in r/traceback.txt" in line
    assert "mine.py" in written_traceback()
    summary = read_summary(Path("r"))
    assert summary.status == "failed"
    assert "mine.py" in str(summary.error)
    assert "\n" not in str(summary.error)


def test_an_item_in_a_worker_process(capfd: pytest.CaptureFixture[str]) -> None:
    data = READS.format(body="raise ValueError('bad row')  # HERE")
    status, line, mark = ended(capfd, "data.workers=2", data=data)
    assert status == 1
    assert "ValueError: bad row (mine.py:" in line
    assert f"mine.py:{mark}, in __getitem__, in a DataLoader worker" in line
    assert "Original Traceback" in written_traceback()


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_several_shapes(workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    data = READS.format(body="return torch.ones(2 + i % 2), torch.ones(1)")
    status, line, _ = ended(capfd, f"data.workers={workers}", data=data)
    assert status == 1
    assert "in a DataLoader worker" in line if workers else "equal size" in line
    assert "pad or convert them in the data set, or give a DataLoader with a collate_fn" in line


def test_a_model_that_returns_none(capfd: pytest.CaptureFixture[str]) -> None:
    model = net("def forward(self, x):\n    self.layer(x)")
    status, line, _ = ended(capfd, model=model)
    assert status == 1
    assert "the model returned None" in line
    assert "return" in line
    assert "traceback.txt" in line
    brought = ended(capfd, "run.dir=r2", model=model, loss="")
    assert "the model returned None" in brought.line


def test_a_float32_tensor_in_a_16_bit_mode(capfd: pytest.CaptureFixture[str]) -> None:
    model = net("def forward(self, x):\n    return self.layer(x * torch.ones(4))  # HERE")
    status, line, mark = ended(capfd, "precision=bf16_true", model=model)
    assert status == 1
    assert f"mine.py:{mark}" in line
    assert "precision=bf16_true" in line
    assert "dtype=x.dtype" in line
    assert "precision.layers" in line


def test_a_forward_of_other_arguments_is_told_what_the_batch_holds(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = net("def forward(self, x, mask):  # HERE\n    return self.layer(x)")
    status, line, mark = ended(capfd, model=model)
    assert status == 1
    assert "forward() missing 1 required positional argument: 'mask'" in line
    assert f"mine.py:{mark}" in line
    assert "the batch holds (float32 [8, 4], float32 [8, 1])" in line
    assert "a function forward(model, batch) decides" in line


@pytest.mark.parametrize(
    ("loss", "fragment"),
    [("return None", "loss returned None"), ("return output", "it is not a scalar")],
)
def test_a_loss_that_is_none_has_its_place(
    loss: str, fragment: str, capfd: pytest.CaptureFixture[str]
) -> None:
    status, line, mark = ended(capfd, loss=f"def loss(output, batch):  # HERE\n    {loss}\n")
    assert status == 1
    assert fragment in line
    assert line.endswith(f"(mine.py:{mark}, in loss)")


def test_a_shape_that_broadcasts_is_warned_of_once(forking: Forking) -> None:
    loss = "def loss(output, batch):\n    return F.mse_loss(output, batch[1][:, 0])\n"
    Path("mine.py").write_text("".join((PARTS | {"loss": loss}).values()), encoding="utf-8")
    ended = forking.run(["recipe=mine.py", *RUN, "train.batch_size=7"], Path.cwd())
    log = Path("log.txt").read_text(encoding="utf-8")
    assert ended == 0, log
    assert log.count("UserWarning: Using a target size (torch.Size([7])") == 1


INSPECTING = ("trace", "numerics", "memory", "search-ops")
BEFORE: dict[str, tuple[dict[str, str], list[str]]] = {
    "no model": (
        {"model": "def model():  # HERE\n    nn.Linear(4, 1)\n"},
        ["model() of mine returned None", "MARK, in model", "legal is a torch.nn.Module"],
    ),
    "a name": (
        {"data": "def data():\n    return nowhere  # HERE\n"},
        ["the data of mine cannot be made: NameError", "MARK, in data"],
    ),
    "no data": (
        {"data": "def data():\n    return {'train': (torch.ones(0, 4), torch.ones(0, 1))}\n"},
        ["mine has no training sample"],
    ),
    "import": (
        {"import": "from torch import nothing_like_it  # HERE\n"},
        ["cannot be loaded: ImportError: cannot import name 'nothing_like_it'", "(MARK)"],
    ),
    "package": (
        {"import": "import not_there.at_all  # HERE\n"},
        ["ModuleNotFoundError", "(MARK)", "pip install not_there,"],
    ),
    "renamed package": (
        {"import": "raise ModuleNotFoundError(\"No module named 'sklearn'\", name='sklearn')\n"},
        ["pip install scikit-learn,"],
    ),
    "syntax": ({"import": "def f(:  # HERE\n"}, ["invalid syntax"]),
}


@pytest.mark.parametrize("case", BEFORE)
def test_a_mistake_before_the_run_makes_no_folder(
    case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    parts, fragments = BEFORE[case]
    status, line, mark = ended(capfd, **parts)
    assert status == 2
    assert not Path("r").exists()
    for fragment in fragments:
        assert fragment.replace("MARK", f"mine.py:{mark}") in line, line


@pytest.mark.parametrize("command", INSPECTING)
def test_commands_that_inspect_a_step_show_the_same(
    command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    loss = "def loss(output, batch):\n    raise ValueError('so not')  # HERE\n"
    status, line, mark = ended(
        capfd,
        "numerics.warmup=0" if command == "numerics" else "seed=0",
        command=command,
        loss=loss,
    )
    assert status == 1
    assert f"ValueError: so not (mine.py:{mark}, in loss)" in line
    assert "the traceback is in r/traceback.txt" in line
    assert "in loss" in written_traceback()


MISMATCH = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.second(x + torch.ones(4))  # float32, whatever the model is
def model():
    return Net()
"""


def test_a_trace_names_the_op_of_a_mismatch(capfd: pytest.CaptureFixture[str]) -> None:
    status, line, _ = ended(capfd, "precision=bf16_true", command="trace", model=MISMATCH)
    assert status == 1
    assert "addmm in the forward pass of module second with inputs in bfloat16 and float32" in line
    assert "precision=bf16_mixed" in line
    assert "Traceback" in written_traceback()


@pytest.mark.parametrize("command", ["sweep", "advise"])
def test_studies_show_it_for_each_run(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    loss = "def loss(output, batch):\n    raise ValueError('so not')  # HERE\n"
    text = "".join((PARTS | {"loss": loss}).values())
    Path("mine.py").write_text(text, encoding="utf-8")
    words = ["recipe=mine.py", *RUN[1:], "precision=fp32,bf16_mixed", "seeds=1"]
    words += ["train.max_steps=2"] if command == "sweep" else ["advise.max_steps=2"]
    assert main([command, *words]) == 1
    captured = capfd.readouterr()
    print(captured)
    assert "Traceback" not in captured.err + captured.out
    place = f"ValueError: so not (mine.py:{text.splitlines().index(loss.splitlines()[1]) + 1}, in"
    assert place in " ".join((captured.out + captured.err).split())
    assert Path("r/fp32-seed0/traceback.txt").exists()


@pytest.mark.parametrize("part", ["model", "data"])
def test_what_is_no_exception_ends_a_plan_in_one_line(
    part: str, capfd: pytest.CaptureFixture[str]
) -> None:
    body = f"def {part}():\n    raise GeneratorExit('bye')  # HERE\n"
    status, line, mark = ended(capfd, **{part: body})
    assert status == 2
    assert f"GeneratorExit: bye (mine.py:{mark}, in {part})" in line
    assert not Path("r").exists()


def test_a_line_of_a_record_is_bounded() -> None:
    assert len(first_line(ValueError("x" * 10**7))) < 600
    assert first_line(ValueError("short")) == "short"


KILLED = """
class Points(Dataset):
    def __len__(self): return 16
    def __getitem__(self, i):
        if torch.utils.data.get_worker_info() is not None:
            import os
            os._exit(3)
        return torch.zeros(4), torch.zeros(1)
def data():
    return {"train": Points(), "validation": None}
"""


def test_a_worker_that_ends_itself_is_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    status, line, _ = ended(capfd, "data.workers=1", data=KILLED)
    assert status == 1
    assert "exited unexpectedly" in line
    assert not multiprocessing.active_children()
