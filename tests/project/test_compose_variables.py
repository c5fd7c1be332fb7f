"""What the compose files read of the environment is known by name, so that no command takes it for a mistake."""

from __future__ import annotations

import re
from pathlib import Path

from ps_runtime.settings import unknown_variables

ROOT = Path(__file__).parents[2]


def test_no_variable_of_the_compose_files_is_taken_for_a_mistake() -> None:
    text = "".join(path.read_text() for path in ROOT.glob("docker-compose*.yml"))
    variables = set(re.findall(r"\$\{(PS_[A-Z_]+)", text))
    assert len(variables) > 10
    assert unknown_variables(dict.fromkeys(variables, "1")) is None
