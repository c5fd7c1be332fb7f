"""Parameters that several members of a group hold alike: what each of them has after the owners have sent theirs."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.scripts.share_alike import DIFFER, HOLDERS
from tests.tools.forkserver import Nursery

SECONDS = 60


def test_all_that_hold_a_parameter_have_its_owners_weights_and_those_that_the_round_began_with(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Also where these differ on some owners only: the members send both then, or neither."""
    script = Path("tests/scripts/share_alike.py").resolve()
    processes = [nursery.run(script, [tmp_path, member], tmp_path / f"{member}.log") for member in range(3)]
    ended = [process.wait(SECONDS) for process in processes]
    assert ended == [0] * 3, "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    for exchange, differ in enumerate(DIFFER):
        of_members = [torch.load(tmp_path / f"{exchange}-{member}") for member in range(3)]
        for index, ((owner, *others), dtype) in enumerate(HOLDERS):
            weights = (torch.arange(3) + 10 * exchange + 100 * owner).to(dtype)
            for member in (owner, *others):
                found, base = of_members[member][index]
                assert torch.equal(found, weights), (exchange, index, member)
                assert torch.equal(base, weights - int(owner in differ)), (exchange, index, member)
