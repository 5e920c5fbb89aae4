"""The documentation site: it is built without a network and without warnings, and every link in it leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.test_docs import documented

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://github.com/fullshard/fullshard"

#: Ends the process at the first use of a network, so that nothing can catch the error.
_WITHOUT_NETWORK = """
import os, socket
def refuse(*arguments, **options):
    os.write(2, b"the network was used\\n")
    os._exit(3)
for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, refuse)
for name in ("create_connection", "getaddrinfo", "gethostbyname"):
    setattr(socket, name, refuse)
"""


class Page(HTMLParser):
    """What the tests ask of a page: its anchors, its links, what it loads, and its text without code."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.navigation: set[str] = set()
        self.loaded: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.anchors.update(found[name] for name in ("id", "name") if name in found)
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
            if "md-nav__link" in found.get("class", ""):
                self.navigation.add(found["href"])
        elif tag == "link":
            self.loaded.append(found["href"])
        elif "src" in found:
            self.loaded.append(found["src"])
        if tag in ("code", "script", "style"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if not self._open:
            self.text += data


def run_without_network(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _WITHOUT_NETWORK + code, *arguments]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The pages of the site, each by its file."""
    folder = tmp_path_factory.mktemp("site")
    build = "from mkdocs.__main__ import cli; cli()"
    ended = run_without_network(build, "build", "--strict", "--site-dir", str(folder))
    assert ended.returncode == 0, ended.stderr
    assert "WARNING" not in ended.stderr
    return {file: Page(file) for file in folder.rglob("*.html")}


def folder_of(site: dict[Path, Page]) -> Path:
    return next(file.parent for file in site if file.name == "404.html")


def test_a_use_of_the_network_ends_the_build() -> None:
    ended = run_without_network("import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')")
    assert ended.returncode == 3
    assert ended.stderr == "the network was used\n"


def test_every_page_is_in_the_navigation(site: dict[Path, Page]) -> None:
    folder, docs = folder_of(site), ROOT / "docs"
    pages = {page.relative_to(docs).with_suffix(".html").as_posix() for page in docs.rglob("*.md")}
    pages = {re.sub(r"\bREADME.html$", "index.html", page) for page in pages}
    assert {page.relative_to(folder).as_posix() for page in site} - {"404.html"} == pages
    assert pages - site[folder / "index.html"].navigation == set()


def test_links_and_anchors_lead_somewhere(site: dict[Path, Page]) -> None:
    for file, page in site.items():
        for link in [*page.links, *page.loaded]:
            target = urlsplit(link)
            if target.scheme or target.netloc:
                continue
            root = folder_of(site) if target.path.startswith("/") else file.parent  # as in 404.html
            goal = (root / unquote(target.path).lstrip("/")).resolve() if target.path else file
            goal = goal / "index.html" if goal.is_dir() else goal
            assert goal.exists(), f"{file.name} links to {link}"
            if target.fragment and goal in site:
                assert unquote(target.fragment) in site[goal].anchors | {"__skip"}, f"{file.name} links to {link}"


def test_links_to_the_repository_name_files_in_it(site: dict[Path, Page]) -> None:
    found = {link for page in site.values() for link in page.links if link.startswith(f"{REPOSITORY}/")}
    assert f"{REPOSITORY}/blob/main/CONTRIBUTING.md" in {link.partition("#")[0] for link in found}
    for link in found:
        kind, branch, path = link.removeprefix(f"{REPOSITORY}/").partition("#")[0].split("/", 2)
        assert branch == "main"
        assert (ROOT / path).is_dir() if kind == "tree" else (ROOT / path).is_file(), link


def test_pages_load_nothing_from_elsewhere(site: dict[Path, Page]) -> None:
    for file, page in site.items():
        for each in page.loaded:
            assert not urlsplit(each).netloc, f"{file.name} loads {each}"
        assert 'data-md-component="source"' not in file.read_text(), f"{file.name} asks the host of the repository"
    for style in folder_of(site).rglob("*.css"):
        assert not re.search(r"(url\(|@import) *[\"']?(https?:)?//", style.read_text()), style.name


def test_the_reference_has_an_anchor_for_every_name(site: dict[Path, Page]) -> None:
    anchors = {anchor for page in site.values() for anchor in page.anchors}
    assert documented().keys() - anchors == set()


def test_no_markup_of_docstrings_is_left(site: dict[Path, Page]) -> None:
    for file, page in site.items():
        assert not re.search(r"``|\]\[|:(func|class|meth|mod):|::$", page.text, re.MULTILINE), file.name
