"""What commands of tests leave out of torch, to start sooner, is there where it is used: tests/tools/startup."""

from __future__ import annotations

import pytest

from tests.tools.launching import python

# Where tensors have no values, the shape of a dot product is found in Python.
SHAPE = 'x = torch.ones(3, device="meta")\nprint([*torch.dot(x, x).shape], "torch._refs" in sys.modules)\n'


def test_torchs_shapes_are_imported_with_what_computes_them() -> None:
    lines = "import sys, torch", "print('torch._refs' in sys.modules)", "import torch.distributed.tensor", SHAPE
    done = python("-c", "\n".join(lines))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False", "[] True"]


def test_without_them_an_operation_on_tensors_that_have_no_values_is_an_error() -> None:
    """What is missing from the list of those who compute shapes is noticed."""
    done = python("-c", "import sys, torch\n" + SHAPE)
    assert done.returncode == 1
    assert "NotImplementedError: aten::dot" in done.stderr


@pytest.mark.parametrize("first", ["torch.distributed.tensor", "torch._dynamo"])
def test_who_imports_them_before_torch_has_them_at_once(first: str) -> None:
    done = python("-c", f"import {first}, sys, torch\n" + SHAPE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[] True\n"
