"""Tests that the pages match the repository: the packages, make targets and files that they name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def page(name):
    return (ROOT / name).read_text()


def listed_paths():
    """Return the paths of the architecture page's listing. An indented path is inside the previous unindented one."""
    block = re.search(r"## The packages\n\n```\n(.*?)```", page("ARCHITECTURE.md"), re.DOTALL)[1]
    paths = []
    parent = ""
    for line in block.splitlines():
        entry = re.match(r"( {0,2})(\S+(?:, \S+)*)  ", line)
        if entry is None:
            continue  # continuation of a description
        indent, names = entry.groups()
        if not indent:
            parent = names if names.endswith("/") else ""
        paths += [(parent if indent else "") + name for name in names.split(", ")]
    return paths


def test_the_paths_on_the_architecture_page_exist():
    paths = listed_paths()
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_architecture_lists_every_package():
    paths = set(listed_paths())
    packages = {
        f"{path.parent.relative_to(ROOT)}/"
        for top in ("eplb_core", "eplb_lab", "eplb_service", "worker_agent")
        for path in (ROOT / top).glob("*/__init__.py")
    }
    assert {package for package in packages if not any(path.startswith(package) for path in paths)} == set()


def test_the_contributing_page_lists_every_make_target():
    targets = set(re.findall(r"^([a-z0-9-]+):.*## ", page("Makefile"), re.MULTILINE)) - {"help", "clean"}
    assert len(targets) > 12
    assert {target for target in targets if f"`make {target}" not in page("CONTRIBUTING.md")} == set()


def test_every_make_target_and_prerequisite_has_a_rule():
    """For a phony target without a rule, make does nothing and reports success."""
    makefile = page("Makefile")
    rules = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    phony = set(" ".join(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)).split())
    assert len(phony) > 30
    assert phony == rules


def test_files_named_by_pages_exist():
    folders = ("", "eplb_core", "eplb_lab", "eplb_lab/layer", "eplb_service", "worker_agent", "tests")
    named = {
        (path.name, name)
        for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        if path.name != "CHANGELOG.md"  # the changelog also names removed files
        for pattern in (
            r"`(\w+(?:/\w+)+\.py)`",
            r"`((?:eplb_service|worker_agent|tests|tools|docs)/[\w/.]+)`",
        )
        for name in re.findall(pattern, path.read_text())
    }
    assert len(named) > 20
    assert {
        link for link in named if not any((ROOT / folder / link[1]).exists() for folder in folders)
    } == set()


@pytest.mark.parametrize(
    ("folder", "pages", "limit"), [(ROOT / "docs", "*.md", 1200), (ROOT, "ARCHITECTURE.md", 2300)]
)
def test_pages_do_not_exceed_their_word_limits(folder, pages, limit):
    """Table markup does not count."""
    words = {path.name: len(re.findall(r"\S*\w\S*", path.read_text())) for path in folder.glob(pages)}
    assert words
    assert {name: count for name, count in words.items() if count > limit} == {}


def test_links_to_files_resolve_in_the_checkout():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("packaging/*/README.md")]
    links = [
        (path.relative_to(ROOT).as_posix(), target)
        for path in pages
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text())
        if not target.startswith(("http", "#", "mailto"))
    ]
    assert len(links) > 80
    assert [
        (page, to) for page, to in links if not (ROOT / page).parent.joinpath(to.partition("#")[0]).exists()
    ] == []
