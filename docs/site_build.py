"""What `make site` adds to the pages of docs/: hooks of MkDocs, which mkdocs.yml names.

A page is written once, for GitHub and for the site. What is generated is not committed:

- Links to README.md lead to the site's own first page, `index.md`.
- `reference/commands.md` has every command with its settings.
- A comment `<!-- site: NAME -->` in a page becomes what is made from the code: every field, the
  docstrings of the public names, the answer that README.md shows, the findings of a check, the
  report of a comparison, what differs between versions.
- A link to a file outside of docs/ leads to the repository, if `SOURCE_URL` names it.
"""

from __future__ import annotations

import json
import math
import posixpath
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from omegaconf import MISSING

import mprun
from docs.examples import examples
from docs.versions import page as versions_page
from mprun.cli.compare_command import compared
from mprun.cli.main import COMMANDS
from mprun.config import settings
from mprun.config.reference import GROUPS, Field, leaves, options
from mprun.config.settings import CompareSettings
from mprun.inspect.check.check_result import CHECKS, kinds
from mprun.records.mode_names import ALIASES
from mprun.study.report.exports import page as html_page
from mprun.study.report.plots import draw

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]+)?\)")
MARK = re.compile(r"^<!-- site: (\w+) -->$", re.MULTILINE)
REPORT = "example_report.html"


def on_config(config: MkDocsConfig) -> None:
    """Let pages be edited where the repository is known."""
    if config.extra["source"]:
        config.edit_uri = f"{config.extra['source']}/edit/main/docs/"


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages and the file that are made here."""
    made = {
        "reference/commands.md": commands_page(),
        REPORT: example_report(),
    }
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A page with what belongs at its marks, and with links that lead somewhere on the site."""
    path, source = page.file.src_uri, config.extra["source"]
    folder = posixpath.dirname(path)

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if files.get_file_from_path(posixpath.normpath(posixpath.join(folder, target))):
            return match[0]
        goal = posixpath.normpath(posixpath.join("docs", folder, target))
        if goal == "README.md":
            return f"[{text}]({posixpath.relpath('index.md', folder or '.')}{anchor})"
        if not (ROOT / goal).exists():
            return match[0]  # which MkDocs reports
        return f"[{text}]({source}/blob/main/{goal}{anchor})" if source else f"{text} (`{goal}`)"

    def fill(match: re.Match[str]) -> str:
        made = {
            "answer": answer,
            "fields": fields,
            "python": python,
            "report": report,
            "findings": findings,
            "versions": versions,
        }
        return made[match[1]](posixpath.relpath(REPORT, folder or "."))

    return MARK.sub(fill, LINK.sub(link, markdown))


# ---- commands and fields -------------------------------------------------------------------------


ELSEWHERE = {
    "advise": "studies.md#advise",
    "diff": "../how-to/loops.md#where-two-models-part",
    "double": "studies.md#double",
    "export": "../how-to/runs.md#weights-for-other-programs",
    "new-recipe": "../tutorials/your_model.md#1-the-recipe",
    "replay": "../tutorials/a_nan.md#3-a-nan-in-your-own-loop",
    "sweep": "studies.md#sweep",
}
"""Commands that share a page with others."""


def commands_page() -> str:
    """Every command: its help, and its settings as fields; those of `compare` once."""
    parts = ["# Every command\n"]
    for command in COMMANDS:
        shared = "compare" in command.settings and command.name != "compare"
        own = [name for name in command.settings if name != "compare" or not shared]
        lines = [_line(field) for field in settings.fields(own).values()] if own else []
        lines += ["- the settings of [compare](#compare)"] if shared else []
        parts += [f"## {command.name}\n\n{command.text}\n", *lines, ""]
        target = ELSEWHERE.get(command.name, f"{command.name}.md")
        if command.name in ELSEWHERE or (ROOT / "docs" / "reference" / target).exists():
            parts.append(f"[More about {command.name}]({target})\n")
    return "\n".join(parts)


def fields(_: str) -> str:
    """The groups with their options, then every field."""
    groups = [f"- `{g}`: " + ", ".join(f"`{name}`" for name in options(g)) for g in GROUPS]
    names = ", ".join(f"`{name}` ({mode})" for name, mode in ALIASES.items())
    groups.append(f"\nOther names of modes, recorded under mprun's: {names}.")
    sections: dict[str, list[str]] = {}
    for field in leaves().values():
        if field.key not in {f"{group}.name" for group in GROUPS}:
            section, dot, _ = field.key.partition(".")
            sections.setdefault(section if dot else "of no section", []).append(_line(field))
    lines = [x for name, own in sections.items() for x in (f"\n### {name}\n", *own)]
    return "\n".join(["## Groups\n", *groups, "\n## Fields", *lines])


def _line(field: Field) -> str:
    """A field as a line, without legal values that its text or default already shows."""
    default = "" if field.default == MISSING else f"={field.default_text}"
    legal = field.legal.removeprefix("a ").removeprefix("one of ").replace(" [name, ...]", "")
    legal = legal.removesuffix(", or null") if field.default is None else legal
    has_value = field.default is not None and field.default != MISSING  # which shows its type
    shown = _names_all(field) if field.choices else has_value
    return f"- `{field.key}{default}`" + ("" if shown else f" ({legal})") + f": {field.doc}"


def _names_all(field: Field) -> bool:
    """Whether a field's text names each of its legal values."""
    return all(re.search(rf"\b{choice}\b", field.doc) for choice in field.choices)


def answer(_: str) -> str:
    """What a sweep prints, as README.md shows it."""
    return next(f"```\n{x.block}```" for x in examples() if x.example == "answer")


def versions(_: str) -> str:
    """The environments that mprun is tried with, and what differs between them."""
    return versions_page()


def findings(_: str) -> str:
    """Every kind of finding of `mprun check`: its meaning, an example, its cure."""
    parts = []
    for check, holds in CHECKS.items():
        parts.append(f"## {check}\n\n{holds[0].upper()}{holds[1:]}.\n")
        for name, kind in kinds().items():
            if kind.check == check:
                parts.append(f"### {name}\n\n{kind.severity.capitalize()}: {kind.text}.\n")
                parts.append(f"```python\n{kind.example}\n```\n\nCure: {kind.cure}.\n")
    return "\n".join(parts)


# ---- the Python interface ------------------------------------------------------------------------

PACKAGES = ("mprun.metrics", "mprun.numerics", "mprun.optim")
CALLBACKS = ("transformers", "lightning")


def python(_: str) -> str:
    """Where mkdocstrings puts the docstrings of the public names."""
    own = [f"mprun.{n}" for n in mprun.__all__ if f"mprun.{n}" not in PACKAGES and n[0] != "_"]
    own += [f"mprun.integrations.{name}.MprunCallback" for name in CALLBACKS]
    parts = ["## mprun\n"]
    parts += map("::: {}\n".format, own)
    for package in PACKAGES:
        names = import_module(package).__all__
        parts += [f"## {package} {{#{package}}}\n", *(f"::: {package}.{name}\n" for name in names)]
    return "\n".join(parts)


# ---- the report ----------------------------------------------------------------------------------

FRAME = """\
<iframe src="{0}" title="A report of mprun compare" class="report" loading="lazy"></iframe>

The page [alone]({0}). Its figures are generated, not measured: they show the form.
"""
MODES = {
    "fp32": (76.0, 0.8941, 59),
    "bf16_mixed": (25.0, 0.8949, 55),
    "bf16_sr": (23.0, 0.8932, 30),
    "bf16_true": (24.0, 0.8853, 30),
}
"""Of the report's modes: step time (ms), mean accuracy, memory at the peak (MiB)."""


def report(path: str) -> str:
    """The report in a frame."""
    return FRAME.format(path)


@cache
def example_report() -> str:
    """The page that `mprun compare` writes about made-up runs of four modes."""
    write_run = import_module("tests.study.compare.folders").write_run
    with tempfile.TemporaryDirectory() as folder:
        for mode, (ms, accuracy, peak) in MODES.items():
            for seed in range(5):
                run: Path = write_run(
                    Path(folder, f"{mode}-{seed}"),
                    mode,
                    seed,
                    f"precision: {mode}\n",
                    recipe="example",
                    data={"name": "made-up figures", "source": "generated"},
                    hardware__name="made-up CPU",
                    accuracy=accuracy + 0.003 * seed + 5e-4 * math.sin(ms * (seed + 1)),
                    step_ms=ms * (1 + 0.05 * math.sin(accuracy * 1e4 * (seed + 1))),
                    memory_bytes__peak=peak * 2**20,
                )
                rows = "".join(json.dumps(row) + "\n" for row in _rows(seed, ms, accuracy))
                (run / "metrics.jsonl").write_text(rows, encoding="utf-8")
        found = compared([Path(folder)], CompareSettings())
        return html_page(found, draw(found))


def _rows(seed: int, step_ms: float, accuracy: float) -> Iterator[dict[str, Any]]:
    """The lines of a run whose loss falls over four epochs."""
    for step in range(1, 61):
        loss = 2.3 / (1 + 0.15 * step) + (0.9 - accuracy) + 0.02 * math.sin(1.7 * step + seed)
        row = {"step": step, "epoch": 1 + (step - 1) // 15, "loss": loss}
        time_ms = step_ms * (1 + 0.1 * math.sin(2.3 * step + seed))
        yield {
            "kind": "step",
            **row,
            "lr": 1e-3,
            "loss_scale": 1.0,
            "skipped": False,
            "step_time_ms": time_ms,
            "data_time_ms": 0.2,
        }
        if step % 15 == 0:
            yield {"kind": "validation", **row, "accuracy": accuracy - 0.2 / step}
