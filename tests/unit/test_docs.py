"""What the documents point at exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
TEST_NAME = re.compile(r"`((?:unit|integration|e2e|fault)/\w+\.py)::(\w+)`")
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


def test_every_guarantee_names_tests_that_exist():
    named = TEST_NAME.findall((ROOT / "docs/field-bugs.md").read_text())
    sources = {path: (ROOT / "tests" / path).read_text() for path, _ in named}
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not re.search(rf"(?:def|class) {name}\b|^{name} =", sources[path], re.M)
    ]
    assert named
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(page):
    assert [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()] == []
