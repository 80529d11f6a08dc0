"""How the figures of the analysis look: one style, readable in print and without telling colours apart."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gnnlm.evaluate.change import PerplexityChange
from gnnlm.evaluate.plots import COLOURS, DARK
from gnnlm.predict.predictor import LABELS

MARKS = {"base": "o", "knn": "s", "gnn": "D", "gnn_knn": "^"}
LINES = {"base": "--", "knn": "-.", "gnn": ":", "gnn_knn": "-"}
HATCHES = {"base": "", "knn": "//", "gnn": "..", "gnn_knn": "xx"}
DOTS = 130  # of a PNG, per inch


def axes_of(
    count: int = 1, height: float = 3.0, width: float = 6.4, titles: Sequence[str] = ()
) -> tuple[Any, list[Any]]:
    """A figure with this many panels side by side."""
    from matplotlib.figure import Figure  # no global state, no display

    figure = Figure(figsize=(width if count == 1 else 1.55 * width, height), layout="constrained")
    panels = list(figure.subplots(1, count, squeeze=False).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    for axes, title in zip(panels, titles, strict=False):
        axes.set_title(title, fontsize=10)
    return figure, panels


def panels_of(rows: int, columns: int, height: float, width: float = 9.0) -> tuple[Any, list[list[Any]]]:
    """A figure with panels in rows and columns."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, [list(row) for row in figure.subplots(rows, columns, squeeze=False)]


def line_of(axes: Any, name: str, x: Sequence[float], y: Sequence[float], label: str | None = None) -> None:
    """A predictor's line: colour, mark and dashes all tell it apart."""
    style = {"color": COLOURS.get(name, DARK), "marker": MARKS.get(name, "v"), "ls": LINES.get(name, "-"), "ms": 5}
    axes.plot(x, y, label=label or LABELS.get(name, name), **style)


def base_line(axes: Any, value: float) -> None:
    """The base model's value, across the panel."""
    axes.axhline(value, color=COLOURS["base"], ls="--", label="base")


def k_axis(axes: Any, ks: Sequence[int], label: str) -> None:
    """A logarithmic axis of k, with a tick for each of its values."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set_xlabel(label)


def legend_of(axes: Any, size: int = 9, beside: bool = False) -> None:
    """The legend, inside the panel or on its right."""
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if beside else {}
    axes.legend(frameon=False, fontsize=size, **place)


def bars_of(axes: Any, names: Sequence[str], values: Mapping[str, Sequence[float]]) -> None:
    """Groups of bars, one group for each name, one bar for each predictor."""
    width = 0.8 / len(values)
    for place, (predictor, heights) in enumerate(values.items()):
        at = [x - 0.4 + width * (place + 0.5) for x in range(len(names))]
        look = {"facecolor": "white", "edgecolor": COLOURS.get(predictor, DARK), "hatch": HATCHES.get(predictor, "")}
        axes.bar(at, heights, width, label=LABELS.get(predictor, predictor), lw=1.2, **look)
    axes.set_xticks(range(len(names)), names)
    legend_of(axes)


def changes_of(
    axes: Any,
    names: Sequence[str],
    rows: Mapping[str, Sequence[PerplexityChange | None]],
    against: str = "base",
    labels: Mapping[str, str] = LABELS,
) -> None:
    """Changes in percent with their 95% intervals: a group for each name, a point for each predictor.

    Unknown changes are left out.
    """
    step = 0.66 / max(1, len(rows))
    for place, (predictor, changes) in enumerate(rows.items()):
        colour = COLOURS.get(predictor, DARK)
        known = [(y - 0.33 + step * (place + 0.5), row) for y, row in enumerate(changes) if row is not None]
        for y, row in known:
            if row.change_low is not None and row.change_high is not None:
                axes.plot([100 * row.change_low, 100 * row.change_high], [y, y], color=colour, lw=1.4)
        look = {"color": colour, "mec": "white", "mew": 0.5, "ms": 6, "label": labels.get(predictor, predictor)}
        points = [100 * row.change for _, row in known]
        axes.plot(points, [y for y, _ in known], MARKS.get(predictor, "v"), ls="none", **look)
    axes.axvline(0, color=COLOURS["base"], ls="--", lw=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    for y in range(1, len(names)):
        axes.axhline(y - 0.5, color="#dddddd", lw=0.6)
    axes.set_xlabel(f"change of perplexity against {against} in %, with 95% interval")
    legend_of(axes, 8, beside=True)


def heat_of(
    axes: Any,
    values: npt.NDArray[np.float64],
    across: Sequence[str],
    down: Sequence[str],
    chosen: tuple[int, int],
    ceiling: float | None,
) -> None:
    """A heat map, [down, across]; a cross at the chosen column and row, a ring at the lowest value.

    Colours end at the ceiling (or at the largest value), and what lies above it is hatched. Lines of equal value, with
    their figures, say the same without colours.
    """
    lowest = float(values.min())
    top = max(float(values.max()) if ceiling is None else ceiling, 1.001 * lowest)
    inside = np.ma.masked_greater(values, top * (1 + 1e-9))
    image = axes.imshow(inside, cmap="viridis_r", vmin=lowest, vmax=top, aspect="auto", origin="lower")
    axes.patch.set(hatch="///", edgecolor="#999999", facecolor="white")
    if min(values.shape) > 1 and values.max() > lowest:
        levels = lowest + (top - lowest) * np.array([0.05, 0.2, 0.5])
        lines = axes.contour(np.minimum(values, 2 * top), levels=levels, colors="#222222", linewidths=0.7)
        axes.clabel(lines, fontsize=7, fmt="%.4g")
    row, column = np.unravel_index(int(values.argmin()), values.shape)
    axes.plot(column, row, "o", ms=11, mfc="none", mec="black", mew=1.6)
    axes.plot(*chosen, "X", ms=8, mfc="white", mec="black", mew=0.8)
    axes.set_xticks(*_few(across, 8))
    axes.set_yticks(*_few(down))
    axes.tick_params(labelsize=8)
    axes.figure.colorbar(image, ax=axes, format="%.4g").ax.tick_params(labelsize=8)


def _few(names: Sequence[str], most: int = 12) -> tuple[list[int], list[str]]:
    """Some of the ticks of a long axis, evenly spaced.

    >>> _few(["a", "b", "c", "d"], 2)
    ([0, 2], ['a', 'c'])
    """
    places = list(range(0, len(names), -(-len(names) // most)))
    return places, [names[place] for place in places]


def spread_of(axes: Any, axis: str, values: Sequence[float], widest: float = 20.0) -> None:
    """A logarithmic axis with plain numbers where values are far apart, else a linear one."""
    from matplotlib.ticker import LogFormatter

    if min(values) <= 0 or max(values) <= widest * min(values):
        return
    getattr(axes, f"set_{axis}scale")("log")
    ticks = getattr(axes, f"{axis}axis")
    ticks.set_major_formatter(LogFormatter())
    ticks.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.2, 0.5)))


def svg_of(figure: Any) -> str:
    """A figure as SVG; the same figure gives the same text."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.hashsalt": "gnnlm"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def png_of(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DOTS, metadata={"Software": None})
    return file.getvalue()
