"""The parser of a command. Its errors are short, and name the help to read.

A setting whose flag is not given gets its value from its variable, from the file that --config names, or its default.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from ps_protocol.errors import InvalidRequest
from ps_runtime.config_file import DEFAULT, ConfigFile, complete, written
from ps_runtime.settings import Setting


class _HelpOn(argparse.Action):
    """A flag that prints the help of one group and ends the process."""

    def __init__(self, option_strings: Sequence[str], dest: str, group: argparse._ArgumentGroup, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)
        self._group = group

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        lines = parser._get_formatter()
        lines.add_usage(parser.usage, parser._actions, [])
        lines.start_section(self._group.title)
        lines.add_arguments(self._group._group_actions)
        lines.end_section()
        sys.stdout.write(lines.format_help())
        parser.exit()


class _HelpColumns(argparse.HelpFormatter):
    """Makes the column of command names wide enough. argparse ignores that these names are indented, and would break
    the line after a long name.
    """

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if list(self._iter_indented_subactions(action)):
            self._action_max_length += self._indent_increment


class CommandLine(argparse.ArgumentParser):
    """A command's parser. Its errors are short: the usage of the subcommand, the error, and the command that explains
    more.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.formatter_class = _HelpColumns
        self._settings: list[Setting] = []
        self._needs_all = True  # settings that are required, and the words that are no flags
        self._commands: argparse._SubParsersAction[CommandLine] | None = None
        self._program: CommandLine = self
        self._words: list[str] = []  # the words that are being parsed

    def add_command(self, name: str, text: str, usage: str, *settings: Setting) -> CommandLine:
        """Returns the parser of a command of this program."""
        if self._commands is None:
            self._commands = self.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
        command = self._commands.add_parser(name, help=text, usage=usage)
        command._program = self
        command.add_settings(*settings)
        return command

    def add_settings(self, *settings: Setting, group: argparse._ArgumentGroup | None = None) -> None:
        """Adds the flags of settings, and --config with the first of them. group: the help group of the flags; None:
        the parser's
        """
        if settings and not self._settings:
            self.add_argument(
                "--config", metavar="FILE", help="settings that neither flags nor variables give, as TOML"
            )
        for setting in settings:
            setting.add_to(group or self)
        self._settings += settings

    def add_hidden_group(self, title: str, flag: str) -> argparse._ArgumentGroup:
        """Returns a group of flags that --help leaves out. Adds `flag`, which prints the help of this group."""
        group = argparse._ArgumentGroup(self, title)  # argparse's own help does not list it
        self.add_argument(flag, action=_HelpOn, group=group, help=f"explain the {title}, and exit")
        return group

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Returns the parsed arguments, and the unknown ones. Their attribute `origins` has where each setting's value
        is from.
        """
        self._words = list(sys.argv[1:] if args is None else args)
        known, unknown = super().parse_known_args(self._words, namespace)
        if self._settings:
            self._complete(known)
        return known, unknown

    def _complete(self, known: argparse.Namespace) -> None:
        """Sets the value of each setting whose flag is not given."""
        known.origins = {}
        file = self._read_file(known.config)
        missing = []
        for setting in self._settings:
            if hasattr(known, setting.name):
                known.origins[setting.name] = setting.flag
                continue
            try:
                value, origin = complete(setting, file)
            except argparse.ArgumentTypeError as error:
                self.error(f"argument {setting.flag}: {error}")
            setattr(known, setting.name, value)
            known.origins[setting.name] = origin
            if setting.required and origin == DEFAULT:
                missing.append(setting.flag)
        if missing and self._needs_all:
            self.error(f"the following arguments are required: {', '.join(missing)}")

    def _read_file(self, name: str | None) -> ConfigFile:
        if name is None:
            return ConfigFile()
        commands = self._program._commands.choices.values() if self._program._commands else [self]
        try:
            return ConfigFile.read(name, {setting.key for command in commands for setting in command._settings})
        except InvalidRequest as error:
            self.error(f"argument --config: {error}")

    def settings_of(self, words: Sequence[str]) -> str:
        """Returns the settings of a command line as the text of a file for --config, with a comment where each value is
        from.

        A required setting that is missing is left out.
        """
        assert self._commands is not None
        command = self._commands.choices.get(words[0])
        if command is not None:
            command._needs_all = False
            for action in command._actions:
                if not action.option_strings and action.nargs is None:
                    action.nargs, action.required = "?", False
        known = self.read(words)
        command = self._commands.choices[words[0]]
        return f"# {command.prog}\n{written(command._settings, vars(known), known.origins)}"

    def read(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Parses a command line; None: this process's. After an error it prints the usage and ends the process with
        code 2.
        """
        words = list(sys.argv[1:] if arguments is None else arguments)
        if not words and self._commands is not None:  # help for a person who explores; an error code for a script
            self.print_help(sys.stderr)
            self.exit(2)
        known, unknown = self.parse_known_args(words)
        if unknown:
            command = self._commands.choices[known.command] if self._commands is not None else self
            flags = [flag for action in command._actions for flag in action.option_strings]
            kind = "option" if unknown[0].startswith("-") else "argument"
            command.error(f"unknown {kind} {unknown[0]}{_guess(unknown[0].partition('=')[0], flags)}")
        return known

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Checks a value; argparse calls it. For an unknown command the error names only the nearest command: --help
        lists all.
        """
        if action is self._commands and value not in self._commands.choices:
            self.error(f"unknown command {value}{_guess(value, self._commands.choices)}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """Ends the process with code 2."""
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}{self._advice(message)} (see {self.prog} --help)\n")

    def _advice(self, message: str) -> str:
        """Returns how to pass a value that begins with a dash, which argparse takes for the next flag."""
        for flag, word in zip(self._words, self._words[1:], strict=False):
            if word.startswith("-") and message == f"argument {flag}: expected one argument":
                return f"; if {word} is meant as its value, write {flag}={shlex.quote(word)}"
        return ""


def _guess(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, list(known), 1)
    return f", did you mean {near[0]}?" if near else ""
