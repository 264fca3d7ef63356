"""Hooks of the docs site: pages that are outside docs/, links between all of them, and patterns in the navigation.

The pages are written to be read on a repository's web page, where a link is a path in the repository. On the site the
README is index.html, a page of docs/ is at the top, and a source file has a page with its text. The functions above
`on_config` need no mkdocs: tests/lab/test_site.py checks all links with them.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# Pages outside docs/, with their place on the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "lab/README.md": "lab/index.md",
    "tests/systems/requirements.md": "tests/systems/requirements.md",
}
SHOWN_AS_SOURCE = (".py", ".sh", ".slurm", ".yaml", ".toml")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def place_of(path: str) -> str:
    """Return where a file of the repository is on the site. A source file has a page with its text."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(SHOWN_AS_SOURCE):
        return f"source/{path}.md"
    raise ValueError(f"{path} has no place on the site")


def target_of(page: str, link: str) -> tuple[str, str]:
    """Return the file in the repository that a link of a page leads to, and the anchor in it."""
    path, _, anchor = link.partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
    return target, anchor


def is_inside(link: str) -> bool:
    """Return whether a link leads to a file of the repository."""
    return not re.match(r"[a-z]+:", link)


def links_of(text: str) -> list[str]:
    """Return the links of a page to files of the repository, outside its code blocks."""
    return [link for _, link, _ in LINK.findall(FENCE.sub("", text)) if is_inside(link)]


def relinked(page: str, text: str) -> str:
    """Return a page's text with its links as they must be on the site."""
    here = posixpath.dirname(place_of(page))

    def replace(match: re.Match[str]) -> str:
        link = match[2]
        if not is_inside(link):
            return match[0]
        target, anchor = target_of(page, link)
        path = posixpath.relpath(place_of(target), here or ".") if link.partition("#")[0] else ""
        return f"{match[1]}{path}{'#' if anchor else ''}{anchor}{match[3]}"

    # Links only: what is in a code block stays as it is.
    parts = re.split(f"({FENCE.pattern})", text, flags=re.M | re.S)
    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in parts)


def slug(heading: str) -> str:
    """Return the anchor of a heading, as web pages of repositories and this site make it."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a page's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M):
        anchor, number = slug(heading), 1
        while anchor in found:
            anchor, number = f"{slug(heading)}_{number}", number + 1
        found.add(anchor)
    return found


def expanded(nav: list[Any]) -> list[Any]:
    """Return the navigation with its patterns replaced by the pages that match."""
    pages: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            pages += [{name: expanded(part) if isinstance(part, list) else part} for name, part in entry.items()]
        elif "*" in entry:
            folder = ROOT / "docs"
            pages += sorted(path.relative_to(folder).as_posix() for path in folder.glob(entry))
        else:
            pages.append(entry)
    return pages


# ---- called by mkdocs -----------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Expand the navigation."""
    config["nav"] = expanded(config["nav"])
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are outside docs/, and a page for each source file that a page links to."""
    from mkdocs.structure.files import File

    sources: set[str] = set()
    for path in [*OUTSIDE, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]:
        text = (ROOT / path).read_text()
        if path in OUTSIDE:
            files.append(File.generated(config, OUTSIDE[path], content=text))
        targets = {target_of(path, link)[0] for link in links_of(text)}
        sources |= {target for target in targets if target.endswith(SHOWN_AS_SOURCE)}

    for path in sorted(sources):
        files.append(File.generated(config, place_of(path), content=_source_page(path)))
    return files


def _source_page(path: str) -> str:
    language = {".py": "python", ".sh": "bash", ".slurm": "bash"}.get(os.path.splitext(path)[1], "yaml")
    text = (ROOT / path).read_text()
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n````{language}\n{text}````\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Mend the links of a page."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    outside = {place: path for path, place in OUTSIDE.items()}
    return relinked(outside.get(uri, f"docs/{uri}"), markdown)
