"""Pages measured in headless Chromium, without a driver or a library for one.

Each page is put into a frame of a page of our own, once for each width. When all have loaded, a
script there measures every element and writes what it found into the document, which Chromium
prints (`--dump-dom`). A frame's `srcdoc` has the origin of the page around it, so that the script
may look inside, and its media queries see the frame's width.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = (
    *(
        "--headless",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-quic",
        "--no-first-run",
        "--disable-extensions",
    ),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--enable-logging=stderr", "--window-size=1400,1000"),
)
DARK = "--blink-settings=preferredColorScheme=0"
LIGHT = "--blink-settings=preferredColorScheme=1"

WATCH = """<script>
window.problems = [];
addEventListener("error", (e) =>
  problems.push(e.message || `not loaded: ${e.target.tagName}`), true);
addEventListener("unhandledrejection", (e) => problems.push(String(e.reason)));
for (const name of ["alert", "confirm", "prompt"])
  window[name] = () => problems.push(`${name}()`);
</script>"""

MEASURE = """
function name(element) {
  const text = element.textContent.trim().slice(0, 40);
  const kind = element.tagName.toLowerCase(), style = element.getAttribute("class") || "";
  return `<${kind} class="${style}"> ${text}`;
}
function scrolls(element) {
  for (let e = element.parentElement; e; e = e.parentElement)
    if (/auto|scroll/.test(getComputedStyle(e).overflowX)) return true;
  return false;
}
function* tooWide(page, width) {
  if (page.scrollingElement.scrollWidth > width)
    yield `the page scrolls: ${page.scrollingElement.scrollWidth} of ${width} px`;
  for (const element of page.body.querySelectorAll("*")) {
    const box = element.getBoundingClientRect();
    if (box.width && (box.right > width + 0.5 || box.left < -0.5) && !scrolls(element))
      yield `${name(element)}: ${box.left.toFixed(1)} to ${box.right.toFixed(1)} px`;
  }
  for (const box of page.querySelectorAll(".wide:has(> .cards)"))
    if (box.scrollWidth > box.clientWidth + 1)
      yield `a table is cut off: ${box.scrollWidth} of ${box.clientWidth} px`;
  for (const text of page.querySelectorAll("svg.plot text")) {
    const box = text.getBoundingClientRect(), room = text.ownerSVGElement.getBoundingClientRect();
    if (box.width && (box.right > room.right + 0.5 || box.left < room.left - 0.5))
      yield `cut off in a plot: ${text.textContent}`;
    const to = text.getScreenCTM();
    const px = parseFloat(getComputedStyle(text).fontSize) * Math.hypot(to.a, to.b);
    if (box.width && px < 9) yield `${px.toFixed(1)} px in a plot: ${text.textContent}`;
  }
}
function measured(frame) {
  const inside = frame.contentWindow, page = frame.contentDocument;
  const width = page.documentElement.clientWidth, elements = page.body.querySelectorAll("*").length;
  const found = [...inside.problems, ...tooWide(page, width)];
  for (const fold of page.querySelectorAll("details")) fold.open = true;
  found.push(...tooWide(page, width));
  const dark = inside.matchMedia("(prefers-color-scheme: dark)").matches;
  const paper = inside.getComputedStyle(page.body).backgroundColor;
  const {page: title} = frame.dataset;
  return {page: title, width, elements, dark, paper, problems: found};
}
addEventListener("load", () => {
  const results = [...document.querySelectorAll("iframe")].map(measured);
  const shown = document.createElement("pre");
  shown.id = "results";
  shown.textContent = JSON.stringify(results);
  document.body.replaceChildren(shown);
});
"""


def browser() -> str | None:
    """The path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def measured(
    pages: Mapping[str, str], widths: Sequence[int], is_dark: bool, folder: Path
) -> list[dict[str, Any]]:
    """What each page is like at each width, with folded parts closed and then open.

    Args:
        pages: name to HTML.
        widths: of the window, in CSS pixels.
        is_dark: whether the user prefers dark pages.
        folder: an empty one, for the page around and the browser's own files.

    Returns:
        `page`, `width`, `elements`, `dark`, `paper` (the background's colour) and `problems` of
        each; what the browser wrote on its console is a problem of a page named `console`.
    """
    frames = "".join(
        f'<iframe data-page="{html.escape(name)}, {width} px" '
        f'style="width:{width}px; height:900px; border:0" '
        f'srcdoc="{html.escape(text.replace("<head>", f"<head>{WATCH}", 1))}"></iframe>'
        for name, text in pages.items()
        for width in widths
    )
    around = folder / "around.html"
    around.write_text(
        f"<!doctype html><meta charset=utf-8><script>{MEASURE}</script><body>{frames}",
        encoding="utf-8",
        errors="replace",
    )
    program = browser()
    assert program is not None
    options = [*OPTIONS, DARK if is_dark else LIGHT, f"--user-data-dir={folder / 'profile'}"]
    if os.getuid() == 0:
        options.append("--no-sandbox")
    done = subprocess.run(
        [program, *options, "--dump-dom", around.as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
    )
    printed = re.search(r'<pre id="results">(.+?)</pre>', done.stdout, re.DOTALL)
    assert printed is not None, f"{program} measured nothing:\n{done.stderr[-2000:]}"
    results: list[dict[str, Any]] = json.loads(html.unescape(printed[1]))
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return [*results, {"page": "console", "problems": console}]
