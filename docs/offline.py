"""The site works from a folder, without a server or a network: a mkdocs hook (see mkdocs.yml).

It has pages load scripts from the site that the theme would take from the network, and looks at what was built: every
link within it leads somewhere, and no page loads anything from elsewhere.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

#: What drawings need, and what search needs in pages from a folder. `make docs` gets them where there is npm.
MERMAID, WORKER = "assets/mermaid.min.js", "assets/iframe-worker.js"
#: By tag, where it says what a page loads.
LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}

log = logging.getLogger("mkdocs.hooks.offline")


class Page(HTMLParser):
    """What a page links to, what it loads, and the anchors that it has."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = dict(attrs)
        self.anchors |= {name for name in (has.get("id"), has.get("name")) if name}
        if tag == "a" and (link := has.get("href")):
            self.links.append(link)
        if link := has.get(LOADS.get(tag, "")):
            self.loads.append(link)


def read(site: Path) -> dict[str, Page]:
    """The pages of a built site by their paths in it."""
    return {path.relative_to(site).as_posix(): Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}


def broken(site: Path, pages: dict[str, Page]) -> Iterator[str]:
    """A sentence for each link that leads to nothing in a site."""
    for name, page in pages.items():
        for link in dict.fromkeys((*page.links, *page.loads)):
            if _is_elsewhere(link):
                continue
            parts = urlsplit(link)
            path, anchor = unquote(parts.path), unquote(parts.fragment)
            there = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            if there.startswith("../") or not (site / there).is_file():
                yield f"{name} links to {link}, and there is no {there}"
            elif anchor and not (there in pages and anchor in pages[there].anchors):
                yield f"{name} links to {link}, and {there} has no such anchor"


def fetched(pages: dict[str, Page]) -> Iterator[str]:
    """A sentence for each thing that a page takes from the network when it is looked at."""
    for name, page in pages.items():
        for link in page.loads:
            if _is_elsewhere(link) and not link.startswith("data:"):
                yield f"{name} loads {link}, which is not in the site"


def _is_elsewhere(link: str) -> bool:
    parts = urlsplit(link)
    return bool(parts.netloc or parts.scheme)


def on_config(config: Any) -> Any:
    config.theme.static_templates.discard("404.html")  # a server's; its links are none from a folder
    if (Path(config.docs_dir) / WORKER).exists():
        config.extra["polyfills"] = [WORKER]  # in the place of the one that the plugin `offline` would name
    return config


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """The script for drawings on the pages that have some, in a frame that scrolls (site.css)."""
    if 'class="mermaid"' in html and (script := files.get_file_from_path(MERMAID)):
        html = f'{html}\n<script src="{script.url_relative_to(page.file)}"></script>'
    return re.sub(r'(<pre class="mermaid">.*?</pre>)', r'<div class="drawing">\1</div>', html, flags=re.DOTALL)


def on_post_build(config: Any) -> None:
    """A warning for each fault, which ends a strict build."""
    site = Path(config.site_dir)
    pages = read(site)
    for fault in broken(site, pages):
        log.warning(fault)
    if all((Path(config.docs_dir) / script).exists() for script in (MERMAID, WORKER)):
        for fault in fetched(pages):
            log.warning(fault)
    else:
        log.info("Search and drawings need the network, since there was no npm to get their scripts with")
