"""Parameters that several members of a group hold alike: what each of them has after the owners have sent theirs."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.scripts.share_alike import DIFFER, HOLDERS, STATE_NUMEL, state_of
from tests.tools.forkserver import Nursery

SECONDS = 60


def run_members(nursery: Nursery, directory: Path) -> None:
    script = Path("tests/scripts/share_alike.py").resolve()
    processes = [nursery.run(script, [directory, member], directory / f"{member}.log") for member in range(3)]
    ended = [process.wait(SECONDS) for process in processes]
    assert ended == [0] * 3, "".join(path.read_text() for path in sorted(directory.glob("*.log")))


def test_all_that_hold_a_parameter_have_its_owners_weights_and_those_that_the_round_began_with(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Also where these differ on some owners only: the members send both then, or neither."""
    run_members(nursery, tmp_path)
    for exchange, differ in enumerate(DIFFER):
        of_members = [torch.load(tmp_path / f"{exchange}-{member}") for member in range(3)]
        for index, ((owner, *others), dtype) in enumerate(HOLDERS):
            weights = (torch.arange(3) + 10 * exchange + 100 * owner).to(dtype)
            for member in (owner, *others):
                found, base = of_members[member][index]
                assert torch.equal(found, weights), (exchange, index, member)
                assert torch.equal(base, weights - int(owner in differ)), (exchange, index, member)


def test_members_get_the_optimizer_state_of_what_they_hold_and_of_nothing_else(
    nursery: Nursery, tmp_path: Path
) -> None:
    run_members(nursery, tmp_path)
    for member in range(3):
        found, sent = torch.load(tmp_path / f"state-{member}")
        held = {index for index, ((owner, *others), _) in enumerate(HOLDERS) if member in others}
        assert found.keys() == held
        for index in held:
            expected = state_of(index)
            assert found[index].keys() == expected.keys()
            assert all(torch.equal(found[index][name], expected[name]) for name in expected)
        # Its own is sent by it, and that of the last parameter to nobody.
        moved = sum(member in holders for holders, _ in HOLDERS if len(holders) > 1)
        assert 0 <= sent - 4 * STATE_NUMEL * moved < 4 * STATE_NUMEL
