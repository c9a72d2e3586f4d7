"""A recipe in a file through every command, with real runs: `mprun recipe=my.py`."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mprun.cli.main import main
from mprun.records.run_record import Summary, read_lines, read_summary
from mprun.train.assemble import recipe_loading
from tests.parity.raw_loop import RawLoop, assert_same, drawn

pytestmark = pytest.mark.usefixtures("quick_runs", "native_is_fast")

RECIPE = '''"""A tiny regression.

Not shown.
"""
import torch
import torch.nn.functional as F
from torch import nn

DEFAULTS = {"train.lr": 1e-2, "train.batch_size": 8, "train.max_steps": 6}

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

def data():
    x = torch.randn(60, 4)
    return {"train": (x[:40], x[:40].sum(1)), "validation": (x[40:], x[40:].sum(1))}

def forward(model, batch):
    return model(batch[0]).squeeze(1)

def loss(output, batch):
    return F.mse_loss(output, batch[1])
'''

CLASSES = '''"""Two sizes."""
import mprun
from torch import nn
import tiny

DEFAULTS = {"train.max_steps": 3}

class Small(mprun.Recipe):
    METRIC = ("loss", "min")
    units: int = 8
    """Hidden units."""

    def model(self):
        return nn.Sequential(nn.Linear(4, self.units), nn.Tanh(), nn.Linear(self.units, 1))
    def data(self, request):
        return tiny.data()
    def forward(self, model, batch):
        return tiny.forward(model, batch)
    def loss(self, output, batch):
        return tiny.loss(output, batch)

class Large(Small):
    units: int = 32
'''


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The two recipes in the current folder; what a test imports is forgotten after it."""
    new_process(monkeypatch)
    write("tiny.py", RECIPE)
    write("sizes.py", CLASSES)
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the files that were run, as a new process has run none."""
    monkeypatch.setattr(recipe_loading, "_loaded", {})


def write(name: str, text: str) -> Path:
    path = Path(name).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def mprun(*words: str) -> int:
    return main([*words])


def trained(folder: str, *words: str) -> Summary:
    assert mprun(*words, f"run.dir={folder}") == 0
    return read_summary(Path(folder))


def test_a_file_is_trained_and_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    summary = trained("r", "recipe=tiny.py")
    assert (summary.recipe, summary.steps, summary.batch_size) == ("tiny", 6, 8)
    row = summary.data
    assert (row.name, row.source) == ("tiny", "recipe")
    assert (row.train_samples, row.validation_samples, row.test_samples) == (40, 20, 0)
    assert (summary.metric.name, summary.metric.higher_is_better) == ("loss", False)
    assert summary.recipe_sha256 == hashlib.sha256(RECIPE.encode()).hexdigest()
    assert Path("r/recipe.py").read_text(encoding="utf-8") == RECIPE
    err = capsys.readouterr().err
    assert err == f"note: recipe={Path('tiny.py').absolute()} runs the code of this file\n"


def test_it_trains_as_a_raw_loop_does_bit_for_bit() -> None:
    words = ["speed=plain", "precision=fp32", "seed=3", "train.max_steps=12"]
    trained("run", "recipe=tiny.py", *words, "train.optimizer.name=sgd")
    generator = torch.Generator().manual_seed(0)  # data() draws from seed 0 in every run
    x = torch.randn(60, 4, generator=generator)[:40]
    y = x.sum(1)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    raw = RawLoop(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-2),
        drawn(40, 8, 12, seed=3),
        lambda index: model(x[index]).squeeze(1),
        lambda output, index: F.mse_loss(output, y[index]),
    )
    assert_same(raw, None)


def test_a_class_of_several_with_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=sizes.py:Large", "recipe.model.units=5", "train.batch_size=8"]
    summary = trained("r", *words)
    assert (summary.recipe, summary.steps) == ("sizes", 3)
    assert summary.memory_bytes.parameters == 4 * (4 * 5 + 5 + 5 + 1)
    capsys.readouterr()
    assert mprun("recipe=sizes.py") == 2
    path = Path("sizes.py").absolute()
    assert f"recipe={path}:Small, recipe={path}:Large" in capsys.readouterr().err


def test_a_sweep_is_resumed_from_another_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", "recipe=tiny.py", "precision=fp32,bf16_mixed", "seeds=1", "run.dir=s"]
    assert mprun(*words) == 0
    for file in Path("s/fp32-seed0").rglob("*.*"):
        file.unlink()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    new_process(monkeypatch)
    assert mprun("sweep", "run.resume=../s") == 0
    summaries = [read_summary(run.parent) for run in Path("../s").glob("*/summary.json")]
    names = sorted((s.variant, s.seed) for s in summaries)
    assert names == [("bf16_mixed", 0), ("fp32", 0)]
    assert len({s.recipe_sha256 for s in summaries}) == 1
    capsys.readouterr()
    write("../tiny.py", f"{RECIPE}# changed\n")
    new_process(monkeypatch)
    assert mprun("sweep", "run.resume=../s") == 2
    err = capsys.readouterr().err
    assert "tiny.py was changed since the study began; put it back as it was (../s/" in err


def test_advise_names_the_file_in_the_command_that_it_recommends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["advise", "recipe=tiny.py", "precision=fp32,bf16_mixed", "seeds=2", "run.dir=a"]
    assert mprun(*words, "advise.max_steps=3") == 0
    output = capsys.readouterr().out
    (command,) = (
        line.partition("use it: mprun ")[2] for line in output.splitlines() if "use it:" in line
    )
    assert trained("r", *shlex.split(command)).recipe == "tiny"


def test_a_run_is_resumed_with_its_file_from_another_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained("whole", "recipe=tiny.py", "train.max_steps=6")
    trained("r", "recipe=tiny.py", "train.max_steps=3")
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    new_process(monkeypatch)
    assert mprun("run.resume=../r", "recipe=../tiny.py", "train.max_steps=6") == 0

    def losses(run: str) -> list[Any]:
        return [line["loss"] for line in read_lines(Path(run)) if line["kind"] == "step"]

    assert losses("../r") == losses("../whole")


def test_a_resumed_run_refuses_another_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained("r", "recipe=tiny.py", "train.max_steps=3")
    before = Path("r/summary.json").read_bytes()
    capsys.readouterr()
    path = write("tiny.py", f"print('run')\n{RECIPE}")
    new_process(monkeypatch)
    assert mprun("run.resume=r", "train.max_steps=6") == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == (
        f"mprun: run.resume=r: {path} was changed since the run began; put it back as it was (the "
        "run's copy is r/recipe.py), or begin a new run with it\n"
    )
    path.unlink()
    assert mprun("run.resume=r", "train.max_steps=6") == 2
    assert "put it back: the run's copy is r/recipe.py" in capsys.readouterr().err
    assert mprun("run.resume=r", "recipe=sizes.py") == 2
    assert "a resumed run keeps its configuration" in capsys.readouterr().err
    assert Path("r/summary.json").read_bytes() == before
    path.write_bytes(Path("r/recipe.py").read_bytes())
    assert mprun("run.resume=r", "train.max_steps=6") == 0


def test_a_file_in_the_resumed_folder_runs_only_with_trust(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained("r", "recipe=tiny.py", "train.max_steps=3")
    config = Path("r/config.yaml")
    text = config.read_text(encoding="utf-8")
    inside = Path("r/recipe.py").absolute()
    config.write_text(text.replace(str(Path("tiny.py").absolute()), str(inside)), encoding="utf-8")
    new_process(monkeypatch)
    capsys.readouterr()
    assert mprun("run.resume=r", "train.max_steps=6") == 2
    err = capsys.readouterr().err
    assert f"would run {inside}, which is a part of r itself" in err
    assert "add run.trust=true" in err
    assert mprun("run.resume=r", "train.max_steps=6", "run.trust=true") == 0


def test_compare_warns_of_runs_with_different_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for n, seed in enumerate(["0", "1"]):
        trained(f"c/a{n}", "recipe=tiny.py", f"seed={seed}")
        trained(f"c/b{n}", "recipe=tiny.py", f"seed={seed}", "precision=bf16_mixed")
    capsys.readouterr()
    assert mprun("compare", "c", "compare.report=false") == 0
    assert "SHA-256" not in capsys.readouterr().out
    old = hashlib.sha256(RECIPE.encode()).hexdigest()[:12]
    changed = f"{RECIPE}# changed\n"
    write("tiny.py", changed)
    new = hashlib.sha256(changed.encode()).hexdigest()[:12]
    new_process(monkeypatch)
    trained("c/new", "recipe=tiny.py", "seed=1", "precision=bf16_mixed")
    capsys.readouterr()
    assert mprun("compare", "c", "compare.report=false") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "the file of recipe tiny was changed between the runs" in out
    assert f"{old} in 3 runs; {new} in 1 run" in out


def test_a_line_on_an_epoch_has_the_metric_that_the_run_is_judged_by(
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = RECIPE.replace(
        "return F.mse_loss(output, batch[1])", 'return {"square": F.mse_loss(output, batch[1])}'
    )
    write("tiny.py", named + '\nMETRIC = ("loss.square", "min")\n')
    trained("r", "recipe=tiny.py")
    out = capsys.readouterr().out
    assert "  validation loss.square " in out
