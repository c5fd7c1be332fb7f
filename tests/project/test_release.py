"""A release as a stranger gets it: the wheel runs, the sdist is whole, the site and the workflows stand by themselves.

It needs the tools of the group `release`: make test-release.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from ps_tables.native.libraries import LEVELS, file_name
from tests.tools.imports import PACKAGES
from tests.tools.pythons import interpreter, promised

TOOLS = ("build", "twine", "ziglang", "sphinx", "myst_parser", "furo", "check_jsonschema")
pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(
        any(importlib.util.find_spec(tool) is None for tool in TOOLS),
        reason="the group `release` is not installed: make test-release",
    ),
]

ROOT = Path(__file__).parents[2]
TINY = ["--steps=6", "--batch-size=2", "--layers=1", "--heads=2", "--width=16", "--block=8", "--goal=6"]
# Some of every kind: what is published, values, a real cluster.
SOME_TESTS = [
    "tests/project/test_publishing.py",
    "tests/protocol/test_layout.py",
    "tests/project/test_docs.py::test_the_first_example_runs_as_it_stands[sync]",
]


ONE_LOOP = """
import sys
import numpy as np
from ps_tables.native.loading import libraries, load

sums = np.zeros((2, 2), np.float32)
load(libraries()[0]).add(sums, np.array([1, 1]), np.array([[1, 2], [3, 4]], np.float32))
assert "torch" not in sys.modules
print("%d.%d" % sys.version_info[:2], sums.tolist(), sep="\\n")
"""


def call(*command: str | Path, folder: Path = ROOT, seconds: float = 200.0, **variables: str) -> str:
    """Runs a command to its end, which must be a good one; returns what it said, warnings included."""
    environment = {**os.environ, **variables}
    words = [str(word) for word in command]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(words, cwd=folder, env=environment, text=True, timeout=seconds, check=False, **both)
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def files_of(folder: Path) -> set[str]:
    """Every file below a folder, by its path in it; those behind a link, too."""
    walked = os.walk(folder, followlinks=True)
    return {(Path(place) / name).relative_to(folder).as_posix() for place, _, names in walked for name in names}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as a clone has it: without what git ignores, and nothing of an earlier build."""
    folder = tmp_path_factory.mktemp("clone") / "ps-torch"
    lines = (ROOT / ".gitignore").read_text().splitlines()
    ignored = [line.strip("/") for line in lines if line and not line.startswith("#")]
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(".git", *ignored))
    return folder


@pytest.fixture(scope="module")
def dist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheels, made as `make dist` makes them."""
    folder = tmp_path_factory.mktemp("dist")
    before = files_of(tree)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    said = call(*build, folder=tree, PS_NATIVE="off")
    for machine in LEVELS:
        zig = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.2.17"
        platform = f"--plat-name=manylinux_2_17_{machine}"
        said += call(*build, "--wheel", f"-C--build-option={platform}", folder=tree, CC=zig)
    assert "*****" not in said, f"setuptools frames what will be an error one day: {said}"
    for name in files_of(tree) - before:
        (tree / name).unlink()  # the egg-info
    return folder


@pytest.fixture(scope="module")
def sdist(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    [archive] = dist.glob("*.tar.gz")
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    [unpacked] = folder.iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    """The wheel for every machine."""
    [built] = dist.glob("*-any.whl")
    return built


# -- the wheel and the sdist -----------------------------------------------------------------------------------------


def test_an_index_has_nothing_to_say_against_them(dist: Path) -> None:
    assert call(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir()).count("PASSED") == 4


def test_the_sdist_is_the_repository(sdist: Path, tree: Path) -> None:
    made = {"PKG-INFO", "setup.cfg"}
    twice = {"ps_protocol/proto/released.binpb"}  # behind the link to proto/, of which the packages need the rest
    inside = {name for name in files_of(sdist) if not name.startswith("ps_torch.egg-info/")}
    assert files_of(tree) - inside == twice, "MANIFEST.in leaves them out"
    assert inside - files_of(tree) == made


def test_the_wheel_has_the_packages_and_its_licence_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    [information] = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, information}
    assert f"{information}/licenses/LICENSE" in names
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 2_000_000


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_the_wheels_for_a_machine_are_for_every_python_and_an_old_glibc(
    dist: Path, wheel: Path, tmp_path: Path
) -> None:
    """As pip chooses among them, and as auditwheel looks at their libraries."""
    plain = {*zipfile.ZipFile(wheel).namelist()}
    for machine, levels in LEVELS.items():
        [found] = dist.glob(f"*-py3-none-manylinux_2_17_{machine}.whl")
        libraries = {f"ps_tables/native/{file_name(level)}" for level in levels}
        with zipfile.ZipFile(found) as packed:
            assert {*packed.namelist()} - plain == libraries
            for name in libraries:
                said = call("objdump", "-p", packed.extract(name, tmp_path))
                assert {*re.findall(r"NEEDED +(\S+)", said)} <= {"libc.so.6", "libm.so.6"}
                versions = re.findall(r"GLIBC_(\d+)\.(\d+)", said)
                assert versions
                assert max((int(major), int(minor)) for major, minor in versions) <= (2, 17)
    versions = ("3.10", "3.11", "3.12", "3.13")
    for number, wanted in itertools.product(
        versions, ("manylinux_2_17_x86_64", "manylinux_2_17_aarch64", "musllinux_1_2_x86_64")
    ):
        taken = tmp_path / number / wanted
        where = ["--no-index", "--no-deps", "--find-links", dist, "--only-binary", ":all:", "--dest", taken]
        call(
            sys.executable,
            "-m",
            "pip",
            "download",
            *where,
            "--python-version",
            number,
            "--platform",
            wanted,
            "ps-torch",
        )
        [file] = taken.iterdir()
        assert file.name.endswith("any.whl" if "musl" in wanted else f"-{wanted}.whl")


@pytest.mark.parametrize("version", promised())
def test_each_python_takes_the_wheel_of_its_machine_and_loads_the_library(
    version: str, dist: Path, tmp_path: Path
) -> None:
    """With what the library needs from an index, and without torch."""
    here, machine = interpreter(version), platform.machine()
    if here is None or machine not in LEVELS:
        pytest.skip(f"Python {version}, or a wheel for {machine}, is not here")
    call(here, "-m", "venv", "--without-pip", tmp_path)
    python = tmp_path / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install"]
    call(*install, "--only-binary", ":all:", "--constraint", "constraints.txt", "cffi", "numpy")
    said = call(*install, "--no-index", "--no-deps", "--find-links", dist, "ps-torch")
    assert f"manylinux_2_17_{machine}.whl" in said
    assert call(python, "-I", "-c", ONE_LOOP, folder=tmp_path).splitlines() == [version, "[[0.0, 0.0], [4.0, 6.0]]"]


def test_the_page_of_the_index_says_what_it_is_and_where_to_read_on(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        [name] = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        page = message_from_bytes(packed.read(name))
    assert page["License-Expression"] == "Apache-2.0"
    assert page["Description-Content-Type"] == "text/markdown"
    assert {url.partition(",")[0] for url in page.get_all("Project-URL")} >= {
        "Repository",
        "Documentation",
        "Changelog",
    }
    text = page.get_payload(decode=True).decode()
    assert text.startswith("# ps-torch\n")
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == [], "relative links lead nowhere there"


def test_strangers_can_install_the_wheel_and_run_a_cluster(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "venv"
    call(sys.executable, "-m", "venv", "--without-pip", fresh)
    python = fresh / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel)
    # What it depends on is taken from here: torch alone is 200 MB and more. Its own packages come first.
    [packages] = fresh.glob("lib/python*/site-packages")
    outer = {sysconfig.get_path("purelib"), str(Path(torch.__file__).parents[1])}
    (packages / "outer.pth").write_text("".join(f"import site; site.addsitedir({each!r})\n" for each in outer))

    version = re.findall(r"ps_torch-(.*?)-py3", wheel.name)[0]
    for command in ("ps-server", "ps-worker"):
        assert call(fresh / "bin" / command, "--version", folder=tmp_path) == f"{command} {version}\n"
    where = "import ps_server, ps_worker, ps_torch; print(ps_server.__file__, ps_worker.__file__, ps_torch.__file__)"
    assert call(python, "-c", where, folder=tmp_path).count(str(packages)) == 3
    said = call(python, sdist / "examples" / "demo.py", f"--out={tmp_path / 'out'}", *TINY, folder=tmp_path)
    assert "6 of each worker" in said
    assert json.loads((tmp_path / "out" / "result.json").read_text())["shards"] == 2


def test_strangers_can_run_the_tests_of_the_sdist(sdist: Path) -> None:
    said = call(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SOME_TESTS, folder=sdist)
    assert re.search(r"\d\d passed", said)


def test_the_list_of_parts_has_each_locked_version(tmp_path: Path) -> None:
    """Made as `make sbom` makes it."""
    recipe = re.findall(r"-m (cyclonedx_py .*?)--output-file", (ROOT / "Makefile").read_text().replace("\\\n", ""))[0]
    file = tmp_path / "sbom.json"
    call(sys.executable, "-W", "ignore", "-m", *recipe.split(), "--output-file", file, ROOT / "requirements.lock")
    found = json.loads(file.read_text())
    assert found["bomFormat"] == "CycloneDX"
    assert found["metadata"]["component"]["name"] == "ps-torch"
    locked = re.findall(r"^([a-z0-9-]+)==([^ ]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert {(part["name"], part["version"]) for part in found["components"]} == set(locked)


# -- the site --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, made as `make docs` makes it: a warning is an error."""
    made = tmp_path_factory.mktemp("site")
    recipe = re.findall(r"-m (sphinx .*) -d \S+ docs ", (ROOT / "Makefile").read_text())[0]
    assert "--fail-on-warning" in recipe
    assert "--nitpicky" in recipe
    call(sys.executable, "-m", *recipe.split(), "-d", made / "doctrees", "docs", made / "html")
    return made / "html"


class Resources(HTMLParser):
    """What a browser would load for a page, without being asked to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed") and given.get("src"):
            self.loaded.append(str(given["src"]))
        if tag == "link" and given.get("rel") not in ("next", "prev", "index", "search", "author"):
            self.loaded.append(str(given.get("href")))


def from_elsewhere(file: Path) -> Iterator[str]:
    """What a file of the site loads from another host."""
    text = file.read_text()
    loaded = (
        Resources(text).loaded if file.suffix == ".html" else re.findall(r"(?:url\(|@import )\s*[\"']?([^)\"']+)", text)
    )
    return (url for url in loaded if re.match(r"(?:[a-z]+:)?//", url))


def test_the_site_loads_nothing_from_elsewhere(site: Path, tmp_path: Path) -> None:
    files = [path for kind in ("*.html", "*.css") for path in site.rglob(kind)]
    assert len(files) > 20
    assert {path.name: urls for path in files if (urls := list(from_elsewhere(path)))} == {}
    (tmp_path / "a.css").write_text("@import 'https://fonts.example/x'; a { background: url(//b.example/y) }")
    (tmp_path / "a.html").write_text('<script src="https://c.example/z"></script><link rel="stylesheet" href="/own">')
    assert list(from_elsewhere(tmp_path / "a.css")) == ["https://fonts.example/x", "//b.example/y"]
    assert list(from_elsewhere(tmp_path / "a.html")) == ["https://c.example/z"]


def test_every_page_is_in_the_site_and_can_be_reached_and_searched(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}
    menu = (site / "index.html").read_text()
    assert {page for page in pages if f'href="{page}.html"' not in menu} == {"index"}
    assert all(page in (site / "searchindex.js").read_text() for page in pages)


def test_every_public_name_has_a_place_in_the_site(site: Path) -> None:
    reference = (site / "reference.html").read_text()
    import ps_torch

    for name in ps_torch.__all__:
        assert f'<section id="{name.lower()}"' in reference or f">{name}</span>" in reference, name


def test_links_out_of_the_docs_lead_to_the_repository(site: Path) -> None:
    page = (site / "training.html").read_text()
    assert 'href="https://github.com/ps-torch/ps-torch/blob/main/examples/wgan_gp.py"' in page
    assert 'href="../' not in page


# -- .github and the like --------------------------------------------------------------------------------------------

SCHEMAS = {
    ".github/workflows/*.yml": "vendor.github-workflows",
    ".github/dependabot.yml": "vendor.dependabot",
    ".github/ISSUE_TEMPLATE/[!c]*.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
    "CITATION.cff": "vendor.citation-file-format",
}


@pytest.mark.parametrize("pattern", SCHEMAS)
def test_a_file_is_as_its_schema_says(pattern: str) -> None:
    files = sorted(ROOT.glob(pattern))
    assert files
    schema = ["--builtin-schema", SCHEMAS[pattern], "--default-filetype", "yaml"]
    call(sys.executable, "-m", "check_jsonschema", *schema, *files)


@pytest.mark.skipif(
    shutil.which("zizmor", path=sysconfig.get_path("scripts")) is None, reason="zizmor is not installed"
)
def test_the_audit_of_the_workflows_finds_nothing() -> None:
    call(Path(sysconfig.get_path("scripts")) / "zizmor", "--offline", "--no-progress", ".github")
