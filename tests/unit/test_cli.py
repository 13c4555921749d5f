"""The `baton` command: what a user sees for each mistake is one line and exit code 2."""

from __future__ import annotations

import os
import sys

import pytest

from common.config import Settings
from deploy import cli, options
from deploy.model_folder import resolve_model
from tests.logging_state import logging_restored

COMMANDS = ["serve", "router", "prefill", "decode", "check-config", "version", "model fetch"]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [key for key in os.environ if key.startswith("BATON_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(autouse=True)
def restored_logging():
    with logging_restored():
        yield


@pytest.fixture
def baton(monkeypatch, capsys):
    """Runs the command in this process: (exit code, stdout, stderr)."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["baton", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def test_without_arguments_it_says_how_to_start(baton):
    code, out, _ = baton()
    assert code == 0
    assert "baton serve" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example(baton, command):
    code, out, _ = baton(*command.split(), "--help")
    assert code == 0
    assert f"  baton {command}" in out.partition("Example")[2] or f"baton {command} --" in out.partition("Example")[2]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("serv",), "No such command 'serv'"),
        (("serve", "--prot", "1"), "No such option: --prot"),
        (("serve", "--port", "many"), "Invalid value for '--port'"),
        (("serve", "--port", "70000"), "bad value for 'port' in command line"),
        (("serve", "--set", "prot=1"), "did you mean 'port'?"),
        (("serve", "--set", "port"), "write it as KEY=VALUE"),
        (("serve", "--config", "/nonexistent.toml"), "can't read the settings file /nonexistent.toml"),
        (("prefill",), "needs a Redis"),
        (("decode", "--redis-url", "redis://127.0.0.1:1", "--model", "/nonexistent"), "no folder /nonexistent"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(baton, words, expected):
    code, out, err = baton(*words)
    assert (code, out) == (2, "")
    assert err.startswith("baton: ")
    assert expected in err
    assert err.count("\n") == 1


def test_named_options_set_and_file_reach_the_settings(baton, tmp_path):
    config = tmp_path / "c.toml"
    config.write_text("decode = 3\n")
    code, out, _ = baton("check-config", "--config", str(config), "--set", "max-running=5")
    assert code == 0
    assert "decode = 3" in out
    assert "max_running = 5" in out


@pytest.mark.parametrize("name", list(Settings.model_fields))
def test_every_setting_can_be_an_option(name):
    assert options.kind_of(name) in (int, float, str)
    assert isinstance(options.default_text(name), str)
    assert Settings.model_fields[name].description


def test_a_model_folder_is_made_absolute(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("m", print) == tmp_path / "m"
