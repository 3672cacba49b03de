"""The picture of a run shows what was measured, and says where nothing was."""

import pytest
from matplotlib.figure import Figure
from PIL import Image

from shadowmask.report import plots

METRICS = [
    {
        "step": step,
        "reward": 0.5 + step / 40,
        "sampling_gap/max": 0.0 if step == 3 else 2e-5,
        "sampling_gap/p99": 4e-6,
        "information_gap/kl": 0.3 / step,
        "information_gap/agreement_p5": 1 - 0.5 / step,
        "kv/bytes_peak": 4e7,
        "kv/bytes_dense": 9e7,
    }
    for step in range(1, 13)
]


@pytest.fixture
def drawn(monkeypatch):
    """Figures that were saved, to look at their axes."""
    figures = []
    save = plots.save
    monkeypatch.setattr(plots, "save", lambda figure, path: (figures.append(figure), save(figure, path)))
    return figures


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_four_panels_show_the_measurements(tmp_path, drawn):
    accuracies = {"dense": (0.8, 0.95), "evicted": (0.5, 0.9)}
    plots.plot_run(METRICS, tmp_path / "run.png", accuracies, tolerance=1e-4)
    with Image.open(tmp_path / "run.png") as image:
        assert image.format == "PNG"
        assert image.width > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["run.png"]
    reward, gap, information, memory = drawn[0].axes[:4]
    assert list(reward.lines[0].get_ydata()) == [record["reward"] for record in METRICS]
    assert list(reward.lines[2].get_ydata()) == [0.5, 0.9]
    assert gap.get_yscale() == "log"
    assert min(gap.lines[0].get_ydata()) > 0  # a gap of zero is drawn, at the bottom
    assert labels(gap) == ["max", "99th percentile", "tolerance 0.0001"]
    assert labels(information) == ["KL", "agreement, 5th percentile (right)"]
    assert memory.get_ylabel() == "MB"
    assert list(memory.lines[0].get_ydata()) == [40.0] * 12
    for axes in (reward, information, memory):  # nothing lies outside what is shown
        low, high = axes.get_ylim()
        assert all(low <= value <= high for line in axes.lines for value in line.get_ydata())


def test_lines_of_a_panel_differ_without_colour():
    for key in ("linestyle", "marker"):
        assert plots.DARK[key] != plots.LIGHT[key]


@pytest.mark.parametrize("metrics", [[], [{"step": 1, "reward": None}]])
def test_panels_without_data_say_so(tmp_path, drawn, metrics):
    plots.plot_run(metrics, tmp_path / "run.png")
    for axes in drawn[0].axes:
        assert [text.get_text() for text in axes.texts] == ["not measured"]


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    def fail(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(KeyboardInterrupt):
        plots.plot_run(METRICS, tmp_path / "run.png")
    assert not list(tmp_path.iterdir())
