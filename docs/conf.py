"""How `make docs` makes a site of these pages. Nothing in it comes from elsewhere, and every warning is an error."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

project = "ps-torch"
release = metadata.version(project)
author = "The ps-torch project"
REPOSITORY = next(
    url.partition(", ")[2]
    for url in metadata.metadata(project).get_all("Project-URL", [])
    if url.startswith("Repository, ")
)

extensions = ["myst_parser"]
root_doc = "index"
myst_heading_anchors = 4  # a link to a heading that is not there is an error, too

html_theme = "furo"
html_title = f"ps-torch {release}"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"source_repository": f"{REPOSITORY}/", "source_branch": "main", "source_directory": "docs/"}


def lead_to_the_repository(app: Any, page: str, content: list[str]) -> None:
    """Has links to files outside of docs/ lead to the repository, as they do where the page is read there."""
    content[0] = re.sub(r"\]\(\.\./", f"]({REPOSITORY}/blob/main/", content[0])


def setup(app: Any) -> None:
    """Is called by Sphinx."""
    app.connect("source-read", lead_to_the_repository)
