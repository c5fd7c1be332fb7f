"""The parser of a command: its errors are short, and say where to read on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

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


class CommandLine(argparse.ArgumentParser):
    """A command's parser, whose errors are short: the usage of the subcommand, what is wrong, and where to read on."""

    def add_settings(self, *settings: Setting) -> None:
        """Adds the flags of settings."""
        for setting in settings:
            setting.add_to(self)

    def add_hidden_group(self, title: str, flag: str) -> argparse._ArgumentGroup:
        """Returns a group of flags that --help leaves out, and adds a flag that explains them alone."""
        group = argparse._ArgumentGroup(self, title)  # which argparse's own help does not go through
        self.add_argument(flag, action=_HelpOn, group=group, help=f"explain the {title}, and exit")
        return group

    def read(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Returns the arguments as values; an error ends the process with code 2, with the usage of the subcommand."""
        known, unknown = self.parse_known_args(arguments)
        if unknown:
            command = next(
                (each.choices[known.command] for each in self._actions if isinstance(each.choices, dict)), self
            )
            flags = [flag for action in command._actions for flag in action.option_strings]
            near = get_close_matches(unknown[0].partition("=")[0], flags, 1)
            kind = "option" if unknown[0].startswith("-") else "argument"
            command.error(f"unknown {kind} {unknown[0]}" + (f", did you mean {near[0]}?" if near else ""))
        return known

    def error(self, message: str) -> NoReturn:
        """Ends the process with code 2."""
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")
