"""A folder from a stranger is resumed: nothing of it runs unasked, no secret gets into a record."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from mprun.cli.main import main
from mprun.config import compose
from mprun.config.reference import as_text
from mprun.config.settings import study_request
from mprun.errors import UsageError
from mprun.study.planned_run import plan_or_resume
from mprun.study.study import new_study, resumed_study
from tests.security.records import has_run, write_config, write_recipe
from tests.study.compare.folders import write_run


@pytest.fixture(autouse=True)
def imported_anew() -> Iterator[None]:
    """A module that a test imports, of any file of tests, is unknown to the next one."""
    path = list(sys.path)
    _forget_modules()
    yield
    sys.path[:] = path
    _forget_modules()


def _forget_modules() -> None:
    own = ("run", "runs", "study", "mine", "elsewhere")
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        del sys.modules[name]


def refused(*args: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that refuses a command."""
    assert main(args) == 2
    assert not has_run()
    *notes, line = capsys.readouterr().err.splitlines()
    assert all(note.startswith("note: ") for note in notes)
    return line


# ---- code ----------------------------------------------------------------------------------------


def test_code_in_the_resumed_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(Path("run/stranger.py"))
    write_config(Path("run"), recipe__target="run.stranger.Net")
    line = refused("run.resume=run", capsys=capsys)
    assert str(Path("run/stranger.py").absolute()) in line
    assert line.endswith("add run.trust=true")


@pytest.mark.parametrize("linked", ["run/stranger.py", "run/package", "elsewhere"])
def test_links_hide_no_code(linked: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A module that is a link, one in a linked package, and one that a link outside leads to."""
    code = Path("run/outside") if linked == "elsewhere" else Path("outside")
    write_recipe(code / "stranger.py")
    if linked == "run/stranger.py":
        Path("run").mkdir()
        Path(linked).symlink_to(code.absolute() / "stranger.py")
        target = "run.stranger.Net"
    else:
        Path(linked).parent.mkdir(exist_ok=True)
        Path(linked).symlink_to(code.absolute())
        target = f"{linked.replace('/', '.')}.stranger.Net"
    write_config(Path("run"), recipe__target=target)
    assert "stranger.py, which is a part of run itself" in refused("run.resume=run", capsys=capsys)


def test_a_package_of_the_folder_is_refused_before_its_first_module(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_recipe(Path("run/package/__init__.py"))
    write_recipe(Path("run/package/net.py"))
    write_config(Path("run"), recipe__target="run.package.net.Net")
    assert "__init__.py" in refused("run.resume=run", capsys=capsys)


def test_only_the_command_line_grants_trust(capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(Path("run/stranger.py"))
    write_config(Path("run"), recipe__target="run.stranger.Net", run__trust=True)
    refused("run.resume=run", capsys=capsys)
    plan, _ = plan_or_resume(compose(["run.resume=run", "run.trust=true"]))
    assert type(plan.recipe).__module__ == "run.stranger"
    assert has_run()


def test_code_from_elsewhere_is_named_before_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(Path("mine.py"))
    write_config(Path("run"), recipe__target="mine.Net")
    composed = compose(["run.resume=run"])
    plan_or_resume(composed)
    note = f"note: recipe.target=mine.Net runs the code of {Path('mine.py').absolute()}"
    assert capsys.readouterr().err.splitlines() == [note, "the code runs"]
    plan_or_resume(composed)  # what has run is not named again
    assert capsys.readouterr().err == ""


def test_every_file_of_a_package_is_named_and_none_of_mprun(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_recipe(Path("mine/__init__.py"))
    write_recipe(Path("mine/net.py"))
    plan_or_resume(compose(["recipe=linear", "recipe.target=mine.net.Net"]))
    lines = capsys.readouterr().err.splitlines()
    files = [Path("mine", name).absolute() for name in ("__init__.py", "net.py")]
    notes = [f"note: recipe.target=mine.net.Net runs the code of {file}" for file in files]
    assert lines == [notes[0], "the code runs", notes[1], "the code runs"]
    plan_or_resume(compose(["recipe=linear"]))
    assert capsys.readouterr().err == ""


def test_comparing_runs_no_code() -> None:
    for seed in range(2):
        folder = Path(f"runs/{seed}")
        config = f"recipe: {{target: runs.{seed}.stranger.Net}}\nseed: {seed}\n"
        write_run(folder, seed=seed, config=config)
        write_recipe(folder / "stranger.py")
    assert main(["compare", "runs"]) == 0
    assert Path("runs/report.html").exists()
    assert not has_run()


# ---- studies -------------------------------------------------------------------------------------


def study(*overrides: str, config_dir: str | None = None) -> None:
    """A study in the folder `study`, of one variant with these overrides."""
    new_study(study_request("sweep", ["run.dir=study", "seeds=1"], None), {"a": overrides})
    path = Path("study/sweep.json")
    plan = json.loads(path.read_text(encoding="utf-8")) | {"config_dir": config_dir}
    path.write_text(json.dumps(plan), encoding="utf-8")


def test_code_in_a_resumed_study_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    study("recipe=linear", "recipe.target=study.stranger.Net")
    write_recipe(Path("study/stranger.py"))
    line = refused("sweep", "run.resume=study", capsys=capsys)
    assert "stranger.py, which is a part of study itself" in line


def test_code_in_a_study_is_refused_where_one_of_its_runs_is_resumed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    study("recipe=linear")
    write_recipe(Path("study/stranger.py"))
    write_config(Path("study/a-seed0"), recipe__target="study.stranger.Net")
    assert "stranger.py, which is a part of" in refused("run.resume=study/a-seed0", capsys=capsys)


@pytest.mark.parametrize(
    "override", ["recipe.name=${oc.env:HOME}", "run.trust=true", "++run.resume=run"]
)
def test_overrides_of_a_study_that_do_more_than_train(override: str) -> None:
    study("recipe=linear", override)
    with pytest.raises(UsageError, match=r"if the study is yours, add run\.trust=true"):
        resumed_study("sweep", Path("study"))
    assert resumed_study("sweep", Path("study"), trust=True).plan.variants["a"][1] == override


def test_a_variant_of_a_study_has_a_name_that_can_be_printed() -> None:
    study("recipe=linear")
    path = Path("study/sweep.json")
    plan = json.loads(path.read_text(encoding="utf-8"))
    plan["variants"] = {"\x1b[2J": ["recipe=linear"]}
    path.write_text(json.dumps(plan), encoding="utf-8")
    with pytest.raises(UsageError, match="no name that can be printed"):
        resumed_study("sweep", Path("study"))


def test_configurations_inside_a_study(capsys: pytest.CaptureFixture[str]) -> None:
    for inside in ("study/conf", str(Path("study/conf").absolute())):
        study("recipe=linear", config_dir=inside)
        with pytest.raises(UsageError, match=r"configurations from \S*study/conf, a part of"):
            resumed_study("sweep", Path("study"))
        Path("study/sweep.json").unlink()
    study("recipe=linear", config_dir="/elsewhere")
    resumed_study("sweep", Path("study"))
    assert capsys.readouterr().err.endswith("takes configurations from /elsewhere\n")


# ---- interpolation -------------------------------------------------------------------------------


def test_a_recorded_configuration_is_not_interpolated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPRUN_TEST_TOKEN", "the secret")
    write_config(Path("run"), recipe__name="${oc.env:MPRUN_TEST_TOKEN}")
    for _ in range(2):  # what the first one records is read by the second
        assert main(["run.resume=run"]) == 0
        for path in Path("run").rglob("*.*"):
            assert b"the secret" not in path.read_bytes()
        assert json.loads(Path("run/summary.json").read_text())["recipe"].startswith("${oc.env")
    assert "the secret" not in "".join(capsys.readouterr())


def test_a_number_is_not_interpolated_either() -> None:
    write_config(Path("run"), train__lr="${oc.env:HOME}")
    with pytest.raises(UsageError, match=r"train\.lr is a number"):
        compose(["run.resume=run"])


def test_the_command_line_is_interpolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPRUN_TEST_DATA", "there")
    write_config(Path("run"))
    composed = compose(["run.resume=run", "data.root=${oc.env:MPRUN_TEST_DATA}"])
    assert composed.config.data.root == "there"


@given(st.text(st.sampled_from("\\${}a:,'\" "), max_size=12))
def test_recorded_text_stays_what_it_is(text: str) -> None:
    config = OmegaConf.create({"x": as_text(text)})
    assert OmegaConf.to_container(config, resolve=True) == {"x": text}
