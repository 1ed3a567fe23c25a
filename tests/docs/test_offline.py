"""docs/offline.py sees links of the built site that lead nowhere, and what a page would load from the network."""

import offline
import pytest


def faults(site):
    pages = offline.read(site)
    return [*offline.broken(site, pages), *offline.fetched(pages)]


@pytest.fixture
def site(tmp_path):
    (tmp_path / "README.md").touch()  # outside
    site = tmp_path / "site"
    (site / "how-to").mkdir(parents=True)
    (site / "index.html").write_text('<h1 id="start">ä</h1> <a href="how-to/one.html#two%20words">one</a>')
    (site / "how-to" / "one.html").write_text(
        '<h2 id="two words"></h2> <a href="../index.html#start">up</a> <a href="#two words">here</a>'
        '<a href="https://example.org/nothing">out</a> <script src="../a.js"></script> <img src="data:image/png,">'
    )
    (site / "a.js").touch()
    return site


def test_a_site_in_order(site):
    assert faults(site) == []


@pytest.mark.parametrize(
    ("html", "fault"),
    [
        ('<a href="../nothing.html">', "links to ../nothing.html, and there is no nothing.html"),
        ('<a href="../../README.md">', "links to ../../README.md, and there is no ../README.md"),
        ('<a href="/index.html">', "links to /index.html, and there is no /index.html"),
        ('<a href="../index.html#end">', "links to ../index.html#end, and index.html has no such anchor"),
        ('<a href="#end">', "links to #end, and how-to/two.html has no such anchor"),
        ('<a href="../a.js#end">', "links to ../a.js#end, and a.js has no such anchor"),
        ('<a href="..">', "links to .., and there is no ."),
        ('<img src="chart.svg">', "links to chart.svg, and there is no how-to/chart.svg"),
        ('<script src="https://unpkg.com/x"></script>', "loads https://unpkg.com/x, which is not in the site"),
        ('<link rel="stylesheet" href="//fonts.com/x">', "loads //fonts.com/x, which is not in the site"),
    ],
)
def test_a_fault_is_named(site, html, fault):
    (site / "how-to" / "two.html").write_text(html)
    assert faults(site) == [f"how-to/two.html {fault}"]
