"""The page of a sample: self-contained, and in a real browser it shows what the record says."""

from __future__ import annotations

import re

import pytest
import torch

from browser import BROWSER, Tab
from shadowmask.report.page import inspect_page, part
from tiny_samples import make_record, make_sample

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


def test_the_page_holds_no_text_of_a_sample_and_no_address():
    page = inspect_page([make_sample(), make_sample()], "a <title> & {{data}}")
    assert "onerror" not in page
    assert page.count("</script>") == 2
    assert "a &lt;title&gt; &amp; {{data}}" in page
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page)


def test_more_than_two_samples_do_not_stand_side_by_side():
    with pytest.raises(ValueError, match="3 samples"):
        inspect_page([make_sample()] * 3, "three")


def test_no_part_of_the_page_ends_its_own_script():
    for name in ("record.js", "inspect.js"):
        assert "</script" not in part(name)


@pytest.fixture(scope="module")
def samples():
    # eviction every two tokens: more than four moments, hence codes of several bits
    return [make_sample(30, 12), make_sample(20, 5, every=None, restored=None)]


@pytest.fixture(scope="module")
def tab(tmp_path_factory, samples):
    path = tmp_path_factory.mktemp("page") / "inspect.html"
    path.write_text(inspect_page(samples, "two samples"), encoding="utf-8")
    with Tab(path) as tab:
        tab.wait("window.page && page.views[0].painted[0] >= 0")
        yield tab


def levels(tab: Tab, view: int) -> list[int]:
    return tab.run(
        f"page.views[{view}].spans.map((span) => Number(/ l([0-9])/.exec(' ' + span.className)[1]))"
    )


def expected_levels(shares: torch.Tensor, cells: int, exist: int) -> list[int]:
    out = []
    for k, share in enumerate(shares.tolist()):
        held = round(share * cells)
        if k >= exist:
            out.append(9)
        else:
            out.append(0 if not held else 8 if held == cells else min(7, max(1, int(8 * held / cells + 0.5))))
    return out


@needs_browser
def test_tokens_are_shaded_by_the_share_that_holds_them_at_every_position(tab, samples):
    seen = set()
    for answer in range(12):
        tab.run(f"page.move({answer})")
        tab.settle()
        for view, sample in enumerate(samples):
            own = min(answer, len(sample.kl) - 1)
            assert levels(tab, view) == expected_levels(sample.held(own), 6, sample.prompt_length + own)
        seen.add(tuple(levels(tab, 0)))
    assert len(seen) == 12  # it does move
    assert tab.complaints() == []


@needs_browser
def test_the_text_is_shown_as_it_is(tab, samples):
    shown = tab.run("page.views[0].spans.map((span) => span.textContent)")
    assert shown == [piece or "▫" for piece in samples[0].pieces]
    assert tab.run("document.images.length") == 0
    assert tab.run("document.querySelectorAll('.text b').length") == 0


@needs_browser
def test_the_map_filters_the_text(tab, samples):
    tab.run("page.move(4)")
    tab.run("page.views[0].cells[3].click()")  # layer 1, head 1
    tab.settle()
    one = samples[0].evicted_at[1, 1] > samples[0].prompt_length - 1 + 4
    assert levels(tab, 0) == expected_levels(one.float(), 1, samples[0].prompt_length + 4)
    tab.run("page.views[0].cells[0].focus()")
    tab.press(" ")  # adds layer 0, head 0
    both = samples[0].evicted_at[[0, 1], [0, 1]] > samples[0].prompt_length - 1 + 4
    assert levels(tab, 0) == expected_levels(both.float().mean(dim=0), 2, samples[0].prompt_length + 4)
    tab.press("Escape")
    assert levels(tab, 0) == expected_levels(samples[0].held(4), 6, samples[0].prompt_length + 4)


@needs_browser
def test_hovering_tells_which_heads_lost_a_token_and_when(tab):
    tab.run("page.move(11)")
    tab.point("page.views[0].spans[2]")
    words = tab.run("page.views[0].detail.textContent")
    assert "prompt token 3" in words
    assert "held by 0 of 6 heads now; 6 lose it in the end" in words
    assert "from answer token 2 on (6): layer 0–2: all heads" in words  # noqa: RUF001
    assert tab.run("page.views[0].cells.every((cell) => cell.className === 'gone')")
    tab.point("page.views[0].spans[0]")
    assert "never lost" in tab.run("page.views[0].detail.textContent")
    assert tab.run("page.views[0].cells.every((cell) => cell.className === 'here')")
    tab.point("document.querySelector('h1')")


@needs_browser
def test_the_keyboard_reaches_everything(tab, samples):
    tab.run("document.activeElement.blur()")
    tab.press("Home")
    assert tab.run("page.answer") == 0
    tab.press("ArrowRight", "ArrowRight", "ArrowLeft")
    assert tab.run("page.answer") == 1
    tab.press("e")
    assert tab.run("page.answer") == 3  # the next eviction is after answer token 2's query
    tab.press("End")
    assert tab.run("page.answer") == 11
    tab.press("n")
    worst = samples[0].kl.argsort(descending=True).tolist()
    assert tab.run("page.answer") in worst
    tab.run("page.views[0].text.focus()")
    before = tab.run("page.answer")
    tab.press("ArrowRight", "ArrowRight")
    assert tab.run("page.views[0].picked") is not None
    assert tab.run("page.answer") == before  # the text has its own arrows
    tab.press("Escape")
    assert tab.run("page.views[0].picked") is None


@needs_browser
def test_the_answer_rows_and_the_restored_spans_say_what_they_measured(tab, samples):
    tab.run("page.views[0].worst.querySelector('button').click()")
    tab.settle()
    worst = int(samples[0].kl.argmax())
    assert tab.run("page.answer") == worst
    row = tab.run(f"[...page.views[0].rows[{worst}].children].map((cell) => cell.textContent)")
    assert row[5] == f"{float(samples[0].kl[worst]):.2f}"
    assert row[2] == f"{float(samples[0].sparse_logprobs[worst]):.2f}".replace("-", "−")  # noqa: RUF001
    words = tab.run("page.views[0].detail.textContent")
    assert f"would take {float(samples[0].kl[worst]) / 2:.2f}" in words
    marked = tab.run("page.views[0].spans.map((s) => s.classList.contains('culprit'))")
    assert marked == [k < 15 for k in range(42)]


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_lost_tokens_stand_out_without_colour_in_both_schemes(tmp_path, dark):
    path = tmp_path / "inspect.html"
    path.write_text(inspect_page([make_sample()], "one"), encoding="utf-8")
    with Tab(path, dark=dark) as tab:
        tab.wait("window.page && page.views[0].painted[0] >= 0")
        style = "getComputedStyle(document.querySelector('.scale .l{}'))"
        assert "line-through" in tab.run(style.format(0) + ".textDecorationLine")
        page = tab.run("getComputedStyle(document.body).backgroundColor")
        assert (luminance(page) < 0.2) == dark
        text = tab.run("getComputedStyle(document.body).color")
        held = tab.run(style.format(8) + ".backgroundColor")
        assert contrast(text, held) > 4.5  # readable on the strongest ground
        assert contrast(page, held) > 1.5  # and that ground is told from none
        assert contrast(tab.run(style.format(0) + ".color"), page) > 4.5


def luminance(colour: str) -> float:
    """Relative luminance of an ``rgb(...)`` colour (WCAG 2)."""
    channels = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@needs_browser
def test_a_long_prompt_repaints_only_what_is_in_view(tmp_path):
    record = make_record(8, 4, 8192, 20, every=4)
    sample = make_sample(8192, 20, evicted_at=record, pieces=[" word"] * 8212)
    path = tmp_path / "inspect.html"
    path.write_text(inspect_page([sample], "long"), encoding="utf-8")
    with Tab(path) as tab:
        tab.wait("window.page && page.views[0].painted.some((code) => code >= 0)")
        tab.run(
            "window.changed = 0, new MutationObserver((all) => { changed += all.length; })"
            ".observe(page.views[0].text, {attributes: true, childList: true, subtree: true})"
        )
        tab.run("page.move(0)")
        tab.settle()
        tab.run("page.move(19)")
        tab.settle()
        assert 0 < tab.run("changed") < 3000
        tab.run("page.views[0].text.scrollTop = 0")
        tab.wait("page.views[0].painted[0] === page.views[0].codes[0]")
        assert levels_of(tab, 50) == expected_levels(sample.held(19), 32, 8211)[:50]


def levels_of(tab: Tab, count: int) -> list[int]:
    return tab.run(f"[...page.views[0].painted.slice(0, {count})].map((code) => code & 15)")
