"""What pyproject.toml cannot say: the README as a package index shows it, where a relative link would lead nowhere."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def setting(name: str) -> str:
    """Returns a text of pyproject.toml by its name, which is the first of that name."""
    match = re.search(rf'^{name} = "(.*)"$', (HERE / "pyproject.toml").read_text(), re.MULTILINE)
    assert match, f"pyproject.toml has no {name}"
    return match[1]


def with_absolute_links(text: str) -> str:
    """Returns Markdown whose relative links lead to the files of this version in the repository."""
    files = f"{setting('Repository')}/blob/v{setting('version')}/"
    return re.sub(r"(\]\()(?![a-z]+:|#)", rf"\1{files}", text)


setup(
    long_description=with_absolute_links((HERE / "README.md").read_text()),
    long_description_content_type="text/markdown",
)
