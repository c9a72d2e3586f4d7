"""`mprun sweep`, `mprun advise` and `mprun double` from the command line, with real runs."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mprun.cli.main import main
from mprun.config import compose
from mprun.precision import Precision
from mprun.records.run_folder import RunFolder
from mprun.records.run_record import Scores, Summary, read_summary

pytestmark = pytest.mark.usefixtures("quick_runs", "native_is_fast")

LINEAR = ["recipe=linear", "train.max_steps=5"]
MNIST = [
    "recipe=mnist",
    "data.source=generated",
    "data.train_limit=640",
    "data.eval_limit=64",
    "train.batch_size=64",
    "train.eval_batch_size=64",
    "train.epochs=1",
    "seeds=2",
]


def runs(folder: str) -> list[str]:
    return sorted(p.name for p in Path(folder).iterdir() if (p / "summary.json").exists())


def test_a_sweep_ends_in_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", *LINEAR, "precision=fp32,bf16_mixed", "seeds=2", "run.dir=s"]
    assert main(words) == 0
    assert runs("s") == ["bf16_mixed-seed0", "bf16_mixed-seed1", "fp32-seed0", "fp32-seed1"]
    assert (Path("s") / "report.html").exists()
    found = json.loads(Path("s/comparison.json").read_text(encoding="utf-8"))
    assert [v["label"] for v in found["variants"]] == ["fp32", "bf16_mixed"]
    output = capsys.readouterr().out
    assert "sweep: 4 runs in s" in output
    assert "4 of 4 runs" in output
    assert output.endswith("all figures by mprun show s --verbose\nwritten to s: report.html\n")
    markdown = Path("s/comparison.md").read_text(encoding="utf-8").replace("\\", "")
    answer = markdown.split("\n\n")[0]
    assert output.index(f"\n{answer}\n") < output.index("\nlinear: 2 variants, 2 seeds each; ")


def test_a_sweep_judges_averaged_weights(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", *MNIST, "precision=fp32,bf16_mixed", "train.epochs=2", "run.dir=s"]
    assert main(words) == 0
    assert "test accuracy of averaged weights (5 places of the last tenth)" in one_line(capsys)
    for name in runs("s"):
        summary = read_summary(Path("s") / name)
        assert summary.averaged is not None
        assert summary.validations == 10  # epochs end with the fifth and the tenth part
        assert summary.warnings == []
    assert main(["show", "s"]) == 0
    assert "of averaged weights (5 places of the last tenth)" in one_line(capsys)
    assert main(["compare", "s", "compare.weights=last"]) == 0
    assert "averaged" not in one_line(capsys)
    # so it is shown by what it was judged by
    assert json.loads(Path("s/comparison.json").read_text(encoding="utf-8"))["weights"] == "last"
    assert main(["show", "s"]) == 0
    assert "averaged" not in one_line(capsys)
    assert main(["show", "s/fp32-seed0"]) == 0
    assert "(averaged weights: " in one_line(capsys)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_mode_that_fails_is_survived_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", *LINEAR, "precision=fp32", "train.lr=1e-3,1e30", "seeds=2", "run.dir=s"]
    assert main([*words, "compare.fail_if=worse"]) == 3
    output = capsys.readouterr()
    first = "train.lr=1e+30 seed 0"
    assert f"{first} failed: the loss became" in output.out
    assert f"train.lr=1e+30 seed 1 failed, for the same reason as {first}\n" in output.out
    assert "2 of 2 runs failed" in output.out + output.err


@pytest.mark.parametrize("command", ["compare", "show"])
def test_a_sweep_that_was_stopped_says_how_much_of_it_there_is(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *LINEAR, "precision=fp32,bf16_mixed", "seeds=2", "run.dir=s"]) == 0
    assert main([command, "s"]) == 0
    assert "of this sweep" not in capsys.readouterr().out
    for path in (*Path("s").glob("comparison.*"), *Path("s").glob("*bf16_mixed*1*/*.json")):
        path.unlink()
    assert main([command, "s"]) == 0
    says = "3 of 4 runs of this sweep have ended; continue it with: mprun sweep run.resume=s"
    assert f"note: {says}\n" in capsys.readouterr().out
    if command == "compare":
        assert says in Path("s/report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "s/sweep.json is not valid JSON"), ('{"schema_version": 99}', "has schema_version 99")],
)
def test_runs_are_compared_without_the_plan_that_cannot_be_read(
    content: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *LINEAR, "precision=fp32,bf16_mixed", "seeds=1", "run.dir=s"]) == 0
    Path("s/sweep.json").write_text(content, encoding="utf-8")
    capsys.readouterr()
    assert main(["compare", "s"]) == 0
    output = capsys.readouterr()
    assert "linear: 2 variants, 1 seed each; " in output.out
    note = next(line for line in output.out.splitlines() if says in line)
    assert note.endswith("it is unknown whether all runs of this sweep have ended")
    assert output.err == ""


def test_a_run_ended_by_a_full_disk_is_no_verdict_and_is_tried_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at the end of two of four runs; one of them can still record this."""
    begin = RunFolder.__init__
    failing: Iterator[set[int]] = iter([set(), {1}, set(), {1, 2}])  # writes of each run's summary

    def limited(self: RunFolder, *arguments: Any) -> None:
        begin(self, *arguments)
        writes, full = itertools.count(), next(failing)

        def written(content: Summary) -> None:
            if next(writes) in full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            RunFolder.summary(self, content)

        monkeypatch.setattr(self, "summary", written)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "__init__", limited)
        words = ["sweep", *LINEAR, "precision=fp32,bf16_mixed", "seeds=2", "run.dir=s"]
        assert main([*words, "compare.fail_if=worse"]) == 1
    output = capsys.readouterr().out
    assert "2 of 4 runs were ended by the machine and are no result" in output
    assert "mprun sweep run.resume=s" in output
    summaries = [read_summary(Path("s") / name) for name in runs("s")]
    assert sorted(s.status for s in summaries) == ["completed", "completed", "failed", "running"]
    found = json.loads(Path("s/comparison.json").read_text(encoding="utf-8"))
    assert not any(v["failed"] for v in found["variants"])
    assert main(["sweep", "run.resume=s"]) == 0
    assert "4 of 4 runs" in capsys.readouterr().out
    assert {read_summary(Path("s") / name).status for name in runs("s")} == {"completed"}


def test_a_mode_without_memory_for_it_is_named_and_not_judged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Precision.forward

    def without_memory(self: Precision, *arguments: Any) -> Any:
        if self.policy.name == "bf16_mixed":
            raise MemoryError
        return forward(self, *arguments)

    monkeypatch.setattr(Precision, "forward", without_memory)
    words = ["advise", *LINEAR, "precision=fp32,bf16_mixed", "seeds=2", "run.dir=a"]
    assert main(words) == 1
    output = capsys.readouterr().out
    assert "take fp32: " in output
    assert "not tried (none of its runs ended): bf16_mixed" in output


def test_a_sweep_in_which_nothing_works_fails(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", *LINEAR, "precision=fp32", "train.lr=1e30", "seeds=1"]
    assert main(words) == 1
    assert "no run was completed" in capsys.readouterr().out


def test_a_stopped_sweep_is_resumed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mprun.study.trials import StudyProgress

    shown = StudyProgress.end

    def stopping(self: StudyProgress, *arguments: object) -> None:
        shown(self, *arguments)  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(StudyProgress, "end", stopping)
        words = ["sweep", *LINEAR, "precision=fp32,bf16_mixed", "seeds=2", "run.dir=s"]
        assert main(words) == 130
    assert runs("s") == ["fp32-seed0"]
    assert "resume with: mprun sweep run.resume=s" in capsys.readouterr().out
    before = read_summary(Path("s/fp32-seed0"))
    assert main(["sweep", "run.resume=s"]) == 0
    assert len(runs("s")) == 4
    assert read_summary(Path("s/fp32-seed0")) == before
    assert (Path("s") / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["sweep", "run.resume=nowhere"], "is nowhere a study?"),
        (
            ["sweep", "run.resume=nowhere", "train.lr=1"],
            "'train.lr=1': a resumed study keeps its plan",
        ),
        (["sweep", "data.source=real", "data.root=nowhere"], "nowhere"),
        (["advise", "compare.split=test"], "mprun advise sets this itself"),
        (["sweep", "seed=0,1"], "seeds=5 runs seeds 0 to 4"),
        (["advise", *LINEAR, "precision=fp32"], "there is nothing to choose from"),
        (["advise", *LINEAR, "precision=fp32,tf32"], "cpu here has no TensorFloat-32"),
        (["double", *LINEAR], "compares after equal epochs"),
        (["double", "recipe=mnist", "batch=double"], "train.batch_size is its base"),
        (["double", *MNIST, "train.max_steps=3"], "train.max_steps=3: mprun double compares"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
    assert not Path("outputs").exists()


def test_advise_recommends_and_writes_what_mprun_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["advise", *MNIST, "precision=fp32,bf16_mixed,tf32", "run.dir=a"]
    assert main([*words, "execution=auto"]) == 0
    output = capsys.readouterr().out
    if not torch.cuda.is_available():
        assert "not tried (emulated here): tf32" in output
    assert "\ntake " in output
    taken = output.partition("\ntake ")[2].partition(":")[0]
    assert taken in ("fp32", "bf16_mixed")
    loser = {"fp32": "bf16_mixed", "bf16_mixed": "fp32"}[taken]
    assert ("\nnot taken: bf16_mixed (" in output) == (loser == "bf16_mixed")
    assert "in your own loop: a/snippets/pytorch.py, lightning.py" in output
    for name in ("pytorch", "lightning", "trainer"):
        text = Path(f"a/snippets/{name}.py").read_text(encoding="utf-8")
        compile(text, name, "exec")
        assert text.startswith(f'"""{taken} for recipe mnist in ')
    advised = compose(["preset=advised"], Path("a")).config
    assert advised.precision.name == taken
    assert (advised.recipe.name, advised.train.batch_size) == ("mnist", 64)
    assert advised.data.test
    assert main(["--config-dir", "a", "preset=advised", "train.max_steps=2"]) == 0
    for name in runs("a"):
        summary = read_summary(Path("a") / name)
        assert summary.test == Scores(loss=None, accuracy=None), "a test set must not choose"
        assert summary.data.test_samples == 0
        assert summary.history[-1].validation.accuracy is not None


def test_double_compares_every_rule_after_equal_epochs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["double", *MNIST, "seeds=1", "precision=bf16_mixed", "run.dir=d"]) == 0
    names = ["base", "double-linear", "double-none", "double-sqrt"]
    assert runs("d") == [f"{name}-seed0" for name in names]
    for name in runs("d"):
        summary = read_summary(Path("d") / name)
        doubled = name.startswith("double")
        assert summary.batch_size == (128 if doubled else 64)
        assert summary.epochs == 1
        assert summary.test.accuracy is None
    output = capsys.readouterr().out
    answers = ("\ndouble it: ", "\ndon't: ", "\ninconclusive: ")
    (at,) = (output.index(answer) for answer in answers if answer in output)
    assert at < output.index(" variants, 1 seed each; ")
    assert "samples/s ratio" in output  # steps of two sizes are not compared


@pytest.mark.usefixtures("own_recipe")
def test_a_recipe_with_splits_of_its_own_is_chosen_for_without_its_test_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--config-dir", "my configs", "recipe=points", "seeds=2", "precision=fp32,bf16_mixed"]
    assert main(["advise", *words, "run.dir='o 1'"]) == 0
    output = capsys.readouterr().out
    assert "differences of validation loss" in output
    assert "use it: mprun --config-dir 'o 1' preset=advised" in output
    assert main(["--config-dir", "o 1", "preset=advised", "run.dir=taken"]) == 0
    assert read_summary(Path("taken")).recipe == "points"


def test_a_study_is_resumed_by_its_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", *LINEAR, "precision=fp32", "seeds=1", r"run.dir='it\'s'"]
    assert main(words) == 0
    assert runs("it's") == ["fp32-seed0"]
    assert main(["advise", r"run.resume='it\'s'"]) == 2
    assert "a study of mprun sweep; resume it with: mprun sweep" in capsys.readouterr().err


def test_seeds_can_be_chosen() -> None:
    words = ["seeds=2", "first_seed=10"]
    assert main(["sweep", *LINEAR, "precision=fp32", *words, "run.dir=s"]) == 0
    assert runs("s") == ["fp32-seed10", "fp32-seed11"]
