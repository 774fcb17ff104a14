"""Four plots of one simulation in one PNG file; matplotlib is the extra `plots`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from run.settings import SettingsError
from run.simulate.options import Result
from run.simulate.report import queue_age_s, slowdown, ttft_s

NUM_SPANS = 120


def check(path: Path) -> None:
    """Raises SettingsError, with what to do, when nothing can be drawn into this file."""
    need_matplotlib()
    if not path.absolute().parent.is_dir():
        raise SettingsError(f"--plot {path}: there is no folder {path.absolute().parent}")


def need_matplotlib() -> None:
    """Raises SettingsError, with what to do, where plots cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SettingsError("--plot needs matplotlib: .venv/bin/pip install -e '.[plots]'") from None


def plot(results: Mapping[str, Result], title: str, path: Path) -> None:
    """Draw what part of the requests had their first token by when, and by how many times their own time; how long
    those waited that came at each time; and how long each prefill replica was busy. Raises SettingsError for a file
    that cannot be written, or without matplotlib."""
    need_matplotlib()
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def cumulative(axes: Axes, name: str, values: Sequence[float]) -> None:
        if len(values):
            axes.plot(np.sort(values), np.arange(1, len(values) + 1) / len(values), label=name)

    figure = Figure(figsize=(14, 9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    ((ttft, slower), (ages, busy)) = figure.subplots(2, 2)
    for name, result in results.items():
        cumulative(ttft, name, ttft_s(result.outcomes))
        cumulative(slower, name, slowdown(result.outcomes))
        ages.plot(*worst_ages(result), label=name)
        order = np.sort(np.array(result.prefill_busy_s))[::-1]
        busy.plot(np.arange(1, len(order) + 1), order / max(order.mean(), 1e-9), marker="o", label=name)
    for axes, label in ((ttft, "time to first token, s"), (slower, "slowdown: that, over what it takes alone")):
        axes.set(xscale="log", xlabel=label, ylabel="part of requests")
    ages.set(xlabel="arrival, s", ylabel="longest wait for others, s")
    busy.set(xlabel="prefill replicas, busiest first", ylabel="busy, over the mean")
    for axes in (ttft, slower, ages, busy):
        axes.grid(alpha=0.3)
    ttft.legend()
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise SettingsError(f"--plot {path}: {error.strerror or error}") from None


def worst_ages(result: Result) -> tuple[list[float], list[float]]:
    """The time cut into spans: when each begins, and the longest wait for others of a request that came in it."""
    answered = [one for one in result.outcomes if one.failed is None]
    if not answered:
        return [], []
    first_s = min(one.arrival_s for one in answered)
    span_s = max((max(one.arrival_s for one in answered) - first_s) / NUM_SPANS, 1e-9)
    worst: dict[int, float] = {}
    for one in answered:
        span = min(int((one.arrival_s - first_s) / span_s), NUM_SPANS - 1)
        worst[span] = max(worst.get(span, 0.0), queue_age_s(one))
    return [first_s + span * span_s for span in sorted(worst)], [worst[span] for span in sorted(worst)]
