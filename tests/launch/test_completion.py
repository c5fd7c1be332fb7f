"""Completion in shells: each shell is given the script, and asked what it would offer."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import ps_server.cli
import ps_worker.cli
from ps_runtime.command_line import CommandLine
from ps_runtime.completion import SHELLS, commands, script

PROGRAMS = {"ps-server": ps_server.cli.parser, "ps-worker": ps_worker.cli.parser}


def program(name: str) -> CommandLine:
    return PROGRAMS[name]()


def run(shell: str, text: str, directory: Path) -> list[str]:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    found = subprocess.run([path], input=text, capture_output=True, text=True, cwd=directory, timeout=60, check=True)
    assert found.stderr == ""
    return found.stdout.splitlines()


def offered_by_bash(line: str, directory: Path) -> list[str]:
    """Returns what bash offers at the end of a line; an option of the shell's, such as `default`, as (default)."""
    # As readline does it, `=` is a word of its own.
    words = [part for word in shlex.split(line) for part in word.replace("=", "\0=\0").split("\0") if part]
    words += [""] * line.endswith(" ")
    function = "_" + words[0].replace("-", "_")
    return run(
        "bash",
        script(program(words[0]), "bash")
        + 'compopt() { printf "(%s)\\n" "$2"; }\n'
        + f"COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}\n"
        + f'{function}; printf "%s\\n" "${{COMPREPLY[@]}}"\n',
        directory,
    )


def offered_by_fish(line: str, directory: Path) -> list[str]:
    name = line.split()[0]
    text = script(program(name), "fish") + f"complete -C {shlex.quote(line)}\n"
    return [found.partition("\t")[0] for found in run("fish", text, directory)]


def offered_by_zsh(line: str, directory: Path) -> list[str]:
    """Returns the flags, words and values that the function hands to zsh's own `_describe` and `_arguments`.

    These two only work in a terminal, with a prompt.
    """
    words = shlex.split(line) + [""] * line.endswith(" ")
    function = "_" + words[0].replace("-", "_")
    said = run(
        "zsh",
        "compdef() { : }\n_describe() { print -l -- ${(P)4} }\n_arguments() { print -l -- $@ }\n"
        + script(program(words[0]), "zsh")
        + f"words=({' '.join(map(shlex.quote, words))}); CURRENT={len(words)}\n{function}\n",
        directory,
    )
    if said[0] != "-S":
        return [name for name in (line.partition(":")[0] for line in said) if name.startswith(words[-1])]
    flag = next((word.rstrip("=") for word in words[-2:] if word.startswith("--")), "")
    values = re.compile(re.escape(flag) + r"=.*\((.*)\)" if flag and words[-1] != flag else r"1:.*\((.*)\)")
    of_value = [found[1].split() for text in said if (found := values.fullmatch(text))]
    names = [re.split(r"=?\[", text)[0] for text in said if text.startswith("-")]
    return of_value[0] if of_value else [name for name in names if words[-1] and name.startswith(words[-1])]


OFFERED = {"bash": offered_by_bash, "fish": offered_by_fish, "zsh": offered_by_zsh}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "some", "never"),
    [
        ("ps-server ", {"up", "status", "completion"}, {"--port"}),
        ("ps-server sta", {"status"}, {"up"}),
        ("ps-server up --checkpoint", {"--checkpoint-dir", "--checkpoint-every"}, {"--port", "--supervised"}),
        ("ps-server up --log-level ", {"debug", "warning"}, {"--port"}),
        ("ps-server config up --log-fo", {"--log-format"}, {"--port"}),
        ("ps-server completion ", {"bash", "zsh", "fish"}, {"up"}),
        ("ps-worker run --transport ", {"auto", "shm", "grpc"}, {"--mode"}),
        ("ps-worker run --transport=", {"auto", "shm", "grpc"}, {"--mode"}),
    ],
)
def test_a_shell_offers_what_may_come_next(
    shell: str, line: str, some: set[str], never: set[str], tmp_path: Path
) -> None:
    found = {word.rpartition("=")[2] or word for word in OFFERED[shell](line, tmp_path)}
    assert some <= found, found
    assert not never & found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ps-server up --config clus", ["(filenames)", "cluster.toml"]),
        ("ps-server up --checkpoint-dir ", ["(filenames)", "saved"]),
        ("ps-server up --checkpoint-dir=sa", ["(filenames)", "saved"]),
        ("ps-server export sa", ["(filenames)", "saved"]),
        ("ps-server up --port ", [""]),
        ("ps-server up --port=", [""]),
        ("ps-server up ", [""]),
        ("ps-server nothing ", [""]),
        ("ps-worker run --workers 2 tra", ["(filenames)", "train.py"]),
        # From the script on, words are the script's: no flag of ps-worker belongs there.
        ("ps-worker run --workers 2 train.py --mo", ["(default)", ""]),
        ("ps-worker run --transport=shm --elastic train.py --mo", ["(default)", ""]),
    ],
)
def test_bash_offers_files_where_files_are_meant(line: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "cluster.toml").touch()
    (tmp_path / "train.py").touch()
    assert offered_by_bash(line, tmp_path) == found


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_flag_of_help_is_completed_and_no_hidden_one(name: str) -> None:
    for command in commands(program(name)):
        parser = program(name)._commands.choices[command.name]  # type: ignore[union-attr]
        known = {word for flag in command.flags for word in flag.names}
        explained = set(re.findall(r"^  (--?[a-z-]+)", parser.format_help(), re.MULTILINE))
        # Those of --help-limits have a help of their own, and are completed, too.
        assert explained <= known
        assert all(word in explained or word.startswith(("--max-", "--help")) for word in known - {"--module"})
        assert "--supervised" not in known
        assert all(flag.text for flag in (*command.flags, *command.words))


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_command_prints_the_script(
    name: str, shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, "completion", shell])
    with pytest.raises(SystemExit) as caught:
        (ps_server.cli if name == "ps-server" else ps_worker.cli).main()
    assert not caught.value.code
    assert capsys.readouterr().out == script(program(name), shell)
