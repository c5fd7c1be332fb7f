"""A member of a group that trains with Lightning. One of group 1 ends without a word, and its group is started again.

python tests/scripts/lightning_restarted.py DIRECTORY

Leaves the clock that its training began at with the weights then, the weights at which group 0 stood still meanwhile,
and how many steps it has made.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from ps_worker.lightning import ParameterServerGroupStrategy
from tests.scripts.lightning_groups import Cut, whole
from tests.scripts.lightning_jobs import loaders, trainer
from tests.tools.cluster import until

DIES_AT, STANDS_AT, CODE = 3, 6, 7


class Restarted(Cut):
    """The cut regression, without metrics that groups wait for each other in."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.found = folder, dict[str, Any]()
        self.group, self.is_again = os.environ["PS_RANK"], os.environ["PS_RESTART_COUNT"] != "0"

    def log(self, *_: Any, **__: Any) -> None:
        """Does nothing: a group that is started again is at another step than the others."""

    def on_train_start(self) -> None:
        self.found |= {"clock": self.trainer.strategy.session.clock, "begin": whole(self.net)}
        if self.is_again:
            (self.folder / "again").touch()

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        step = self.trainer.global_step
        if step == DIES_AT and (self.group, os.environ["RANK"]) == ("1", "1") and not self.is_again:
            os._exit(CODE)
        if step == STANDS_AT and self.group == "0":
            self.found["stood"] = whole(self.net)
            until((self.folder / "again").exists, "group 1 to train again")


def main() -> None:
    folder = Path(sys.argv[1])
    net, strategy = Restarted(folder), ParameterServerGroupStrategy(2, 1)
    options = {"logger": False, "enable_checkpointing": False, "max_epochs": 3, "use_distributed_sampler": False}
    made = trainer(folder, strategy, **options)
    made.fit(net, loaders(2)[0])
    found = net.found | {"steps": made.global_step, "ended": strategy.session.clock}
    (folder / f"{net.group}-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
