"""One owner of a module's call: links in a fixed order, and nothing left behind."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.parallel.calls.chain import LINK_ORDER, Call, CallChain


class Noting:
    """A link that notes its name."""

    inner: Call

    def __init__(self, name: str, calls: list[str]):
        self.name, self.calls = name, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(self.name)
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("names", itertools.permutations(LINK_ORDER))
def test_the_order_of_links_does_not_depend_on_who_comes_first(names: tuple[str, ...]) -> None:
    model, calls = nn.Linear(2, 2), []
    expected = model(torch.ones(1, 2))
    for name in names:
        CallChain.of(model).install(name, Noting(name, calls))
    assert torch.equal(model(torch.ones(1, 2)), expected)
    assert calls == list(reversed(LINK_ORDER))


def test_without_links_a_module_is_as_before() -> None:
    model, calls = nn.Linear(2, 2), []
    for name in LINK_ORDER:
        CallChain.of(model).install(name, Noting(name, calls))
    CallChain.of(model).remove("graph")
    model(torch.ones(1, 2))
    assert calls == ["watch", "intercept", "compile"]
    assert CallChain.of(model).find("graph") is None
    for name in LINK_ORDER:
        CallChain.of(model).remove(name)
    assert model._compiled_call_impl is None


def test_compiled_code_is_innermost_and_stays() -> None:
    compiled: list[str] = []
    model = nn.Linear(2, 2)
    model._compiled_call_impl = lambda *args: compiled.append("compiled") or nn.Linear.forward(model, *args)
    before = model._compiled_call_impl
    calls: list[str] = []
    CallChain.of(model).install("graph", Noting("graph", calls))
    model(torch.ones(1, 2))
    assert (calls, compiled) == (["graph"], ["compiled"])
    CallChain.of(model).remove("graph")
    assert model._compiled_call_impl is before


def test_hooks_run_and_copies_have_no_chain() -> None:
    model, calls = nn.Linear(2, 2), []
    CallChain.of(model).install("compile", Noting("compile", calls))
    model.register_forward_hook(lambda *_: calls.append("hook"))
    model(torch.ones(1, 2))
    assert calls == ["compile", "hook"]
    assert copy.deepcopy(model)._compiled_call_impl is None


def test_eager_calls_skip_all_links_and_compiled_code_and_bring_them_back() -> None:
    compiled: list[str] = []
    model = nn.Linear(2, 2)
    model._compiled_call_impl = lambda *args: compiled.append("compiled") or nn.Linear.forward(model, *args)
    calls: list[str] = []
    CallChain.of(model).install("graph", Noting("graph", calls))
    with lockstep.run_eagerly(model):
        with lockstep.run_eagerly(model):
            model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    assert (calls, compiled) == ([], [])
    model(torch.ones(1, 2))
    assert (calls, compiled) == (["graph"], ["compiled"])
