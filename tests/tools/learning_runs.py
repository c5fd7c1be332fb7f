"""What a run of examples/rl has left, compared with what the example promises."""

from __future__ import annotations

import json
from pathlib import Path


def check(out: Path, mode: str, count: int, trainers: int, bound: int) -> None:
    """The model has learnt, from nothing too old, while one rollout process was killed and one added.

    count: the steps of each trainer
    """
    files = sorted(out.glob("steps-*.jsonl"))
    steps = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(files) == trainers
    assert len(steps) == trainers * count
    if mode == "sync":
        assert sorted(step["version"] for step in steps) == sorted([*range(count)] * trainers)
    ages = [step["version"] - used for step in steps for used in step["used"]]
    assert set(ages) <= {*range(bound + 1)}, "nothing too old is used, nor anything of a version that is still to come"

    result = json.loads((out / "result.json").read_text())
    assert result["first_reward"] < 0.1 < 0.2 <= result["last_reward"]
    assert (result["used"], result["used_beyond_bound"]) == (len(ages), 0)
    (killed_at, killed), (added_at, added) = result["events"]
    assert (killed, added) == ("rollout-0 is killed", "rollout-2 is added")
    written: dict[str, list[int]] = {}
    for step in steps:
        for version, name in zip(step["used"], step["rollouts"], strict=True):
            written.setdefault(name, []).append(version)
    assert written.keys() == {"rollout-0", "rollout-1", "rollout-2"}, "each was of use"
    # The servers may have had an update of each trainer more than anybody had told of when it was killed.
    assert max(written["rollout-0"]) <= killed_at + trainers, "what had been written before"
    assert min(written["rollout-2"]) >= added_at
    assert max(written["rollout-1"]) > added_at, "the third went on meanwhile"
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")
