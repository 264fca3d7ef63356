"""The nodes of an autograd graph: each once, however often and however deep it is reached."""

from __future__ import annotations

import torch

from lockstep.runtime.autograd_graph import autograd_nodes


def test_each_node_comes_once():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    nodes = [*autograd_nodes([(y + y).grad_fn, y.grad_fn, None, x.grad_fn])]
    assert sorted(node.name() for node in nodes) == ["AddBackward0", "MulBackward0", "torch::autograd::AccumulateGrad"]


def test_a_graph_may_be_deeper_than_pythons_stack():
    x = total = torch.ones((), requires_grad=True)
    for _ in range(5000):
        total = total + 1
    assert sum(1 for _ in autograd_nodes([total.grad_fn])) == 5001
    assert x.grad is None
