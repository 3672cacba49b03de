"""Plain lines in a pipe, a live table on a terminal, and a time left that can be believed."""

import io

import pytest
from rich.console import Console

from shadowmask.report.progress import Eta, ProgressDisplay, plain_line
from shadowmask.report.units import format_bytes, format_duration

METRICS = {
    "reward": 0.65625,
    "sampling_gap/max": 2.13e-5,
    "information_gap/kl": 0.0312,
    "kv/bytes_peak": 47_185_920,
    "kv/bytes_dense": 94_371_840,
    "grad_norm": 3.0,
}


def display_into(stream, terminal):
    console = Console(file=stream, force_terminal=terminal, width=100, soft_wrap=not terminal)
    return ProgressDisplay(console=console)


def run(display, steps=3):
    display.say("warm-up 1/1: [loss] 0.2")
    with display:
        display.start(steps)
        for step in range(1, steps + 1):
            display.update({"step": step, **METRICS})


def test_a_pipe_gets_one_line_per_step_without_control_characters():
    stream = io.StringIO()
    run(display_into(stream, terminal=False))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "warm-up 1/1: [loss] 0.2"
    assert lines[2].startswith(
        "step 2/3  reward 0.656  sampling gap max 2.1e-05  information gap KL 0.031  "
        "KV evicted/dense 47.2/94.4 MB  eta "
    )
    assert len(lines) == 4
    assert all(character.isprintable() for line in lines for character in line)


def test_long_lines_are_not_wrapped_in_a_pipe(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    ProgressDisplay().say("word " * 40)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_terminal_shows_the_steps_and_the_bar_and_is_left_clean():
    stream = io.StringIO()
    run(display_into(stream, terminal=True), steps=20)
    shown = stream.getvalue()
    assert "\x1b[" in shown
    assert "step 20/20" in shown
    assert "47.2/94.4 MB" in shown
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_an_error_inside_ends_the_live_display():
    stream = io.StringIO()
    display = display_into(stream, terminal=True)
    with pytest.raises(KeyboardInterrupt), display:
        raise KeyboardInterrupt
    assert stream.getvalue().rstrip().endswith("\x1b[?25h")


def test_a_step_without_a_measurement_leaves_it_out():
    line = plain_line({"step": 7, "reward": 1.0, "kv/bytes_peak": 1}, Eta(None))
    assert line == "step 7  reward 1.000"


def test_the_time_left_follows_the_mean_step_and_goes_on_between_steps():
    now = [0.0]
    eta = Eta(10, clock=lambda: now[0])
    eta.begin()
    assert eta.seconds_left() is None
    now[0] = 30.0
    eta.update(2)
    assert eta.seconds_left() == pytest.approx(120.0)
    now[0] = 40.0
    assert eta.seconds_left() == pytest.approx(110.0)
    assert eta.describe() == "40s gone, 1m50s left"
    now[0] = 1e6
    assert eta.seconds_left() == 0.0


def test_a_resumed_run_counts_only_the_steps_it_made_itself():
    now = [100.0]
    eta = Eta(10, clock=lambda: now[0])
    eta.begin(done=8)
    now[0] = 110.0
    eta.update(9)
    assert eta.seconds_left() == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (23_592_960, "23.6 MB"), (1.5e9, "1.5 GB"), (2e13, "20 TB")],
)
def test_bytes_are_written_with_three_digits(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7620, "2h07m")])
def test_durations_are_short(seconds, text):
    assert format_duration(seconds) == text
