"""Fixtures that all tests share."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

from deploy.model_fetch import fetch_default_model

# No test may fail because the machine is busy.
hypothesis.settings.register_profile("baton", deadline=None)
hypothesis.settings.load_profile("baton")


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model's folder, fetched once per machine."""
    return fetch_default_model(Path.home() / ".cache" / "baton", print)


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama of 300 tokens; see tests/tiny_model.py."""
    from tests.tiny_model import make_tiny_model  # torch: only for the tests that need it

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
