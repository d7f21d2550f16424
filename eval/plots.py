"""Pictures of reports, as SVG."""

from collections.abc import Mapping
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# Text stays text, and equal input gives equal bytes.
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "draftsmith", "font.size": 8}
BEFORE, AFTER = "tab:orange", "tab:blue"


def reliability_diagram(calibration: Mapping[str, Any]) -> str:
    """A panel for every draft token: share of blocks that survived it against what was predicted, by bins, before and
    after calibration; the area of a mark is its share of the rounds. `calibration` is that of a report."""
    before, after = calibration["before"], calibration["after"]
    with matplotlib.rc_context(STYLE):
        panels = len(before["bins"])
        figure = Figure(figsize=(2.2 * panels, 2.7), layout="constrained")
        axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
        for slot, axis in enumerate(axes):
            axis.plot((0, 1), (0, 1), color="grey", linewidth=0.8, linestyle=":")
            for name, part, color in (("before", before, BEFORE), ("after", after, AFTER)):
                if part is None:
                    continue
                bins, label = part["bins"][slot], f"{name}, ECE {100 * part['ece'][slot]:.1f} %"
                axis.plot(bins["predicted"], bins["survived"], color=color, linewidth=1, label=label)
                axis.scatter(bins["predicted"], bins["survived"], [90 * x for x in bins["share"]], color=color)
            axis.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", title=f"draft {slot + 1}", xlabel="predicted")
            axis.legend(loc="upper left", fontsize=6, frameon=False)
        axes[0].set_ylabel("survived")
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        return text.getvalue()
