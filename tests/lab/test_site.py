"""The docs site: every page is in the navigation, every link and anchor leads somewhere, and it loads nothing.

Building it takes a while and is marked `long`; what can be known without building is tested here on every change.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import lockstep

ROOT = Path(__file__).parent.parent.parent
_spec = importlib.util.spec_from_file_location("mkdocs_hooks", ROOT / "docs" / "mkdocs_hooks.py")
assert _spec is not None
assert _spec.loader is not None
hooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hooks)

PAGES = [*hooks.OUTSIDE, *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]


class Config(yaml.SafeLoader):
    """Reads mkdocs.yml without what only mkdocs can make."""


Config.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def pages_in(nav: list[Any]) -> list[str]:
    found = []
    for entry in nav:
        found += [page for part in entry.values() for page in pages_in(part)] if isinstance(entry, dict) else [entry]
    return found


def test_the_navigation_has_every_page_once():
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Config)
    listed = pages_in(hooks.expanded(config["nav"]))
    assert sorted(listed) == sorted(hooks.place_of(page) for page in PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors_lead_somewhere(page):
    assert problems_of(page, (ROOT / page).read_text()) == []


def problems_of(page: str, text: str) -> list[str]:
    found = []
    for link in hooks.links_of(text):
        target, anchor = hooks.target_of(page, link)
        if not (ROOT / target).is_file():
            found.append(f"{link}: no such file")
        elif anchor and anchor not in hooks.anchors_of((ROOT / target).read_text()):
            found.append(f"{link}: no such heading")
        elif not target.endswith((".png", ".svg")):
            hooks.place_of(target)
    return found


def test_a_wrong_link_is_noticed():
    text = "[a](nowhere.md) [b](tour.md#nowhere) [c](tour.md#the-tree)\n```text\n[d](nowhere.md)\n```\n"
    assert problems_of("docs/data.md", text) == ["nowhere.md: no such file", "tour.md#nowhere: no such heading"]


def test_links_are_mended_for_the_site():
    assert hooks.relinked("README.md", "[a](docs/tour.md#the-tree)") == "[a](tour.md#the-tree)"
    assert hooks.relinked("docs/recipes/hrm.md", "[a](../../README.md)") == "[a](../index.md)"
    assert hooks.relinked("docs/tour.md", "[a](../src/lockstep/task.py)") == "[a](source/src/lockstep/task.py.md)"
    assert hooks.relinked("lab/README.md", "[a](../docs/lab/09_determinism.md)") == "[a](09_determinism.md)"
    same = "[a](https://pytorch.org) [b](#here)\n```text\n[c](../README.md)\n```\n"
    assert hooks.relinked("docs/tour.md", same) == same


def test_the_reference_has_every_public_name():
    named = re.findall(r"^::: lockstep\.(\S+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    homes = {f"{home}.{name}" for name, home in lockstep._HOMES.items()}
    assert {name for name in named if not name.startswith(("callbacks.", "testing.", "hf."))} == homes


def test_messages_on_the_page_about_trouble_are_printed():
    """Each part of a message between two ellipses is in the sources, word for word."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", text, re.M)
    assert len(messages) > 35
    sources = "\n".join(path.read_text() for path in (ROOT / "src" / "lockstep").rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # a message may be continued on the next line
    parts = [part for message in messages for part in message.split("...")]
    assert [part for part in parts if part.strip() and part not in sources] == []


def test_the_map_has_every_document():
    text = (ROOT / "docs" / "seeds.md").read_text()
    assert re.findall(r"^\| (S\d) \|", text, re.M) == ["S0", "S1", "S2", "S3", "S4"]


@pytest.mark.long
def test_the_site_builds_without_a_warning_and_loads_nothing(tmp_path):
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    loads = re.compile(r'<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)="?https?://[^">]*')
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 45
    assert [found for page in pages for found in loads.findall(page.read_text())] == []
    styles = "".join(path.read_text() for path in tmp_path.rglob("*.css"))
    assert not re.search(r"url\(.?https?://", styles)


# ---- the course page ------------------------------------------------------------------------------------------

# Words of lab/README.md with a figure, and the same figure computed.
FIGURES = {
    "175e9 x 4 = 700 GB": 175e9 * 4 / 1e9 == 700,
    "140 GB of weights, 1,120 GB to train": (70 * 2, 70 * 16) == (140, 1120),
    "do 3.14e23 operations in 12 days": round(3.14e23 / (10_000 * 125e12 / 4) / 86_400) == 12,
    "many, 1.72 million hours are 35 days": round(1.72e6 / 2048 / 24) == 35,
    "230 GPU hours": round(256 * 0.9) == 230,
    "2e12 / 1e5 / 86,400 = 231 days": int(2e12 / 1e5 / 86_400) == 231,
    "in 1.72 million GPU hours are 323 a": round(2e12 / (1.72e6 * 3600)) == 323,
    "it is 196 years": round(1.72e6 / 24 / 365) == 196,
    "4 GPUs x 32 x 4 = 512": 4 * 32 * 4 == 512,
    "| master weights and moments, 12 bytes | 840 GB | 210 GB |": (70 * 12, 70 * 12 / 4) == (840, 210),
    "| total | 1,120 GB | 280 GB |": (140 + 140 + 840, 35 + 35 + 210) == (1120, 280),
    "(2,240 GB in all for DDP, 560 GB for FSDP) under FSDP every GPU would hold 140 GB": (4 * 560, 560 / 4)
    == (2240, 140),
    "1,120 / 80 = 14 GPUs": 1120 / 80 == 14,
    "2 + 2 + 4 + 8 = 16 bytes": 2 + 2 + 4 + 8 == 4 + 4 + 8 == 16,
    "16 times, or 2 times": (312 / 19.5, 312 / 156) == (16, 2),
    "1.5 D for four ranks": 2 * 3 / 4 == 1.5,
    "the total is 12 D": 4 * 3 == 12,
    "58 % more training": round(95 / 60 * 100 - 100) == 58,
    "33 %: $672K become $448K, and $224K are saved": (round(672 * 60 / 90), 672 - 448) == (448, 224),
    "a week of that $336K-672K": (2000 * 168, 4000 * 168) == (336_000, 672_000),
    "7 hours and 15 minutes": 60 + 30 + 90 + 45 + 120 + 90 == 7 * 60 + 15,
    "become 128 at 0.004": 128 / 32 * 0.001 == 0.004,
}


@pytest.mark.parametrize("words", FIGURES)
def test_a_figure_of_the_course_is_right(words):
    text = " ".join((ROOT / "lab" / "README.md").read_text().split())
    assert words in text
    assert FIGURES[words]


def test_speed_ups_of_the_table_are_quotients():
    rows = re.findall(
        r"^\| \d \| (\d+)(?: img/s)? \| (\d+)(?: img/s)? \| ([\d.]+) \|$",
        (ROOT / "lab" / "README.md").read_text(),
        re.M,
    )
    assert len(rows) == 4
    assert [round(int(ddp) / int(dp), 1) for dp, ddp, _ in rows] == [float(ratio) for *_, ratio in rows]
