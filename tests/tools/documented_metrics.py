"""What docs/metrics.md says of each metric, read from its tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
OFF_PANELS = "On no panel"  # the section that lists the metrics which the dashboard leaves out
_ROW = re.compile(r"^\| (`ps_[^|]*) \| (.*) \|$", re.MULTILINE)
_METRIC = re.compile(r"`(ps_\w+)(?:\{([\w,]*)\})?`")
_WORKERS_TOO = re.compile(r"Workers\b[^.]* serve it, too")


@dataclass(frozen=True)
class DocumentedMetric:
    """A metric as a table has it. section: its heading; text: the other cells of its row"""

    name: str
    labels: frozenset[str]
    section: str
    text: str

    def is_served_by(self, roles: set[str]) -> bool:
        """Whether a process that has these roles serves it: coordinator, shard, relay, or worker."""
        if self.section == "Every server process":
            return bool(roles & {"coordinator", "shard"}) or _WORKERS_TOO.search(self.text) is not None
        return {"Shards": "shard", "Coordinator": "coordinator", "Relays": "relay", "Workers": "worker"}[
            self.section
        ] in roles


def _rows() -> Iterator[DocumentedMetric]:
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        for metrics, text in _ROW.findall(body):
            for name, labels in _METRIC.findall(metrics):
                yield DocumentedMetric(name, frozenset(filter(None, labels.split(","))), heading, text)


def documented() -> list[DocumentedMetric]:
    """Returns every metric with what it says: one that two kinds of process serve comes twice."""
    return [metric for metric in _rows() if metric.section != OFF_PANELS]


def off_panels() -> set[str]:
    """Returns the names of the metrics that the page lists as being on no panel."""
    return {metric.name for metric in _rows() if metric.section == OFF_PANELS}
