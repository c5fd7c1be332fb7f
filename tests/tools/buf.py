"""Runs buf, wherever the package buf-bin has put it: `python -m tests.tools.buf lint`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).parents[2]


def buf() -> Path:
    """Returns the program. It may belong to an environment beneath this one."""
    [program] = [file for file in files("buf-bin") or () if file.name == "buf"]
    return Path(str(program.locate())).resolve()


def image() -> bytes:
    """Returns a FileDescriptorSet of the files of the contract, and those that they import, each before its users."""
    command = [buf(), "build", "--as-file-descriptor-set", "--exclude-source-info", "--output=-"]
    return subprocess.run(command, cwd=ROOT, check=True, timeout=60, capture_output=True).stdout


def declared() -> list[FileDescriptorProto]:
    """Returns what the files of the contract declare, and those that they import."""
    return list(FileDescriptorSet.FromString(image()).file)


if __name__ == "__main__":
    os.execv(buf(), ["buf", *sys.argv[1:]])
