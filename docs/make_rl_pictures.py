"""Makes docs/images/rl-sync.png and rl-async.png by two runs of examples/rl, and prints the rows of their table.

    python docs/make_rl_pictures.py        # some minutes on two cores, which should do nothing else meanwhile

The figures in docs/examples.md are those of the same two runs: change both together.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RUN = DOCS.parent / "examples" / "rl" / "run.py"


def main() -> None:
    """Runs both modes with the defaults."""
    rows = []
    for mode in ("sync", "async"):
        with tempfile.TemporaryDirectory() as folder:
            # A picture is made whatever has been learnt.
            subprocess.run([sys.executable, RUN, f"--mode={mode}", "--goal=0", f"--out={folder}"], check=True)
            shutil.copyfile(Path(folder) / "reward.png", DOCS / "images" / f"rl-{mode}.png")
            rows.append(row(json.loads((Path(folder) / "result.json").read_text())))
    print("", *rows, sep="\n")


def row(result: dict[str, Any]) -> str:
    """Returns a run's row of the table in docs/examples.md."""
    ages = ", ".join(f"{age}: {count}" for age, count in result["used_by_age"].items())
    cells = (
        f"`{result['mode']}`",
        f"{result['seconds']:.0f} s",
        f"{result['first_reward']:.3f}, {result['last_reward']:.3f}",
        ages,
        result["used_beyond_bound"],
        result["dropped"],
    )
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
