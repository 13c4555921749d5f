"""Fixtures that all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

from deploy.model_fetch import fetch_default_model

# Before any kernel is imported: Triton's interpreter runs them on CPU tensors.
os.environ.setdefault("TRITON_INTERPRET", "1")

# No test may fail because the machine is busy, and a commit's verdict is the same each time it is asked for.
# HYPOTHESIS_PROFILE=explore looks for new examples: run by hand, and by night.
hypothesis.settings.register_profile("baton", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=500)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "baton"))


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model's folder, fetched once per machine."""
    return fetch_default_model(Path.home() / ".cache" / "baton", print)


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama of 300 tokens; see tests/tiny_model.py."""
    from tests.tiny_model import make_tiny_model  # torch: only for the tests that need it

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
