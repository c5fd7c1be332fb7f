"""Completion of commands and flags in bash, zsh and fish: one script for each shell, generated from the parsers.

The scripts contain all names, so no code of this package runs during completion. `ps-server completion SHELL` prints
them, so they belong to the installed release.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ps_runtime.command_line import CommandLine
from ps_runtime.settings import OneOf

SHELLS = ("bash", "zsh", "fish")
FILE, DIRECTORY, OTHER = "file", "directory", "other"
_PLACES = {"FILE": FILE, "DIR": DIRECTORY, "OUT": DIRECTORY, "SCRIPT": FILE}


@dataclass(frozen=True)
class Flag:
    """A flag of a command, or a positional argument.

    names: as they are typed, such as ("-m", "--module"); for a positional argument its metavar
    text:  one line of help
    value: the kind of value, FILE, DIRECTORY or OTHER; None for a switch
    words: all possible values, if they are few; otherwise empty
    """

    names: tuple[str, ...]
    text: str
    value: str | None
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class CommandWords:
    """The flags and arguments of a command. rest: all words after its last argument belong to another program"""

    name: str
    text: str
    flags: tuple[Flag, ...]
    words: tuple[Flag, ...]
    rest: bool


def add_completion(program: CommandLine) -> None:
    """Adds the command `completion` to a program."""
    text = "print what completes commands and flags in bash, zsh or fish"
    command = program.add_command("completion", text, f"{program.prog} completion SHELL")
    command.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")


def script(program: CommandLine, shell: str) -> str:
    """Returns the completion script of a program. shell: one of SHELLS"""
    make: dict[str, Callable[[str, list[CommandWords]], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    return "\n".join(make[shell](program.prog, commands(program))) + "\n"


def commands(program: CommandLine) -> list[CommandWords]:
    """Returns the commands of a program, each with its flags and arguments."""
    assert program._commands is not None
    texts = {action.dest: action.help or "" for action in program._commands._choices_actions}
    return [_command(name, texts[name], parser) for name, parser in program._commands.choices.items()]


def _command(name: str, text: str, parser: CommandLine) -> CommandWords:
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    rest = any(action.nargs == argparse.REMAINDER for action in actions)
    flags = tuple(_flag(action) for action in actions if action.option_strings)
    words = tuple(_flag(action) for action in actions if not action.option_strings and action.nargs is None)
    return CommandWords(name, text, flags, words, rest)


def _flag(action: argparse.Action) -> Flag:
    # Without the note [PS_NAME, default 1], which is for reading.
    text = re.sub(r" \[[^\]]*\]$", "", action.help or "")
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    words = action.type.names if isinstance(action.type, OneOf) else tuple(action.choices or ())
    value = None if action.nargs == 0 else _PLACES.get(metavar, OTHER)
    return Flag(tuple(action.option_strings) or (metavar,), text, value, words)


def _names(flags: tuple[Flag, ...]) -> list[str]:
    return [name for flag in flags for name in flag.names]


# -- bash ------------------------------------------------------------------------------------------------------------

# `--flag=value` comes as three words. `config COMMAND` is completed as that command. The first word without a dash that
# is no flag's value ends the flags of a command that runs a script.
_BASH = """\
{function}() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" first=1 flags valued rest i given=0
  COMPREPLY=()
  [[ $word == "=" ]] && word="" && before="${{COMP_WORDS[COMP_CWORD-1]}}="
  [[ $before == "=" ]] && before="${{COMP_WORDS[COMP_CWORD-2]}}"
  before="${{before%=}}"
  [[ ${{COMP_WORDS[1]}} == config ]] && (( COMP_CWORD > 1 )) && first=2
  if (( COMP_CWORD == first )); then
    COMPREPLY=($(compgen -W {commands} -- "$word"))
    return
  fi
  case "${{COMP_WORDS[first]}}" in
{cases}
    *) return ;;
  esac
  for (( i = first + 1; i < COMP_CWORD; i++ )); do
    if [[ ${{COMP_WORDS[i]}} == "=" ]]; then (( i++ ));
    elif [[ " $valued " == *" ${{COMP_WORDS[i]}} "* ]]; then [[ ${{COMP_WORDS[i+1]}} == "=" ]] || (( i++ ));
    elif [[ ${{COMP_WORDS[i]}} != -* ]]; then (( given++ ));
    fi
  done
  if (( given && rest )); then
    compopt -o default
    return
  fi
  case "${{COMP_WORDS[first]}} $before" in
{values}
  esac
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
    return
  fi
  case "${{COMP_WORDS[first]}} $given" in
{words}
  esac
}}
complete -F {function} {program}"""


def _bash(program: str, known: list[CommandWords]) -> Iterator[str]:
    cases, values, words = [], [], []
    for command in known:
        valued = _names(tuple(flag for flag in command.flags if flag.value is not None))
        flags = f"flags={_quoted(_names(command.flags))}; valued={_quoted(valued)}; rest={command.rest:d}"
        cases.append(f"    {command.name}) {flags} ;;")
        values += [
            f"    {'|'.join(_pattern(command, name) for name in flag.names)}) {_bash_value(flag)}; return ;;"
            for flag in command.flags
            if flag.value is not None
        ]
        words += [
            f"    {_pattern(command, str(place))}) {_bash_value(word)} ;;" for place, word in enumerate(command.words)
        ]
    yield f"# Completion of {program} in bash: made by `{program} completion bash`."
    yield _BASH.format(
        function=_function(program),
        program=program,
        commands=_quoted([command.name for command in known]),
        cases="\n".join(cases),
        values="\n".join(values),
        words="\n".join(words),
    )


def _bash_value(flag: Flag) -> str:
    if flag.words:
        return f'COMPREPLY=($(compgen -W {_quoted(list(flag.words))} -- "$word"))'
    return {
        FILE: 'compopt -o filenames; COMPREPLY=($(compgen -f -- "$word"))',
        DIRECTORY: 'compopt -o filenames; COMPREPLY=($(compgen -d -- "$word"))',
    }.get(flag.value or OTHER, ":")


def _pattern(command: CommandWords, word: str) -> str:
    return f'"{command.name} {word}"'


def _quoted(words: list[str]) -> str:
    return shlex.quote(" ".join(words))


def _function(program: str) -> str:
    return "_" + program.replace("-", "_")


# -- zsh -------------------------------------------------------------------------------------------------------------

_ZSH = """\
{function}() {{
  local -a commands
  commands=(
{commands}
  )
  if [[ ${{words[2]}} == config ]] && (( CURRENT > 2 )); then
    shift words
    (( CURRENT-- ))
  fi
  if (( CURRENT == 2 )); then
    _describe -t commands command commands
    return
  fi
  local command=${{words[2]}}
  shift words
  (( CURRENT-- ))
  case $command in
{cases}
  esac
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  {function} "$@"
else
  compdef {function} {program}
fi"""


def _zsh(program: str, known: list[CommandWords]) -> Iterator[str]:
    names = [f"    {shlex.quote(command.name.replace(':', chr(92) + ':') + ':' + command.text)}" for command in known]
    cases = []
    for command in known:
        lines = [shlex.quote(f"{name}{_zsh_value(flag)}") for flag in command.flags for name in flag.names]
        lines += [
            shlex.quote(f"{place}:{word.names[0]}:{_zsh_values(word)}") for place, word in enumerate(command.words, 1)
        ]
        lines += [shlex.quote("*::argument:_files")] * command.rest
        cases += [
            f"    {command.name})",
            *(f"      {line} \\" for line in ["_arguments -S", *lines[:-1]]),
            f"      {lines[-1]}",
            "      ;;",
        ]
    yield f"#compdef {program}"
    yield f"# Completion of {program} in zsh: made by `{program} completion zsh`."
    yield _ZSH.format(function=_function(program), program=program, commands="\n".join(names), cases="\n".join(cases))


def _zsh_value(flag: Flag) -> str:
    equals = "=" if flag.value is not None and flag.names[0].startswith("--") else ""
    value = "" if flag.value is None else f":{flag.names[-1].lstrip('-')}:{_zsh_values(flag)}"
    text = re.sub(r"([][:])", r"\\\1", flag.text)
    return f"{equals}[{text}]{value}"


def _zsh_values(flag: Flag) -> str:
    if flag.words:
        return f"({' '.join(flag.words)})"
    return {FILE: "_files", DIRECTORY: "_files -/"}.get(flag.value or OTHER, " ")


# -- fish ------------------------------------------------------------------------------------------------------------


def _fish(program: str, known: list[CommandWords]) -> Iterator[str]:
    names = [command.name for command in known]
    yield f"# Completion of {program} in fish: made by `{program} completion fish`."
    yield f"complete -c {program} -f"
    none = shlex.quote(f"not __fish_seen_subcommand_from {' '.join(names)}")
    after = shlex.quote("__fish_seen_subcommand_from config; and test (count (commandline -opc)) -eq 2")
    for command in known:
        for when in (none, after):
            yield f"complete -c {program} -n {when} -a {command.name} -d {_fish_text(command.text)}"
    for command in known:
        here = shlex.quote(f"__fish_seen_subcommand_from {command.name}")
        for flag in command.flags:
            kinds = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            yield f"complete -c {program} -n {here} {kinds}{_fish_value(flag)} -d {_fish_text(flag.text)}"
        for word in command.words:
            if word.words:
                yield f"complete -c {program} -n {here} -a {_quoted(list(word.words))}"
            elif word.value in (FILE, DIRECTORY):
                yield f"complete -c {program} -n {here} -F"


def _fish_value(flag: Flag) -> str:
    if flag.value is None:
        return ""
    if flag.words:
        return f" -x -a {_quoted(list(flag.words))}"
    return {FILE: " -r -F", DIRECTORY: ' -x -a "(__fish_complete_directories)"'}.get(flag.value, " -x")


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
