"""What is suggested instead of a name that is not known, and how an extra of the package is installed."""

import json
from importlib import metadata
from pathlib import Path

import pytest

from lockstep.config.strategies import STRATEGIES
from lockstep.errors import nearest_name, pip_install


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("dpp", "ddp"),
        ("ddpp", "ddp"),
        ("pdp", "ddp"),
        ("DDP", "ddp"),
        ("fdsp", "fsdp"),
        ("fsdp_grads", "fsdp-grads"),
        ("xy", None),
        ("", None),
    ],
)
def test_a_slip_of_one_letter_is_likelier_than_another_length(typed: str, meant: str | None) -> None:
    assert nearest_name(typed, STRATEGIES) == meant


def test_without_a_cutoff_there_is_always_a_name() -> None:
    assert nearest_name("xy", STRATEGIES, cutoff=0.0) in STRATEGIES
    assert nearest_name("xy", [], cutoff=0.0) is None


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'lockstep-train[wandb]'"),
        ({"url": "file:///a%20b", "dir_info": {"editable": True}}, "pip install -e '/a b[wandb]'"),
        ({"url": "file:///src", "dir_info": {}}, "pip install '/src[wandb]'"),
        ({"url": Path.cwd().as_uri(), "dir_info": {"editable": True}}, "pip install -e '.[wandb]'"),
        (
            {"url": "https://example.org/l.git", "vcs_info": {"vcs": "git"}},
            "pip install 'lockstep-train[wandb] @ git+https://example.org/l.git'",
        ),
    ],
)
def test_an_extra_comes_from_where_the_package_came(
    monkeypatch: pytest.MonkeyPatch, origin: dict | None, command: str
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return origin and json.dumps(origin)

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    assert pip_install("wandb") == command
