"""A file of settings, as TOML: `--config FILE` reads it, and `config` prints one.

    shards = 4 checkpoint-every = "60s"

A name is that of the flag, without its dashes. A name that no command of the program knows is refused. A name that only
other commands know is ignored, so that one file can serve all commands.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ps_protocol.errors import InvalidRequest
from ps_runtime.settings import Setting, advice

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT = "default"  # where a value is from that nothing gives
_COMMENT_COLUMN = 48


@dataclass(frozen=True)
class ConfigFile:
    """The content of a file: values by the names of their flags. name: that of the file, for messages"""

    name: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str, known: Collection[str]) -> ConfigFile:
        """Reads a file. Raises InvalidRequest if it is not valid TOML, or has a name that is not in `known`."""
        try:
            values = tomllib.loads(Path(name).read_text("utf-8"))
        except OSError as error:
            raise InvalidRequest(f"cannot read {name} ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{name} is no TOML: {error}") from None
        for key in values:
            if key not in known:
                near = get_close_matches(key.replace("_", "-"), sorted(known), 1)
                hint = f", did you mean {near[0]}?" if near else ""
                raise InvalidRequest(f"unknown setting {key!r} in {name}{hint}")
        return cls(name, values)

    def text_of(self, setting: Setting) -> str | None:
        """Returns the value of a setting as the text of its flag; None if the file does not have it.

        Raises argparse.ArgumentTypeError for a value of a type that the setting does not take.
        """
        value = self.values.get(setting.key)
        if isinstance(value, bool):
            if setting.kind is bool:
                return str(int(value))
        elif value is None or isinstance(value, str | int | float):
            return None if value is None else str(value)
        expected = "true or false" if setting.kind is bool else "a text or a number"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {value!r}")


def complete(setting: Setting, file: ConfigFile) -> tuple[Any, str]:
    """Returns the value of a setting whose flag is not given, and its origin: its variable, the file, or DEFAULT.

    Raises argparse.ArgumentTypeError with the error and the origin of the value.
    """
    given = setting.given()
    origin = setting.variable if given else file.name
    try:
        text = given or file.text_of(setting)
        return (setting.unset, DEFAULT) if text is None else (setting.parse(text), origin)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} (from {origin}{advice(given or '')})") from None


def written(settings: Sequence[Setting], values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Returns settings as the text of a file for --config. origins: by name, where the value is from, for
    the comments
    """
    lines = []
    for setting in settings:
        value = values[setting.name]
        if value is None:
            lines.append(f"# {setting.key} is not set")
        else:
            lines.append(f"{f'{setting.key} = {_literal(value)}':<{_COMMENT_COLUMN}}  # {origins[setting.name]}")
    return "\n".join(lines)


def _literal(value: Any) -> str:
    """Returns a value as a TOML literal."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return "inf" if math.isinf(value) else repr(value)
    # A basic string of TOML escapes what JSON does, and one character more.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
