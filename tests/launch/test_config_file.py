"""A command's settings may be in a file: flag before variable before file before default, and `config` tells which."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

import ps_server.cli
import ps_worker.cli
from ps_runtime.command_line import CommandLine
from ps_server.config import SETTINGS, SHARDS
from tests.tools.launching import python


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cluster.toml"


def read(file: Path, text: str, *words: str, program: CommandLine | None = None) -> argparse.Namespace:
    """What `ps-server up --config FILE` finds."""
    file.write_text(text)
    return (program or ps_server.cli.parser()).read([*(words or ["up"]), "--config", str(file)])


def refusal(capsys: pytest.CaptureFixture[str], file: Path, text: str, *words: str) -> str:
    """The last line of what the command says about a file that it refuses."""
    with pytest.raises(SystemExit) as caught:
        read(file, text, *words)
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_flag_comes_before_a_variable_before_the_file_before_the_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "shards = 3\nport = 1\nlease = 7\n"
    monkeypatch.setenv("PS_SHARDS", "4")
    monkeypatch.setenv("PS_PORT", "2")
    found = read(file, text, "up", "--shards", "5")
    assert (found.shards, found.port, found.lease, found.keep) == (5, 2, 7.0, 3)
    origins = {name: found.origins[name] for name in ("shards", "port", "lease", "keep")}
    assert origins == {"shards": "--shards", "port": "PS_PORT", "lease": str(file), "keep": "default"}


def test_an_empty_variable_hides_nothing_of_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_SHARDS", "")
    assert read(file, "shards = 3").shards == 3


def test_texts_numbers_and_switches_are_written_as_toml_has_them(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(file, 'checkpoint-dir = "kept"\nlease = 2.5\ninsecure = true\nmax-push-norm = inf\nrestore = false\n')
    assert (found.checkpoint_dir, found.lease, found.insecure, found.restore) == (Path("kept"), 2.5, True, False)
    assert found.max_push_norm == float("inf")
    monkeypatch.setenv("PS_INSECURE", "0")
    assert read(file, "insecure = true").insecure is False, "a variable can turn off what the file turns on"


def test_a_value_is_checked_as_its_flag_is_and_the_error_names_the_file(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = "expected a whole number from 0 to 65535"
    said = refusal(capsys, file, 'port = "many"')
    assert said == f"ps-server up: argument --port: {expected}, got 'many' (from {file}) (see ps-server up --help)"
    assert f"{expected}, got '65536' (from {file})" in refusal(capsys, file, "port = 65536")
    assert f"expected a text or a number, got True (from {file})" in refusal(capsys, file, "port = true")
    assert f"expected a text or a number, got [1] (from {file})" in refusal(capsys, file, "port = [1]")
    assert f"expected true or false, got {{'a': 1}} (from {file})" in refusal(capsys, file, "insecure.a = 1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("shardz = 3", "unknown setting 'shardz' in FILE, did you mean shards?"),
        ("metrics_port = 3", "unknown setting 'metrics_port' in FILE, did you mean metrics-port?"),
        ("xyzzyq = 3", "unknown setting 'xyzzyq' in FILE"),
        ("[up]\nshards = 3", "unknown setting 'up' in FILE"),
        ("shards = ", "FILE is no TOML: "),
        ("shards = 3\nshards = 4", "FILE is no TOML: "),
        ("x = " + "[" * 5000, "FILE is no TOML: "),
        ("\0", "FILE is no TOML: "),
    ],
)
def test_what_a_file_may_not_say_is_named(file: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    assert f"argument --config: {said.replace('FILE', str(file))}" in refusal(capsys, file, text)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, why in (("missing.toml", "No such file or directory"), ("", "Is a directory")):
        with pytest.raises(SystemExit):
            ps_server.cli.parser().read(["up", "--config", str(tmp_path / name)])
        assert f"argument --config: cannot read {tmp_path / name} ({why})" in capsys.readouterr().err


def test_bytes_that_are_no_text_are_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(b'job = "\xff"')
    with pytest.raises(SystemExit):
        ps_server.cli.parser().read(["up", "--config", str(file)])
    assert f"{file} is no TOML" in capsys.readouterr().err


def test_one_file_serves_every_command_of_a_program(file: Path) -> None:
    text = 'index = 1\ncoordinator = "h:1"\nshards = 3\njob = "mine"\nserver = "h:2"\n'
    shard = read(file, text, "shard")
    assert (shard.index, shard.coordinator) == (1, "h:1"), "a setting that is required may be in the file"
    assert read(file, text, "up").shards == 3
    assert read(file, text, "end").job == "mine"
    assert read(file, text, "status").server == "h:2"


def test_the_launcher_hands_its_workers_what_the_file_says(file: Path) -> None:
    script = ["run", "--mode", "ssp:2"]
    file.write_text('server = "h:1"\nworkers = 3\nmode = "sync"\njob = "mine"\nlog-format = "json"\n')
    found = ps_worker.cli.parser().read([*script, "--config", str(file), __file__])
    launch = ps_worker.cli.launch_of(found)
    assert (launch.workers, launch.mode) == (3, "ssp:2")
    settings = launch.settings
    assert (settings["PS_SERVER"], settings["PS_JOB"], settings["PS_LOG_FORMAT"]) == ("h:1", "mine", "json")


# -- ps-server config ------------------------------------------------------------------------------------------------


def test_config_names_where_each_value_is_from(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text('checkpoint-dir = "a \\"b\\""\nlease = 7\n')
    monkeypatch.setenv("PS_PORT", "7000")
    command = ["ps-server", "config", "up", "--shards", "3", "--insecure", "--config", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as caught:
        ps_server.cli.main()
    assert caught.value.code == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["#", "ps-server", "up"]
    assert ["shards", "=", "3", "#", "--shards"] in lines
    assert ["port", "=", "7000", "#", "PS_PORT"] in lines
    assert ["lease", "=", "7.0", "#", str(file)] in lines
    assert ["insecure", "=", "true", "#", "--insecure"] in lines
    assert ["keep", "=", "3", "#", "default"] in lines
    assert ["#", "tokens", "is", "not", "set"] in lines
    assert len(lines) == 4 + len(SETTINGS), "with --shards and two more that only `up` has"


def test_what_config_prints_can_be_read_back(file: Path) -> None:
    words = ["up", "--shards", "3", "--checkpoint-dir", 'é "quoted"\t\\ \x7f', "--lease", "0.1", "--restore"]
    words += ["--tls-ca", "ca.pem", "--max-caller-bytes", "99999999999"]
    printed = ps_server.cli.parser().settings_of(words)
    direct, again = ps_server.cli.parser().read(words), read(file, printed)
    names = [setting.name for setting in (SHARDS, *SETTINGS)]
    assert {name: getattr(again, name) for name in names} == {name: getattr(direct, name) for name in names}


def test_config_needs_neither_a_script_nor_what_is_required() -> None:
    shard = ps_server.cli.parser().settings_of(["shard", "--with-coordinator"])
    assert "# index is not set\n" in shard
    run = ps_worker.cli.parser().settings_of(["run", "--mode", "ssp:4"])
    assert [line.split() for line in run.splitlines() if line.startswith("mode")] == [
        ["mode", "=", '"ssp:4"', "#", "--mode"]
    ]


def test_config_without_a_command_is_that_of_up_and_of_run() -> None:
    for module, command in (("ps_server", "up"), ("ps_worker", "run")):
        done = python("-m", module, "config")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"# {module.replace('_', '-')} {command}\n")


def test_config_shows_no_secret(tmp_path: Path) -> None:
    secret = tmp_path / "tokens"
    secret.write_text("worker hunter2hunter2hunter2\n")
    secret.chmod(0o600)
    printed = ps_server.cli.parser().settings_of(["up", "--tokens", str(secret), "--tls-key", str(secret)])
    assert printed.count(str(secret)) == 2
    assert "hunter2" not in printed


def test_config_of_a_command_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ps_server.cli.parser().settings_of(["upp"])
    assert caught.value.code == 2
    assert "unknown command upp, did you mean up?" in capsys.readouterr().err
