"""One self-contained HTML page from a report: the JSON itself, a style sheet and the script that draws it."""

from __future__ import annotations

import html
from importlib import resources
from typing import Any, Final

import orjson

_TITLES: Final = {"run": "Load test", "saturate": "Saturation search", "compare": "Two runs side by side"}


def render_page(report: dict[str, Any]) -> str:
    """report: any of baton.bench.run, .saturate, .compare. Loads nothing from elsewhere when opened."""
    assets = resources.files("loadtest.report") / "assets"
    read = {file.name: file.read_text(encoding="utf-8") for file in assets.iterdir()}
    kind = report["schema"].split("/")[0].rpartition(".")[2]
    # "</script>" inside a string would end the element; "<" in JSON can always be written as an escape.
    data = orjson.dumps(report).decode().replace("<", "\\u003c")
    page = read["page.html"]
    for mark, text in (
        ("@TITLE@", html.escape(f"{_TITLES.get(kind, kind)} – baton bench")),
        ("@CSS@", read["page.css"]),
        ("@JS@", read["charts.js"] + read["page.js"].replace('"use strict";\n', "", 1)),
        ("@DATA@", data),
    ):
        page = page.replace(mark, text, 1)
    return page
