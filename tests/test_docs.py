"""The docs agree with the code: fields, commands, links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import mprun.numerics
import mprun.optim
from mprun.cli.main import COMMANDS
from mprun.config import compose
from mprun.config.compose import parse
from mprun.config.multirun import combinations
from mprun.config.reference import leaves
from mprun.config.settings import fields, take, with_every_mode
from mprun.errors import UsageError
from mprun.inspect.check.check_result import CHECKS, CheckSettings
from mprun.records.mode_names import SHIPPED_MODES

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    + [ROOT / folder / "README.md" for folder in ("recipes", "benchmarks", "outputs")]
)
ELSEWHERE = (
    "run.resume=",
    "--config-dir",
    "_file=",
    "preset=advised",
    "--help",
    "new-recipe",
    "mprun export ",
    "my.py",
)
"""What makes a line need files that only exist in the example."""


MAKE = """
```
make run      # install, then train FashionMNIST in bfloat16 for less than three minutes
make test     # install, then run the tests
```
"""


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_no_page_has_marks_of_a_merge() -> None:
    assert [p.name for p in PAGES if re.search(r"^(<<<<<<<|>>>>>>>) ", text_of(p), re.M)] == []


def test_the_workflow_example_is_yaml_and_covers_the_oldest_torch() -> None:
    block = re.search(r"```yaml\n(.*?)```", text_of(ROOT / "CONTRIBUTING.md"), re.DOTALL)
    assert block is not None
    workflow = yaml.safe_load(block[1])
    installs = " ".join(workflow["jobs"]["smoke"]["strategy"]["matrix"]["torch"])
    project = text_of(ROOT / "pyproject.toml")
    for package in ("torch", "torchvision"):
        oldest = re.search(rf'"{package}>=([\d.]+)"', project)
        assert oldest is not None
        assert f"{package}=={oldest[1]}.*" in installs


def test_the_readme_asks_and_answers_before_it_installs() -> None:
    text = text_of(ROOT / "README.md")
    first, _, rest = text.partition("\n## ")
    order = (
        "**In which numerical precision should I train this model, what does it buy here, and",
        "\n$ mprun sweep recipe=my_model.py ",
        " keeps the accuracy ",
        'src="docs/pictures/answer.png"',
        "| Choose a precision | `mprun advise recipe=my_model.py` | [",
        "| Hunt a numerical problem | `mprun numerics recipe=my_model.py precision=fp16_mixed` | [",
        "| Gate a repository in CI | `mprun check recipe=my_model.py` | [",
        MAKE,
    )
    places = [first.find(part) for part in order]
    assert -1 not in places
    assert places == sorted(places)
    assert len(first.splitlines()) <= 45
    table = rest.partition("verdict\n")[2].partition("```")[0]
    rows = [line for line in table.splitlines() if line.endswith((" baseline", " equivalent"))]
    assert len(rows) == 5
    assert "inconclusive" not in text
    whole = text_of(ROOT / "docs/reference/studies.md").partition("14 variants")[2]
    assert [x for x in SHIPPED_MODES if f"\n{x} " not in whole] == ["fp64"]


def test_the_own_workflow_runs_what_ci_runs() -> None:
    workflow = yaml.safe_load(text_of(ROOT / ".github/workflows/ci.yml"))
    assert "bash .ci/run" in [step.get("run") for step in workflow["jobs"]["test"]["steps"]]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", text_of(page)):
            goal = (page.parent / target) if target else page
            assert goal.exists(), f"{page}: there is no {target}"
            assert not anchor or anchor in anchors(goal), f"{page}: {target} has no #{anchor}"


def test_pages_that_the_code_names_exist() -> None:
    sources = [*(ROOT / "mprun").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]
    named = {
        page
        for path in sources
        for page in re.findall(r"docs/[\w/.-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert named
    assert not [page for page in named if not (ROOT / page).is_file()]


def test_every_page_is_linked() -> None:
    linked = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:\s]+)", text_of(page))
    }
    pages = {*(ROOT / "docs").rglob("*.md")}
    assert pages <= linked


def commands() -> Iterator[tuple[str, str]]:
    """The page and the line of each `mprun ...` command that the docs show."""
    for page in PAGES:
        text = text_of(page)
        blocks = "\n".join(re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
        lines = re.findall(r"^(?:\$ )?(mprun .*)$", blocks, re.MULTILINE)
        lines += re.findall(r"^run: (?:\w+=\S+ )?(mprun .*)$", text, re.MULTILINE)  # of examples
        lines += re.findall(r"`(mprun [^`]*=[^`]*)`", text.replace("\n", " "))
        for line in lines:
            if not any(x in line for x in (*ELSEWHERE, "...", "[")):
                yield str(page.relative_to(ROOT)), line


def test_commands_have_legal_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "docs/recipes")
    shown = {line: page for page, line in sorted(commands())}
    assert len(shown) > 40
    for line, page in shown.items():
        try:
            check_overrides(line)
        except UsageError as error:
            raise AssertionError(f"{page}: {line}") from error


def check_overrides(line: str) -> None:
    """Compose what a command of the docs asks for.

    Raises:
        UsageError: it is not legal.
    """
    args = shlex.split(line, comments=True)[1:]
    by_name = {command.name: command for command in COMMANDS}
    command = by_name[args.pop(0)] if args[0] in by_name else by_name["train"]
    if command.name in ("compare", "data", "show"):  # the rest are paths and names of sets
        args = [x for x in args if x.startswith(f"{command.name}.")]
    words = ("-m", "check")
    own = [x for x in args if x not in words and not x.lstrip("+").startswith(("hydra/", "hydra."))]
    own = [x for x in own if not x.startswith("--")]
    _, overrides = take(own, *command.settings)
    *_, last = combinations(
        [parse(x) for x in with_every_mode(overrides)]
    )  # a sweep leaves out those that cannot be
    compose(sorted(last, key=lambda word: word.partition("=")[0]))  # each choice is composed once


def test_fields_that_are_named_exist() -> None:
    keys = {*leaves(), *fields([x for command in COMMANDS for x in command.settings])}
    sections = {key.partition(".")[0] for key in keys if "." in key} - {"preset"}
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # it names what went, too
            continue
        for name in re.findall(r"(?<=[`\s])([a-z_]+(?:\.[a-z_0-9]+)+)(?==[^=])", text_of(page)):
            if not name.startswith(("recipe.model.", "compare.margin.")):  # names follow
                where = f"{page}: {name}"
                assert name.partition(".")[0] not in sections or name in keys, where


CHECK = ROOT / "docs/how-to/check.md"


def test_the_page_of_check_names_its_checks_and_what_its_files_have() -> None:
    text = text_of(CHECK)
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == [*CHECKS]
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    workflow, gitlab, hooks = map(yaml.safe_load, blocks)
    inputs = workflow["jobs"]["check"]["steps"][-1]["with"]
    assert {*inputs} <= {*yaml.safe_load(text_of(ROOT / "action.yml"))["inputs"]}
    (hook,) = yaml.safe_load(text_of(ROOT / ".pre-commit-hooks.yaml"))
    (used,) = hooks["repos"][0]["hooks"]
    assert used["id"] == hook["id"]
    version = re.search(r'^version = "(.*)"', text_of(ROOT / "pyproject.toml"), re.MULTILINE)
    assert version is not None
    assert text.count(f"v{version[1]}") == 2
    junit = gitlab["precision"]["artifacts"]["reports"]["junit"]
    words = [*shlex.split(gitlab["precision"]["script"][-1])[2:], *used["args"]]
    words += inputs["args"].splitlines()
    assert take(words, CheckSettings)[0].own(CheckSettings).junit == junit


PUBLIC = [mprun.metrics, mprun.numerics, mprun.optim]


@pytest.mark.parametrize("module", PUBLIC, ids=lambda m: m.__name__)
def test_the_public_names_exist(module: ModuleType) -> None:
    page = text_of(ROOT / "docs/reference/python.md")
    entry = page.partition(f"- `{module.__name__}`")[2].partition("\n- ")[0].partition("\n\n")[0]
    names = set(re.findall(r"`([A-Za-z_]+)`", entry))
    assert names
    assert names <= set(module.__all__)


@pytest.mark.parametrize(("page", "script"), [("your_model", "spirals"), ("a_nan", "pairs")])
def test_the_script_of_a_tutorial_is_the_one_that_its_outputs_are_of(
    page: str, script: str
) -> None:
    text = text_of(ROOT / "docs" / "recipes" / f"{script}.py")
    assert f"```python\n{text}```\n" in text_of(ROOT / "docs" / "tutorials" / f"{page}.md")
