"""What is published agrees with itself: versions, addresses, links, and the workflows that publish it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

import ps_server
import ps_worker
from ps_runtime.version import version

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
REPOSITORY = re.findall(r'^Repository = "(.*)"$', PYPROJECT, re.MULTILINE)[0]
VERSION = re.findall(r'^version = "(.*)"$', PYPROJECT, re.MULTILINE)[0]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def readme_of_the_index() -> str:
    """The README as setup.py hands it over."""
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    with mock.patch("setuptools.setup") as setup:  # it would build; only what it is handed is looked at
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    text: str = setup.call_args.kwargs["long_description"]
    return text


def test_the_version_is_told_in_one_place_and_is_the_same_everywhere() -> None:
    assert version() == ps_worker.__version__ == ps_server.__version__ == VERSION, "install again after a new version"
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION
    assert version("there-is-no-such-distribution") == "0+unknown"


def test_every_address_of_the_repository_is_that_of_the_project() -> None:
    """So that a change of it is one line, and this test names the places that follow."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("*.cff"), *(ROOT / "docs").glob("*.md"), *(ROOT / ".github").rglob("*.*ml")]
    named = {url for file in files for url in re.findall(r"https://[\w./-]*ps-torch/ps-torch", file.read_text())}
    assert named == {REPOSITORY}
    urls = re.findall(r'^(\w+) = "(https://.*)"$', PYPROJECT, re.MULTILINE)
    assert {name for name, _ in urls} == {"Repository", "Documentation", "Changelog", "Issues"}


def test_links_of_the_readme_lead_to_files_of_the_version() -> None:
    links = re.findall(r"\]\(([^)]+)\)", readme_of_the_index())
    base = f"{REPOSITORY}/blob/v{VERSION}/"
    assert len(links) > 30
    assert [link for link in links if not link.startswith(base)] == []
    assert [link for link in links if not (ROOT / link.removeprefix(base).partition("#")[0]).exists()] == []


def test_every_dependency_says_what_it_is_for() -> None:
    block = PYPROJECT[PYPROJECT.index("dependencies = [") : PYPROJECT.index("[tool.setuptools")]
    entries = re.findall(r'^  ["{].+$', block, re.MULTILINE)
    assert len(entries) > 30
    assert [
        entry for entry in entries if not re.fullmatch(r'  (?:".+"|{include-group = ".+"}),\s+# .{5,}', entry)
    ] == []


def test_every_page_of_the_docs_is_in_the_menu() -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    menus = re.findall(r"```\{toctree\}\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    listed = [line for menu in menus for line in menu.split() if line in pages]
    assert sorted(listed) == sorted(pages), "docs/index.md lists each page once"


# -- the changelog ---------------------------------------------------------------------------------------------------

KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def faults_of(changelog: str, current: str) -> Iterator[str]:
    """What of a changelog is not as Keep a Changelog has it."""
    titles = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    if titles[:1] != ["[Unreleased]"]:
        yield "begins with Unreleased"
    versions = []
    for title in titles[1:]:
        match = re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d", title)
        if match:
            versions.append(tuple(map(int, match.groups())))
        else:
            yield f"no version and date: {title}"
    if versions != sorted(set(versions), reverse=True):
        yield "newest first"
    if versions and tuple(map(int, current.split("."))) < versions[0]:
        yield "a version of the future"
    yield from (
        f"no kind of change: {kind}" for kind in re.findall(r"^### (.*)$", changelog, re.MULTILINE) if kind not in KINDS
    )


def test_the_changelog_has_its_form() -> None:
    assert list(faults_of((ROOT / "CHANGELOG.md").read_text(), VERSION)) == []


@pytest.mark.parametrize(
    ("changelog", "fault"),
    [
        ("## [0.1.0] - 2026-01-01\n", "begins with Unreleased"),
        ("## [Unreleased]\n## 0.1.0\n", "no version and date: 0.1.0"),
        ("## [Unreleased]\n## [0.1.0] - 2026-01-01\n## [0.1.1] - 2026-01-02\n", "newest first"),
        ("## [Unreleased]\n## [9.0.0] - 2026-01-01\n", "a version of the future"),
        ("## [Unreleased]\n### Other\n", "no kind of change: Other"),
    ],
)
def test_what_is_wrong_with_a_changelog_is_found(changelog: str, fault: str) -> None:
    assert fault in [*faults_of(changelog, "0.1.1")]


# -- the workflows ---------------------------------------------------------------------------------------------------


def steps(workflow: Any) -> list[dict[str, Any]]:
    """Every step of every job."""
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_is_pinned_bounded_and_may_only_what_it_needs(file: Path) -> None:
    text, workflow = file.read_text(), yaml.safe_load(file.read_text())
    used = re.findall(r"uses: (.+)$", text, re.MULTILINE)
    assert used
    assert [each for each in used if not PINNED.fullmatch(each)] == [], "a tag can be moved"
    assert workflow["permissions"] == {}, "each job says what it may"
    for job in workflow["jobs"].values():
        assert {"permissions", "timeout-minutes"} <= job.keys()
        assert job["runs-on"] != "ubuntu-latest", "a run says tomorrow what it says today"
    for step in steps(workflow):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_one_version_of_an_action_is_used_everywhere() -> None:
    used = {each for file in WORKFLOWS for each in re.findall(r"uses: (.+)$", file.read_text(), re.MULTILINE)}
    assert len({each.partition("@")[0] for each in used}) == len(used)


def test_what_the_workflows_run_is_what_a_person_runs() -> None:
    """Nothing is checked in a way that cannot be had at home."""
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    run = [step["run"] for file in WORKFLOWS for step in steps(yaml.safe_load(file.read_text())) if "run" in step]
    made = {line.split()[1] for line in run if line.startswith("make ")}
    assert made <= targets
    assert {"test", "test-release", "dist", "docs"} <= made
    assert {"bash .ci/run", "bash .ci/more"} <= set(run)
    texts = (ROOT / ".ci/run").read_text() + (ROOT / ".ci/more").read_text()
    called = set(re.findall(r"(?=(?:make|test-[a-z]+) (test[a-z-]*))", texts))  # one make may have several
    assert called == {target for target in targets if target.startswith("test")} - {"test-newest"}  # a look ahead


def test_the_tests_run_on_every_version_of_python_that_is_promised() -> None:
    promised = set(re.findall(r"Python :: (3\.\d+)", PYPROJECT))
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    [whole] = [
        step["with"]["python-version"] for step in jobs["everything"]["steps"] if "python" in str(step.get("with"))
    ]
    assert {whole, *jobs["tests"]["strategy"]["matrix"]["python"]} == promised


def test_only_the_job_that_publishes_can_publish() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job["permissions"]] == ["publish"]
    assert not [step for step in jobs["publish"]["steps"] if "run" in step], "it runs nothing of the repository"
    assert jobs["publish"]["needs"] == "build"
    uses = [step["uses"].partition("@")[0] for step in jobs["publish"]["steps"]]
    assert uses.index("actions/attest") < uses.index("pypa/gh-action-pypi-publish"), "signed before it is published"
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_that_install_torch_take_its_build_for_cpus(path: Path) -> None:
    """As CONTRIBUTING.md says: that of PyPI is 5 GB."""
    workflow = yaml.safe_load(path.read_text())
    for name, job in workflow["jobs"].items():
        runs = [step["run"] for step in job.get("steps", []) if "run" in step]
        if any(re.search(r"make (test|bench|demo|docs)|\.ci/", run) for run in runs):
            index = {**workflow.get("env", {}), **job.get("env", {})}.get("TORCH_INDEX", "")
            assert index.endswith("/whl/cpu"), name
