"""`mprun replay`: the op that a saved step's NaN began with, named by a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mprun.cli.main import main
from mprun.train.checkpoint import load_torch_file
from tests.cli.processes import Forking
from tests.watch.nonfinite import capturing
from tests.watch.nonfinite.loops_with_nan import PLANTED, SCRIPTS, train, write

EXPECTED = {
    "batch": ("infinite: log in special.0 (Log), forward, batch.py:9 (forward)", "float32 16x4, 0"),
    "dropout": ("infinite: log in special.1 (Log), forward, dropout.py:9 (forward)", "float32 16x"),
    "backward": ("in special.1 (Root), backward, backward.py:14 (forward)", "reads other: float32"),
    "autocast": ("infinite: log in special.1 (Log), forward", "reads self: bfloat16 16x4, 0 to"),
    "accumulation": ("infinite: log in special.0 (Log), forward", "reads self: float32 16x4, 0 to"),
    "batchnorm": ("infinite: log in special.0 (Counted), forward", "reads self: float32 scalar, 0"),
    "loss": ("infinite: log, other, loss.py:", "reads self: float32 scalar, 0 to 0"),
}
"""Script to what the replay prints: the op, its module, phase and line; what it reads."""

EACH = """
import sys
from mprun.cli.main import main
for words in sys.argv[1:]:
    sys.stdout.write(f'{main(["replay", *words.split()])}\\n=====\\n')
    sys.stdout.flush()
"""


def test_a_fresh_process_names_the_op_module_line_and_inputs(forking: Forking) -> None:
    assert EXPECTED.keys() == SCRIPTS.keys()
    for name in SCRIPTS:
        step, _ = train(write(name), Path(f"{name}.pt"))
        assert step == PLANTED or name == "dropout"
    words = [f"{name}.pt {name}.py" for name in SCRIPTS]
    done = forking.run(EACH, *words)
    assert done.returncode == 0, done.stderr
    texts = dict(zip(SCRIPTS, done.stdout.split("=====\n"), strict=False))
    for name, (where, reads) in EXPECTED.items():
        assert where in texts[name], texts[name]
        assert reads in texts[name], texts[name]
        assert texts[name].endswith("\n0\n")
    assert "/batch.py runs the code of this file" in done.stderr


def test_the_real_command_runs_a_named_function_and_no_training(forking: Forking) -> None:
    script = write("loss")
    train(script, Path("loss.pt"), batch=False)
    other = "def other(model, x): return (torch.log(x.min()) * model(x)).mean()"
    text = f"{script.read_text(encoding='utf-8')}\n{other}"
    script.write_text(text + "\nif __name__ == '__main__':\n    raise SystemExit('trains')\n")
    code = "import runpy; runpy.run_module('mprun', run_name='__main__')"
    done = forking.run(code, "replay", "loss.pt", "loss.py:other")
    assert done.returncode == 0, done.stderr
    assert "infinite: log, other" in done.stdout
    assert "note: the loop gave no batch" in done.stdout


@pytest.mark.parametrize("name", ["dropout", "batchnorm"])
def test_random_states_and_buffers_decide(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The control: with another random state, or counter, the replay is finite: status 1."""
    train(write(name), Path("step.pt"))
    content = load_torch_file(Path("step.pt"))
    if name == "dropout":
        content["calls"][0]["random"]["cpu"] = torch.Generator().manual_seed(9).get_state()
        content["calls"][0]["output_grads"] = [[]]
    else:
        content["buffers"]["special.0.num_batches_tracked"] += 1
    content["batches"] = content["batches"][:1]
    torch.save(content, "step.pt")
    assert main(["replay", "step.pt", f"{name}.py"]) == 1
    out = capsys.readouterr().out
    assert "every number is finite in the replay" in out
    assert "possible reason: the model has a state outside" in out


# ---- with a recipe -------------------------------------------------------------------------------

RECIPE = """
import torch
from torch import nn

class Log(nn.Module):
    def forward(self, x):
        return x.log()

def model():
    return nn.Sequential(nn.Linear(4, 2), nn.Sigmoid(), Log())

def data():
    raise SystemExit("data are not needed")

def loss(output, batch):
    return (output - batch[1].sqrt().log()).square().mean()
"""


def saved_of_recipe(batch: bool) -> None:
    Path("of_replay.py").write_text(RECIPE, encoding="utf-8")
    names: dict[str, object] = {}
    exec(RECIPE, names)
    model: nn.Module = names["model"]()  # type: ignore[operator]
    x, y = torch.rand(6, 4), torch.zeros(6, 2)
    with capturing(model) as capture:
        if batch:
            capture.note_batch([x, y])
        names["loss"](model(x), (x, y)).backward()  # type: ignore[operator]
        capture.save(Path("step.pt"), 3, "x")


def test_a_recipe_gives_model_and_loss(capsys: pytest.CaptureFixture[str]) -> None:
    saved_of_recipe(batch=True)
    assert main(["replay", "step.pt", "recipe=of_replay.py"]) == 0
    assert "step 3: infinite: log, other, of_replay.py:16 (loss)" in capsys.readouterr().out


def test_without_a_batch_the_loss_is_blamed(capsys: pytest.CaptureFixture[str]) -> None:
    saved_of_recipe(batch=False)
    assert main(["replay", "step.pt", "recipe=of_replay.py"]) == 0
    out = capsys.readouterr().out
    assert "the gradient that the loss sends to output 0 of call 1 holds 12 inf" in out
    assert (
        "note: the loop gave no batch (run.note_batch(batch)), so the recipe's loss was not" in out
    )


# ---- mistakes ------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["replay", *words]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("mprun: ")
    return error


def test_mistakes_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs the file of a saved step first; write mprun replay FILE" in refused(capsys)
    assert "needs the file of a saved step first" in refused(capsys, "recipe=mnist")
    assert "needs the model of the step" in refused(capsys, "step.pt")
    assert "'train' is not a Python file" in refused(capsys, "step.pt", "train")
    assert "takes no 'seed=1'" in refused(capsys, "step.pt", "a.py", "seed=1")
    assert "needs recipe=..., not only seed=1" in refused(capsys, "step.pt", "seed=1")
    assert "has no option '--top'" in refused(capsys, "step.pt", "--top")


def test_files_that_are_no_saved_step(capsys: pytest.CaptureFixture[str]) -> None:
    write("batch")
    assert "no.pt: there is no such file" in refused(capsys, "no.pt", "batch.py")
    Path("empty.pt").touch()
    assert "empty.pt is not a saved step, or is damaged: it is empty" in (
        refused(capsys, "empty.pt", "batch.py")
    )
    torch.save({"w": torch.ones(1)}, "weights.pt")
    assert "weights.pt is not a saved step; legal is" in refused(capsys, "weights.pt", "batch.py")
    torch.save(nn.Linear(1, 1), "module.pt")
    assert "module.pt is not a saved step, or is damaged: it contains" in (
        refused(capsys, "module.pt", "batch.py")
    )


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("format_version", 2, "has format 2, this mprun reads up to 1"),
        ("calls", [], "it has no call of the model"),
        ("device", "cuda:x", "'cuda:x' is not a device"),
        ("parameters", {"w": 1}, "Expected `Tensor`"),
        ("threads", "many", "Expected `int`"),
    ],
)
def test_damaged_content(
    key: str, value: object, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(write("batch"), Path("step.pt"))
    torch.save({**load_torch_file(Path("step.pt")), key: value}, "step.pt")
    assert reason in refused(capsys, "step.pt", "batch.py")


def test_scripts_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    train(write("batch"), Path("step.pt"))
    assert "none.py: there is no such file" in refused(capsys, "step.pt", "none.py")
    for name, text, reason in (
        ("a", "def modell(): pass", "has no function model(); write `def model()"),
        ("b", "model = 3", "has no function model(): model is 3 (int)"),
        ("c", "def model(): return 3", "model() returned 3 (int) (c.py:1, in model); legal"),
        ("d", "import torch\ndef model(): return torch.nn.Linear(1, 2)", "do not fit this model"),
        ("e", "def model(): raise KeyError('x')", "e.py:1, in model"),
        ("f", "1/0", "f.py cannot be loaded: ZeroDivisionError"),
    ):
        Path(f"{name}.py").write_text(text, encoding="utf-8")
        assert reason in refused(capsys, "step.pt", f"{name}.py")
    assert "batch.py has no function stepp(model, batch); did you mean 'step'?; legal" in (
        refused(capsys, "step.pt", "batch.py:stepp")
    )
    text = Path("batch.py").read_text(encoding="utf-8")
    Path("g.py").write_text(f"{text}\ndef step(model, batch): return batch['x']", encoding="utf-8")
    assert "step.pt: the step cannot be run again: TypeError" in refused(capsys, "step.pt", "g.py")
