"""Options of a task: what the command line makes of a word, and what is said of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import pytest

from lockstep import fit, targets
from lockstep.config import read_layers, resolve
from lockstep.errors import ConfigError, UserError
from lockstep.targets import make_task


class Options:
    def __init__(self, drop: str = "", way: Literal["none", "half"] = "half", width: int = 1):
        self.drop, self.way, self.width = drop, way, width


def made(typed: str) -> Options:
    return make_task(Options, resolve(read_layers([], [typed])).config.task)


def fix_of(typed: str) -> str:
    with pytest.raises(ConfigError) as refused:
        made(typed)
    (problem,) = refused.value.problems
    return problem.fix


@pytest.mark.parametrize("typed", ["task.drop=none", "task.drop=off", "task.drop=yes", "task.drop=8", "task.way=none"])
def test_a_word_that_is_read_as_no_text_is_to_be_quoted(typed: str) -> None:
    fix = fix_of(typed)
    assert "quote it: task." in fix
    advised = fix.partition("quote it: ")[2].replace("'", "")  # as the shell hands it on
    key, _, value = advised.partition("=")
    assert getattr(made(advised), key.removeprefix("task.")) == value.strip('"')


def test_quotes_are_no_advice_for_a_number() -> None:
    assert fix_of("task.width=none") == "give it a value of type int"


class Shared(TypedDict, total=False):
    depth: int


class Wider(Options):
    def __init__(self, width: int = 1, **shared: Unpack[Shared]):
        super().__init__(width=width)
        self.shared = shared


class Open(Options):
    def __init__(self, **anything: Any):
        super().__init__()
        self.anything = anything


def test_options_in_a_typed_dict_are_checked_like_parameters() -> None:
    assert make_task(Wider, {"width": 2, "depth": 3}).shared == {"depth": 3}
    assert make_task(Wider, {}).shared == {}
    with pytest.raises(ConfigError) as refused:
        make_task(Wider, {"depth": "deep", "dept": 3})
    wrong_type, unknown = (str(problem) for problem in refused.value.problems)
    assert "task.depth" in wrong_type
    assert "task.dept" in unknown


def test_a_constructor_that_takes_any_name_gets_all_of_them() -> None:
    assert make_task(Open, {"depth": "deep"}).anything == {"depth": "deep"}


@pytest.mark.parametrize("wrong", ["char_lm", None, Options, Options()])
def test_fit_names_what_it_takes(wrong: object) -> None:
    with pytest.raises(UserError, match="takes a task or its class"):
        fit(wrong)  # pyrefly: ignore


SHADOW = """
import lockstep

class Mine(lockstep.Task):
    def model(self): ...
    def data(self): ...
    def loss(self, model, batch): ...
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["html", "torch"])
def test_a_file_named_like_a_standard_module_does_not_take_its_place(tmp_path: Path, name: str) -> None:
    """In a process of its own: it must not have been imported before, as in a run without a launcher."""
    (tmp_path / f"{name}.py").write_text(SHADOW)
    code = f"""
from lockstep import targets
import sys
sys.modules.pop("html", None)
assert "torch" not in sys.modules
kind = targets.load_class("{tmp_path}/{name}.py:Mine")
import {name}
assert hasattr({name}, "__path__") and "{tmp_path}" not in {name}.__file__
assert sys.modules[kind.__module__].Mine is kind  # as pickle looks for it
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "source",
    [
        "from elsewhere import Mine",
        "from elsewhere import Other as Mine",
        "from elsewhere import *",
        "if True:\n    class Mine: ...",
        "Mine = make()",
        "for Mine in classes: ...",
        "def __getattr__(name): ...",
        "globals()['Mine'] = int",
    ],
)
def test_a_class_that_a_file_may_have_is_not_refused_before_its_import(tmp_path: Path, source: str) -> None:
    (tmp_path / "task.py").write_text(source)
    targets.check(f"{tmp_path}/task.py:Mine")


def test_a_class_that_a_file_does_not_have_is_named_before_its_import(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("import nothing.at.all\nclass Mine(lockstep.Task): ...\nclass Net: ...\n")
    with pytest.raises(UserError, match="has no class Mien") as refusal:
        targets.check(f"{tmp_path}/task.py:Mien")
    assert refusal.value.found == "its tasks are Mine"
    assert refusal.value.fix == f"use {tmp_path}/task.py:Mine"


# ---- a class that is no task, without an import ----

HEAD = """
import lockstep, torch
from torch import nn
import torch.nn.functional as F
from elsewhere import Base, decorate
"""
CONTRACT = "model = data = loss = optimizer = defaults = presets = unit = None"


@pytest.mark.parametrize(
    ("body", "lacks"),
    [
        ("class Net(nn.Module):\n  def forward(self, x): ...", "model, data, loss"),
        ("class Net(torch.nn.Linear):\n  def loss(self): ...", "model, data, optimizer"),
        ("class Own(nn.Module):\n  def loss(self): ...\nclass Net(Own):\n  def data(self): ...", "model, optimizer"),
        ("class Net:\n  pass", "model, data, loss"),
        ("class Net(lockstep.Task):\n  pass", None),
        ("class Net(Base):\n  pass", None),
        (f"class Net:\n  {CONTRACT}", None),
        (f"class Own:\n  {CONTRACT}\nclass Net(Own, nn.Module):\n  pass", None),
        ("@decorate\nclass Net:\n  pass", None),
        ("class Net(metaclass=Base):\n  pass", None),
        ("class Net:\n  pass\nNet = decorate(Net)", None),
        ("class Net:\n  pass\nNet.model = decorate", None),
        ("class Net:\n  pass\nsetattr(Net, 'model', None)", None),
        ("if torch:\n  class Net:\n    pass\nelse:\n  class Net(Base):\n    pass", None),
    ],
)
def test_a_class_that_is_certainly_no_task_is_refused_without_its_import(body, lacks, tmp_path):
    (tmp_path / "net.py").write_text(HEAD + body)
    target = f"{tmp_path / 'net.py'}:Net"
    if lacks is None:
        targets.check(target)
        return

    with pytest.raises(UserError, match=f"the class Net in .*net.py is not a task: it lacks {lacks}"):
        targets.check(target)


def test_a_class_of_an_installed_module():
    targets.check("lockstep.hf:CausalLM")
    assert targets.load_class("lockstep.hf:CausalLM").__name__ == "CausalLM"
    assert targets.name_of("lockstep.hf:CausalLM") == "causallm"
    with pytest.raises(UserError, match=r"there is no module lockstep\.hff"):
        targets.load_class("lockstep.hff:CausalLM")
    with pytest.raises(UserError, match=r"there is no module nowhere\.at\.all"):
        targets.check("nowhere.at.all:CausalLM")
    with pytest.raises(UserError, match=r"has no class CasualLM(.|\n)*use lockstep\.hf:CausalLM"):
        targets.load_class("lockstep.hf:CasualLM")
