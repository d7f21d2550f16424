"""Pictures of reports, as SVG."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import Any, NamedTuple

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, ScalarFormatter

INK, MUTED, GRID = "#020202", "#6b6b6e", "#dededf"
SERIES = ("#2463eb", "#d97705", "#04966a", "#be185c", "#7c3aec", "#0790b2")
PARTS = SERIES[3:]  # of a whole, in other colours than drafters
MARKERS = ("o", "s", "^", "D", "v", "P")
# Text stays text, and equal input gives equal bytes.
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "draftsmith",
    "text.parse_math": False,  # names may hold dollar signs
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.prop_cycle": cycler(color=SERIES, marker=MARKERS),
    "grid.color": GRID,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "lines.markersize": 4.5,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}
WIDTH, HEIGHT = 4.8, 2.8  # inches; a page scales them to its columns
IDS = re.compile(r'( id="|href="#|url\(#)')


class Picture:
    """A figure with one row of panels; `svg` once it is drawn. Ids in it begin with its name, so that several can stand
    in one page."""

    def __init__(self, name: str, figure: Figure, panels: Sequence[Axes]) -> None:
        self.name, self.figure, self.panels, self.svg = name, figure, panels, ""

    def draw(self) -> None:
        text = StringIO()
        self.figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        svg = text.getvalue()
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
        svg = IDS.sub(rf"\g<1>{self.name}-", svg)
        self.svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)


def themed(svg: str) -> str:
    """With colours that a page sets, as CSS variables."""
    variables = {INK: "ink", MUTED: "muted", GRID: "grid"}
    variables |= {color: f"series-{index + 1}" for index, color in enumerate(SERIES)}
    for color, variable in variables.items():
        svg = svg.replace(color, f"var(--{variable})")
    return svg


@contextmanager
def picture(
    name: str, *, panels: int = 1, width: float = WIDTH, height: float = HEIGHT, share_y: bool = False
) -> Iterator[Picture]:
    """In the project's style, drawn on leaving."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(1, panels, sharey=share_y, squeeze=False)[0]
        found = Picture(name, figure, list(axes))
        yield found
        found.draw()


def reliability_diagram(calibration: Mapping[str, Any]) -> str:
    """A panel for every draft token: share of blocks that survived it against what was predicted, by bins, before and
    after calibration; the area of a mark is its share of the rounds. `calibration` is that of a report."""
    before, after = calibration["before"], calibration["after"]
    count = len(before["bins"])
    with picture("reliability", panels=count, width=2.2 * count + 0.3, height=2.8, share_y=True) as found:
        for slot, axis in enumerate(found.panels):
            axis.plot((0, 1), (0, 1), color=MUTED, linewidth=0.8, linestyle=":", marker="")
            for name, part, color in (("before", before, SERIES[1]), ("after", after, SERIES[0])):
                if part is None:
                    continue
                bins, label = part["bins"][slot], f"{name}, ECE {100 * part['ece'][slot]:.1f} %"
                axis.plot(bins["predicted"], bins["survived"], color=color, linewidth=1, label=label, marker="")
                axis.scatter(bins["predicted"], bins["survived"], [90 * x for x in bins["share"]], color=color)
            axis.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", title=f"draft {slot + 1}", xlabel="predicted")
            axis.legend(loc="upper left", fontsize=7.5)
        found.panels[0].set_ylabel("survived")
    return found.svg


class Bar(NamedTuple):
    """A value with its interval; those of one series have one colour."""

    name: str
    value: float
    interval: Sequence[float] | None
    series: int = 0


def interval_chart(name: str, label: str, bars: Sequence[Bar], *, zero: bool = False) -> str:
    """A mark for each value, one below the other, with a line at `zero`."""
    with picture(name, height=0.8 + 0.36 * len(bars)) as found:
        axis = found.panels[0]
        for place, (_, value, interval, series) in enumerate(bars):
            (low, high), color = interval or (value, value), SERIES[series % len(SERIES)]
            axis.plot((low, high), (place, place), color=color, linewidth=2.4, alpha=0.5, marker="")
            axis.plot(value, place, color=color, marker=MARKERS[series % len(MARKERS)], markersize=6, linestyle="")
            above: Any = {"textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": 8.5}
            axis.annotate(f"{value:.2f}", (value, place), (0, 4), **above)
        if zero:
            axis.axvline(0, color=MUTED, linewidth=1)
        axis.set_yticks(range(len(bars)), [bar.name for bar in bars])
        axis.set(xlabel=label, ylim=(len(bars) - 0.5, -0.8))
        axis.grid(axis="y", visible=False)
        axis.margins(x=0.08)
    return found.svg


def line_chart(
    name: str,
    x: tuple[str, Sequence[float]],
    panels: Mapping[str, Mapping[str, Sequence[float | None]]],
    *,
    percent: Sequence[str] = (),
    doubling: bool = False,
    whole: bool = False,
    lowest: float | None = None,
    series: Mapping[str, int] | None = None,
) -> str:
    """A panel for each title of `panels` with its lines by name over the places `x` (label, values); None leaves a gap.

    `percent`: titles of shares. `doubling`: places are 1, 2, 4 ... `whole`: every place has its tick. `lowest` is the
    lower end of the upright axes. A line has the colour of its `series`, by default one of its own; another of that
    colour is dashed.
    """
    label, places = x
    names = list(dict.fromkeys(line for lines in panels.values() for line in lines))
    numbers = {line: (series or {}).get(line, index) % len(SERIES) for index, line in enumerate(names)}
    dashed = {line for i, line in enumerate(names) if numbers[line] in [numbers[other] for other in names[:i]]}
    with picture(name, panels=len(panels), width=WIDTH if len(panels) == 1 else 7.6) as found:
        for axis, (title, lines) in zip(found.panels, panels.items(), strict=True):
            for line, values in lines.items():
                style: Any = {"color": SERIES[numbers[line]], "marker": MARKERS[numbers[line]]}
                style["linestyle"] = "--" if line in dashed else "-"
                known = [(a, b) for a, b in zip(places, values, strict=False) if b is not None]
                axis.plot(*zip(*known, strict=True), label=line, **style) if known else None
            axis.set(title=title, xlabel=label)
            if doubling:
                axis.set_xscale("log", base=2)
                axis.xaxis.set_major_formatter(ScalarFormatter())
            if doubling or whole:
                axis.set_xticks(list(places))
            if title in percent:
                axis.yaxis.set_major_formatter(PercentFormatter(1))
            axis.set_ylim(bottom=lowest, top=1.03 if title in percent and lowest == 0 else None)
        if len(names) > 1:
            found.panels[-1].legend(loc="best")
    return found.svg


def stacked_chart(name: str, label: str, bars: Mapping[str, Mapping[str, float]]) -> str:
    """A bar for each name, made of its parts."""
    parts = list(dict.fromkeys(part for values in bars.values() for part in values))
    with picture(name, height=1.15 + 0.32 * len(bars)) as found:
        axis = found.panels[0]
        for index, part in enumerate(parts):
            ends = [sum(values.get(p, 0.0) for p in parts[:index]) for values in bars.values()]
            widths = [values.get(part, 0.0) for values in bars.values()]
            axis.barh(range(len(bars)), widths, left=ends, height=0.62, color=PARTS[index % len(PARTS)], label=part)
        axis.set_yticks(range(len(bars)), list(bars))
        axis.set(xlabel=label, ylim=(len(bars) - 0.5, -0.5))
        axis.grid(axis="y", visible=False)
        found.figure.legend(loc="outside upper left", ncols=len(parts))
    return found.svg
