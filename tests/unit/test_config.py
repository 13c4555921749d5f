"""Settings: precedence of the four sources, refusal of unknown keys in each, one-line errors, no secret shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import Settings, resolve_settings
from common.errors import StartupError
from deploy import settings_text
from deploy.cluster_plan import to_toml

ROOT = Path(__file__).parents[2]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "baton.toml"
    path.write_text(text)
    return path


def one_line(error: pytest.ExceptionInfo[StartupError]) -> str:
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    return str(error.value)


def test_each_source_overrides_the_next(tmp_path):
    config = write(tmp_path, "port = 1\nprefill = 1\ndecode = 1\n")
    env = {"BATON_PORT": "2", "BATON_PREFILL": "2", "OTHER": "x"}
    resolved = resolve_settings({"port": 3, "grpc_port": None}, config=config, environ=env)
    settings = resolved.settings
    assert (settings.port, settings.prefill, settings.decode, settings.grpc_port) == (3, 2, 1, 0)
    assert resolved.origin == {"port": "command line", "prefill": "environment", "decode": f"file {config}"}


def test_the_environment_names_the_file(tmp_path):
    config = write(tmp_path, "port = 1\n")
    assert resolve_settings({}, environ={"BATON_CONFIG": str(config)}).settings.port == 1
    other = tmp_path / "other.toml"
    other.write_text("port = 5\n")
    assert resolve_settings({}, config=other, environ={"BATON_CONFIG": str(config)}).settings.port == 5


@pytest.mark.parametrize(
    ("cli", "text", "env", "expected"),
    [
        ({"prot": 1}, "", {}, "unknown setting 'prot' in command line: did you mean 'port'?"),
        ({}, "prot = 1", {}, "unknown setting 'prot' in file"),
        ({}, "", {"BATON_PROT": "1"}, "unknown setting 'BATON_PROT' in environment"),
        ({}, "[worker]\nport = 1", {}, "unknown setting 'worker' in file"),
        ({"port": "many"}, "", {}, "bad value for 'port' in command line"),
        ({}, "port = 70000", {}, "bad value for 'port' in file"),
        ({}, "", {"BATON_DTYPE": "int3"}, "bad value for 'dtype' in environment"),
        ({}, "port = ", {}, "is not TOML"),
        ({}, "", {"BATON_REQUEST_TIMEOUT_S": "nan"}, "bad value for 'request_timeout_s' in environment"),
        ({}, "", {"BATON_SHUTDOWN_GRACE_S": "inf"}, "bad value for 'shutdown_grace_s' in environment"),
    ],
)
def test_what_is_wrong_is_told_with_its_source(tmp_path, cli, text, env, expected):
    with pytest.raises(StartupError) as error:
        resolve_settings(cli, config=write(tmp_path, text), environ=env)
    assert expected in one_line(error)


def test_a_missing_file_is_told_by_its_path(tmp_path):
    with pytest.raises(StartupError) as error:
        resolve_settings({}, config=tmp_path / "none.toml", environ={})
    assert str(tmp_path / "none.toml") in one_line(error)


def test_settings_can_not_be_written():
    with pytest.raises(ValueError, match="frozen"):
        resolve_settings({}, environ={}).settings.port = 1


def test_the_effective_set_is_a_settings_file_that_hides_secrets(tmp_path):
    resolved = resolve_settings({"redis_url": "redis://:hunter2@host", "port": 7}, environ={})
    text = settings_text.effective(resolved)
    assert "hunter2" not in text
    assert "hunter2" not in repr(resolved.settings)
    again = resolve_settings({}, config=write(tmp_path, text), environ={}).settings
    assert again.port == 7
    assert again.model_fields_set == set(Settings.model_fields)


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])), st.integers(1, 10**6), st.floats(1e-3, 1e6))
def test_settings_survive_the_file_that_a_child_reads(tmp_path_factory, model, max_running, request_timeout_s):
    values = {"model": model, "max_running": max_running, "request_timeout_s": request_timeout_s}
    path = write(tmp_path_factory.mktemp("toml"), to_toml(values))
    settings = resolve_settings({}, config=path, environ={}).settings
    assert {key: getattr(settings, key) for key in values} == values


def test_the_reference_page_is_current():
    assert (ROOT / "docs" / "SETTINGS.md").read_text() == settings_text.markdown()
