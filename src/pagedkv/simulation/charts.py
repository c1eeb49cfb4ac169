"""Plots as SVG text, to stand inside an HTML page. The only place that knows matplotlib.

Lines keep at most a few hundred points: whoever calls has averaged before (see `report`).
"""

from __future__ import annotations

import importlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pagedkv.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Float64 = npt.NDArray[np.float64]
Line = tuple[str, Float64, Float64]  # label, x, y

# Okabe and Ito's colours, which people of any colour vision tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
_FAINT = "#C8C8C8"
_WIDTH, _HEIGHT = 7.2, 2.7  # inches of 72 points


def require_matplotlib() -> None:
    """MissingExtraError if there is nothing to draw with: asked before a long run, not after."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise MissingExtraError(
            'matplotlib is not installed, which draws reports: pip install "pagedkv[report]"'
        ) from None


def areas(x: Float64, layers: Mapping[str, Float64], x_label: str, y_label: str) -> str:
    """Layers [n] stacked from the bottom up, in steps between x [n + 1]. The last is faint."""
    colours = (*COLOURS[: len(layers) - 1], _FAINT)
    with _drawing(x_label, y_label) as (figure, axes):
        floor = np.zeros(len(x) - 1)
        for layer, colour in zip(layers.values(), colours, strict=True):
            top = floor + layer
            axes.fill_between(x, _closed(floor), _closed(top), step="post", color=colour, lw=0)
            floor = top
        axes.set_xlim(x[0], x[-1])
        axes.set_ylim(bottom=0)
        _legend(axes, list(layers), colours)
        return _svg(figure)


def lines(
    data: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    steps: bool = False,
    faint: Sequence[tuple[Float64, Float64]] = (),
) -> str:
    """Lines with a legend, and `faint` ones without.

    steps: y[i] holds from x[i] to x[i + 1]; x has one value more than y.
    """
    with _drawing(x_label, y_label) as (figure, axes):
        style = "steps-post" if steps else "default"
        for x, y in faint:
            axes.plot(x, _closed(y) if steps else y, color=_FAINT, lw=0.8, drawstyle=style)
        for (_, x, y), colour in zip(data, COLOURS, strict=False):
            axes.plot(x, _closed(y) if steps else y, color=colour, lw=1.4, drawstyle=style)
        if log_x:
            axes.set_xscale("log", subs=(2, 5))
            for which in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
                which("{x:g}")
        axes.set_ylim(bottom=0)
        if len(data) > 1:
            _legend(axes, [label for label, _, _ in data], COLOURS)
        return _svg(figure)


def bars(data: Mapping[str, Mapping[str, float]], x_label: str) -> str:
    """One horizontal bar a row; the parts of a row stand one after the other."""
    with _drawing(x_label, "") as (figure, axes):
        parts = list(next(iter(data.values())))
        left = np.zeros(len(data))
        for part, colour in zip(parts, COLOURS, strict=False):
            widths = np.array([row[part] for row in data.values()])
            axes.barh(list(data), widths, left=left, color=colour)
            left += widths
        axes.invert_yaxis()
        if len(parts) > 1:
            _legend(axes, parts, COLOURS)
        return _svg(figure)


def _closed(values: Float64) -> Float64:
    """Values of n steps for n + 1 edges: the last is drawn to its end."""
    return np.append(values, values[-1:])


def _legend(axes: Axes, labels: Sequence[str], colours: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour) for _, colour in zip(labels, colours, strict=False)]
    # Beside the plot: nowhere inside it is sure to be empty.
    axes.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8
    )


@contextmanager
def _drawing(x_label: str, y_label: str) -> Iterator[tuple[Figure, Axes]]:
    """Axes to draw on. Settings of matplotlib are ours inside only."""
    import matplotlib
    from matplotlib.figure import Figure

    # Any: names of settings differ between versions.
    settings: Any = {
        # Text stays text: smaller, and it can be searched. Equal plots have equal ids.
        "svg.fonttype": "none",
        "svg.hashsalt": "pagedkv",
        "font.family": "sans-serif",
        "font.size": 9,
        "text.parse_math": False,  # a tenant may be called "$"
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(_WIDTH, _HEIGHT))
        axes = figure.add_subplot()
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        yield figure, axes


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    # Without metadata, which would name addresses of the network.
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with warnings.catch_warnings():
        # The reader's browser has the letters that the font here lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(text, format="svg", bbox_inches="tight", metadata=nothing)
    document = text.getvalue()
    return document[document.index("<svg") :]
