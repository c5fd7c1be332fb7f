"""What pyproject.toml cannot say: the library for tables, and the README as a package index shows it.

The library is plain C without Python in it, so a wheel that has it is one for every Python (py3-none-PLATFORM). It is
compiled by the compiler that CC names, or the first that is found. Where there is none, or PS_NATIVE is off, the wheel
is one for every machine (py3-none-any), and numpy does the library's work. An editable install has the library beside
its source; `make native` compiles it again.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

HERE = Path(__file__).parent
# ps_tables itself needs torch, which a build has not.
LIBRARIES = runpy.run_path(str(HERE / "ps_tables" / "native" / "libraries.py"))
# What keeps numpy's bits: no product is fused with a sum, and nothing is reordered. No errno is set by a root.
OPTIONS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-s")
# Of a level; by features, because compilers do not agree about the levels' names.
FEATURES = {
    "x86-64-v3": ("-mavx2", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe"),
    "x86-64-v2": ("-msse4.2", "-mpopcnt"),
    "armv8-a": (),
}


# -- the library for tables ------------------------------------------------------------------------------------------


class CannotCompile(Exception):
    """No library can be compiled; the text is the reason."""


def compiler() -> list[str]:
    """Returns the words that start a C compiler. Raises CannotCompile where there is none."""
    if os.environ.get("PS_NATIVE") == "off":
        raise CannotCompile("PS_NATIVE is off")
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found is None:
        raise CannotCompile("there is no C compiler: install gcc or clang, or name one in CC")
    return [found]


def compile_libraries(machine: str, folder: Path) -> list[Path]:
    """Compiles the library for each level of a machine's processors. Raises CannotCompile where that cannot be done."""
    levels: Mapping[str, object] = LIBRARIES["LEVELS"].get(machine, {})
    if sys.platform != "linux" or not levels:
        raise CannotCompile(f"it is for Linux on {' and '.join(LIBRARIES['LEVELS'])}")
    words = compiler()
    with tempfile.TemporaryDirectory() as scratch:
        made = [_compile(words, level, Path(scratch)) for level in levels]
        folder.mkdir(parents=True, exist_ok=True)
        return [_put(path, folder) for path in made]


def _compile(words: list[str], level: str, folder: Path) -> Path:
    path = folder / LIBRARIES["file_name"](level)
    options = [*OPTIONS, *FEATURES[level], f"-DPS_SOURCES=UINT64_C({LIBRARIES['sources']()})"]
    try:
        done = subprocess.run(
            [*words, *options, "-o", str(path), str(LIBRARIES["SOURCE"]), "-lm"],
            capture_output=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise CannotCompile(f"{words[0]} cannot be started: {error.strerror or error}") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()
        text = next((line for line in said if "error" in line), said[0])
        raise CannotCompile(f"{words[0]} failed with code {done.returncode}: {text[:200]}")
    return path


def _put(path: Path, folder: Path) -> Path:
    """Puts a library into a folder, in place of an old one, which a process may have open."""
    beside = Path(shutil.copy(path, folder / f"{path.name}.new"))
    return beside.replace(folder / path.name)


class BuildLibrary(Command):
    """A step of `build`: https://setuptools.pypa.io/en/latest/userguide/extension.html"""

    description = "compile the library for tables"
    user_options: ClassVar = [("inplace", "i", "beside its source")]
    boolean_options: ClassVar = ["inplace"]

    def initialize_options(self) -> None:
        """Sets what setuptools changes."""
        self.inplace = self.editable_mode = False
        self.build_lib: str | None = None
        self.plat_name: str | None = None
        self.built: list[Path] = []

    def finalize_options(self) -> None:
        """Takes the folder of the build, and the platform that the wheel is to be for."""
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))
        self.set_undefined_options("bdist_wheel", ("plat_name", "plat_name"))

    def run(self) -> None:
        """Compiles the library; where that cannot be done, says so in one line."""
        source: Path = LIBRARIES["FOLDER"]
        in_place = self.inplace or self.editable_mode
        folder = source if in_place else Path(self.build_lib or "", source.relative_to(HERE))
        machine = next(
            (each for each in LIBRARIES["LEVELS"] if str(self.plat_name).endswith(each)), str(self.plat_name)
        )
        try:
            self.built = compile_libraries(machine, folder)
        except CannotCompile as error:
            print(f"ps-torch: without the library for tables, numpy does its work: {error}", file=sys.stderr)
        for path in {*folder.glob(LIBRARIES["file_name"]("*"))} - {*self.built}:
            path.unlink()  # of an earlier build, which would get into this wheel

    def get_source_files(self) -> list[str]:
        """Returns what an sdist must have."""
        return [os.path.relpath(LIBRARIES[name], HERE) for name in ("SOURCE", "DECLARATIONS")]

    def get_outputs(self) -> list[str]:
        """Returns what is made."""
        return [str(path) for path in self.built]

    def get_output_mapping(self) -> dict[str, str]:
        """Returns nothing: no file of the build stands for one of the sources."""
        return {}


class Build(build):
    """`build` with one step more."""

    sub_commands: ClassVar = [*build.sub_commands, ("build_library", None)]


class Wheel(bdist_wheel):
    """A wheel for every Python."""

    def run(self) -> None:
        """Compiles first: the wheel is for one platform if there is a library."""
        self.run_command("build_library")
        self.root_is_pure = not self.get_finalized_command("build_library").built
        self.plat_name_supplied &= not self.root_is_pure
        # What `install` asks, to put everything where a wheel for one platform has it.
        self.distribution.has_ext_modules = lambda: not self.root_is_pure
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Returns the tag of a wheel whose library no Python was compiled into."""
        _, _, platform = super().get_tag()
        return "py3", "none", platform


# -- the README ------------------------------------------------------------------------------------------------------


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
    cmdclass={"build": Build, "build_library": BuildLibrary, "bdist_wheel": Wheel},
)
