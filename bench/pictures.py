"""Pictures of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, PEER = "tab:blue", "tab:gray"


@dataclass(frozen=True)
class Bar:
    """One bar; `bound` is what is possible at all, where that is known."""

    name: str
    value: float
    ours: bool
    bound: float | None = None


@dataclass(frozen=True)
class Line:
    """A line through points (x, y); dotted if it is only there to compare with."""

    name: str
    points: Sequence[tuple[float, float]]
    dotted: bool = False


def bars(path: Path, unit: str, found: Mapping[str, Sequence[Bar]]) -> None:
    """A panel of horizontal bars for each title, below each other."""
    heights = [len(group) + 2 for group in found.values()]
    figure = _figure(figsize=(8, 0.32 * sum(heights) + 0.6), layout="constrained")
    panels = figure.subplots(len(found), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, group) in zip(panels, found.items(), strict=True):
        _bars(axes, group)
        axes.set(xlabel=unit, title=title)
    _save(figure, path)


def _figure(**options: Any) -> Figure:
    """Returns an empty figure. Its import takes a second, and most who import this module draw nothing."""
    from matplotlib.figure import Figure

    return Figure(**options)


def _bars(axes: Axes, group: Sequence[Bar]) -> None:
    names = [bar.name for bar in group]
    drawn = axes.barh(names, [bar.value for bar in group], color=[OURS if bar.ours else PEER for bar in group])
    bounds = [bar.bound or bar.value for bar in group]
    texts = [f"{bar.value:,.0f}" if bar.value >= 100 else f"{bar.value:.3g}" for bar in group]
    if any(bar.bound for bar in group):
        axes.barh(names, bounds, color="none", edgecolor="black", linestyle=":", label="the most there is")
        axes.bar_label(drawn, texts, label_type="center", color="white")
        axes.legend(loc="upper right", frameon=False)
    else:
        axes.bar_label(drawn, texts, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def lines(path: Path, x: str, y: str, found: Mapping[str, Sequence[Line]]) -> None:
    """A panel of lines for each title, beside each other; x counts in powers of two."""
    figure = _figure(figsize=(5 * len(found), 4), layout="constrained")
    for axes, (title, group) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        dotted = sum(line.dotted for line in group)
        for line in group:
            style = {"linestyle": ":", "color": "black" if dotted == 1 else None} if line.dotted else {"marker": "o"}
            axes.plot(*zip(*line.points, strict=True), label=line.name, **style)
        ticks = sorted({point[0] for line in group for point in line.points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set(xlabel=x, ylabel=y, title=title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    _save(figure, path)


def curves(path: Path, y: str, found: Mapping[str, Sequence[Line]]) -> None:
    """A panel of lines for each x, beside each other; x is logarithmic: points are orders of magnitude apart."""
    figure = _figure(figsize=(6 * len(found), 4), layout="constrained")
    for axes, (x, group) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        for line in group:
            axes.plot(*zip(*line.points, strict=True), label=line.name, marker=".")
        axes.set_xscale("log")
        axes.set(xlabel=x, ylabel=y)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
