"""Steps with a NaN are saved, run again, and their op is named."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mprun
from mprun.cli.main import main
from mprun.errors import UsageError
from mprun.integrations.replay import MisfitError, replay
from mprun.integrations.saved_step import SavedStep, read_step, write_step
from tests.integrations.stranger import SCRIPT, STEP, Net, train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved") / "run"
    _, run = train(out)
    assert run.nonfinite.file == out / f"nonfinite_step_{STEP}.pt"
    return out / f"nonfinite_step_{STEP}.pt"


@pytest.mark.parametrize(
    ("kind", "options", "op", "phase"),
    [
        ("log", {}, "log", "forward"),
        ("log", {"micro": 2}, "log", "forward"),
        ("log", {"bf16": True}, "log", "forward"),
        ("root", {}, "div", "backward"),
        ("power", {}, "pow", "forward"),
    ],
    ids=["log", "micro-batches", "bf16 autocast", "backward only", "overflow"],
)
def test_the_planted_op_is_named(
    kind: str, options: dict[str, Any], op: str, phase: str, tmp_path: Path
) -> None:
    _, run = train(tmp_path / "run", kind, **options)
    assert run.nonfinite is not None
    assert run.nonfinite.step == STEP
    result = replay(read_step(run.nonfinite.file), Net(kind))
    assert result.first is not None
    assert (result.first.module, result.first.phase, result.step) == ("part", phase, STEP)
    assert result.first.op.startswith(op)
    assert result.first.inputs
    assert "stranger.py" in (result.first.location or "")


def test_random_numbers_are_those_of_the_step(tmp_path: Path) -> None:
    """Dropout of one number in 37 makes the NaN: with other random numbers there is none."""
    _, run = train(tmp_path / "run", "dropout", fault=False)
    assert run.nonfinite is not None
    step = read_step(run.nonfinite.file)
    torch.manual_seed(12345)
    result = replay(step, Net("dropout"))
    assert result.first is not None
    assert (result.first.op, result.first.module) == ("log", "part")


@pytest.mark.parametrize("options", [{}, {"micro": 2}, {"bf16": True}], ids=str)
def test_no_bit_of_the_training_changes(options: dict[str, Any], tmp_path: Path) -> None:
    expected, _ = train(None, "dropout", fault=False, **options)
    got, _ = train(tmp_path / "run", "dropout", fault=False, **options)
    pairs = zip(expected, got, strict=True)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def test_the_file_holds_the_state_before_the_step(saved: Path) -> None:
    """The saved weights and statistics are those after 36 steps, not what step 37 made of them."""
    step = read_step(saved)
    assert all(x.isfinite().all() for x in step.parameters.values())
    assert step.buffers["norm.num_batches_tracked"] == STEP - 1
    [call] = step.calls
    assert call.kwargs == {"scale": 1.0}
    assert call.args[0][3, 4] == 0
    [batch] = step.batches
    assert torch.equal(batch[0], call.args[0])


def test_the_replay_leaves_the_model_ready(saved: Path) -> None:
    model = Net("log").eval()
    replay(read_step(saved), model)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


def test_a_finite_step_is_said_to_be_finite(saved: Path) -> None:
    step = read_step(saved)
    step.calls[0].args[0][3, 4] = 1.0
    step.calls[0].output_gradients[0].zero_()
    result = replay(step, Net("log"))
    assert result.first is None
    assert "stays finite" in str(result)


def test_a_nan_of_the_loss_is_told_from_one_of_the_model(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mprun.observe(model, optimizer, tmp_path / "run", on_nonfinite="save") as run:
        x = torch.ones(2, 4)
        (model(x).sum() * 0).sqrt().backward()
        optimizer.step()
    assert run.nonfinite is not None
    assert run.nonfinite.file is not None
    step = read_step(run.nonfinite.file)
    assert "the loss made it" in str(replay(step, nn.Linear(4, 1)))
    named = replay(step, nn.Linear(4, 1), lambda model, batch: (model(batch).sum() * 0).sqrt())
    assert named.first is not None
    assert named.first.op.startswith("div")
    assert named.first.phase == "backward"


def test_inputs_that_are_not_finite_are_named_as_such(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mprun.observe(model, optimizer, tmp_path / "run", on_nonfinite="save") as run:
        model(torch.full((2, 4), torch.nan)).sum().backward()
        optimizer.step()
    assert run.nonfinite is not None
    assert run.nonfinite.file is not None
    result = replay(read_step(run.nonfinite.file), nn.Linear(4, 1))
    assert result.first is not None
    assert result.first.kind == "outside"


def test_arguments_of_any_nesting_and_kinds_that_cannot_be_kept(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, batch: Any, mode: object = None) -> Any:
            return {"out": [self.layer(batch["x"][0]).log()]}

    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mprun.observe(model, optimizer, tmp_path / "run", on_nonfinite="save") as run:
        nn.init.constant_(model.layer.bias, -9.0)  # the logarithm of a negative number
        model({"x": (torch.ones(2, 4), "name")}, mode=object())["out"][0].sum().backward()
        optimizer.step()
    assert run.nonfinite is not None
    assert run.nonfinite.file is not None
    result = replay(read_step(run.nonfinite.file), Odd())
    assert result.first is not None
    assert result.first.op == "log"
    assert "the file does not hold: object" in str(result)


def test_an_input_changed_in_place_is_reported(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mprun.observe(model, optimizer, tmp_path / "run", on_nonfinite="save") as run:
        x = torch.full((2, 4), torch.inf)
        model(x).sum().backward()
        x.zero_()
        optimizer.step()
    assert run.nonfinite is not None
    assert run.nonfinite.file is not None
    assert "changed in place" in str(replay(read_step(run.nonfinite.file), nn.Linear(4, 1)))


def test_another_model_is_refused(saved: Path) -> None:
    with pytest.raises(MisfitError, match=r"the file has first\.bias, first\.weight, gain"):
        replay(read_step(saved), nn.Sequential(nn.Linear(8, 8)))
    other = Net("log")
    other.last.bias = nn.Parameter(torch.zeros(4))
    with pytest.raises(MisfitError, match=r"of another shape: last\.bias"):
        replay(read_step(saved), other)


def test_the_command_names_the_op_in_a_fresh_process(saved: Path, tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT.format(kind="log"))
    done = subprocess.run(
        [sys.executable, "-m", "mprun", "replay", str(saved), str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "infinite: log in part (Gate), forward" in done.stdout


def test_the_command_takes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "gated.py"
    recipe.write_text(
        "import torch\nfrom torch import nn\nfrom tests.integrations.stranger import Net\n"
        "def model():\n    return Net('log')\n"
        "def data():\n    return {'train': (torch.randn(8, 8), torch.zeros(8).long())}\n"
        "def loss(output, batch):\n    return nn.functional.cross_entropy(output, batch[1])\n"
    )
    _, run = train(tmp_path / "run")
    assert main(["replay", str(run.nonfinite.file), f"recipe={recipe}"]) == 0
    assert "log in part (Gate)" in capsys.readouterr().out


def test_the_command_takes_the_name_of_a_function(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "named.py"
    script.write_text(SCRIPT.format(kind="log"))
    assert main(["replay", str(saved), f"{script}:strange"]) == 0
    assert "log in part" in capsys.readouterr().out


def test_the_command_fails_where_the_step_stays_finite(saved: Path, tmp_path: Path) -> None:
    step = read_step(saved)
    step.calls[0].args[0][3, 4] = 1.0
    healthy = replace(step, batches=[])
    write_step(tmp_path / "healthy.pt", healthy)
    script = tmp_path / "calls.py"
    script.write_text(
        "from tests.integrations.stranger import Net\n\ndef model():\n    return Net('log')\n"
    )
    step.calls[0].output_gradients[0].zero_()
    write_step(tmp_path / "healthy.pt", healthy)
    assert main(["replay", str(tmp_path / "healthy.pt"), str(script)]) == 1


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "mprun replay takes a file and what makes its model"),
        (["{saved}"], "mprun replay takes a file and what makes its model"),
        (["nowhere.pt", "{script}"], "nowhere.pt cannot be read: No such file"),
        (["{script}", "{script}"], "is no saved step"),
        (["{saved}", "{script}:nope"], "has no function nope"),
        (["{saved}", "{other}"], "the file has first.bias, first.weight, gain"),
        (["{saved}", "{none}"], "model() gives int; legal is a nn.Module"),
        (["{saved}", "{fails}"], "model() fails: ZeroDivisionError"),
        (["{saved}", "nowhere.py"], "nowhere.py"),
        (["{saved}", "{script}", "more"], "takes one script, not"),
        (["{saved}", "recipe=nope"], "nope"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str],
    text: str,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"saved": saved}
    for name, source in {
        "script": SCRIPT.format(kind="log"),
        "other": "from torch import nn\ndef model():\n    return nn.Linear(2, 2)\n",
        "none": "def model():\n    return 3\n",
        "fails": "def model():\n    return 1 / 0\n",
    }.items():
        places[name] = tmp_path / f"{name}_{tmp_path.name}.py"
        places[name].write_text(source)
    assert main(["replay", *(a.format(**places) for a in args)]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "Traceback" not in error


def test_a_file_of_anyone_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "pwned",))

    torch.save({"format": "mprun saved step", "version": 1, "x": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UsageError, match="is no saved step"):
        read_step(tmp_path / "evil.pt")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "other"}, "is no saved step"),
        ({"version": 99}, "has version 99, this mprun reads 1"),
        ({"step": "x"}, "is damaged"),
        ({"calls": [{"args": 3}]}, "is damaged"),
    ],
)
def test_damaged_files_are_one_line(
    change: dict[str, Any], text: str, saved: Path, tmp_path: Path
) -> None:
    content = torch.load(saved, weights_only=True)
    torch.save({**content, **change}, tmp_path / "bad.pt")
    with pytest.raises(UsageError, match=text):
        read_step(tmp_path / "bad.pt")


def test_a_saved_step_is_read_as_it_was_written(saved: Path, tmp_path: Path) -> None:
    step = read_step(saved)
    assert isinstance(step, SavedStep)
    write_step(tmp_path / "again.pt", step)
    again = read_step(tmp_path / "again.pt")
    assert again.step == step.step
    assert torch.equal(again.calls[0].args[0], step.calls[0].args[0])
