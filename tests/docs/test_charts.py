"""The charts of the documentation are those of benchmarks/results.md, for light and dark pages."""

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import charts
import pytest

ROOT = Path(__file__).parents[2]
DRAWN = charts.charts((ROOT / "benchmarks" / "results.md").read_text("utf-8"))
SVG = "{http://www.w3.org/2000/svg}"


def test_they_are_those_of_the_results():
    assert {p.name: p.read_text("utf-8") for p in (ROOT / "docs" / "charts").iterdir()} == DRAWN


def test_a_bar_is_as_long_as_its_value():
    tree = ElementTree.fromstring(charts.bars("Time & more", {"cp": 4.0, "ktforge, <fast>": 1.0}, "{:.1f} s"))
    assert [(r.get("width"), r.get("class")) for r in tree.iter(f"{SVG}rect")] == [("340.0", None), ("85.0", "ours")]
    assert [t.text for t in tree.iter(f"{SVG}text")] == ["Time & more", "cp", "4.0 s", "ktforge, <fast>", "1.0 s"]


@pytest.mark.parametrize("name", DRAWN)
def test_every_text_fits_on_a_small_telephone_in_either_scheme(name):
    tree = ElementTree.fromstring(DRAWN[name])
    assert int(tree.get("width")) <= 360 and "prefers-color-scheme: dark" in tree.find(f"{SVG}style").text
    texts = list(tree.iter(f"{SVG}text"))
    for one, other in pairwise(texts):  # 8 pixels a character are more than any takes on average
        if one.get("y") == other.get("y"):
            assert 8 * (len(one.text) + len(other.text)) < int(tree.get("width")), one.text
