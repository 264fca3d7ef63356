"""The ports in examples/ports train as the plain scripts beside them do, in fewer lines."""

from __future__ import annotations

import sys

import pytest

import zoo  # noqa: F401  before timm, which imports torchvision
from pages import ROOT

sys.path.insert(0, str(ROOT / "examples" / "ports"))
compare = __import__("compare")


@pytest.mark.parametrize("name", sorted(compare.PORTS))
def test_a_port_has_the_losses_of_the_plain_script(name):
    pytest.importorskip("transformers")
    pytest.importorskip("timm")
    ported, by_hand = compare.compare(name)
    assert len(ported) > 20
    assert ported == pytest.approx(by_hand, abs=5e-6)
    assert by_hand[-1] < by_hand[0] - 0.03  # it has learnt something


@pytest.mark.parametrize("name", sorted(compare.PORTS))
def test_a_port_is_shorter(name):
    module, _, plain = compare.PORTS[name]
    assert compare.lines_of_code(module) * 2 < compare.lines_of_code(plain)


@pytest.mark.parametrize("name", sorted(compare.PORTS))
def test_the_page_has_the_counted_lines(name):
    module, _, plain = compare.PORTS[name]
    row = f"| {compare.lines_of_code(plain)} | [{compare.lines_of_code(module)}](../examples/ports/{module}.py) |"
    assert row in (ROOT / "docs" / "ports.md").read_text()
