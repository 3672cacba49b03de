"""Self-contained HTML pages: templates of this package with their parts put in."""

from __future__ import annotations

import base64
import html
import importlib.resources
import re
from collections.abc import Sequence

from shadowmask.report.sample import Sample, pack_samples

MOST_SAMPLES = 2


def inspect_page(samples: Sequence[Sample], title: str) -> str:
    """The page of one or two samples, side by side. It opens without a network.

    The data travel as base64 of the saved file, so no token's text can end a script or a tag.
    """
    if not 1 <= len(samples) <= MOST_SAMPLES:
        raise ValueError(f"{len(samples)} samples: the page shows one or two side by side")
    return fill(
        "inspect.html",
        title=html.escape(title),
        style=part("common.css") + part("inspect.css"),
        script=part("record.js") + part("inspect.js"),
        data=base64.b64encode(pack_samples(samples)).decode(),
    )


def fill(template: str, **parts: str) -> str:
    """A template with every ``{{name}}`` replaced, in one pass: what is put in is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], part(template))


def part(name: str) -> str:
    """The text of one file in ``pages/``."""
    return (importlib.resources.files("shadowmask.report") / "pages" / name).read_text(encoding="utf-8")
