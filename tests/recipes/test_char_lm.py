"""The demo recipe: its parts, and its smallest run through the real command."""

import json
import math
import os
from pathlib import Path

import pytest
import torch

import preloaded
from lockstep.errors import ConfigError
from lockstep.recipes.char_lm import CharLM
from lockstep.recipes.char_lm.data import decode, encode

ROOT = Path(__file__).parent.parent.parent
SMALL = {"width": 32, "layers": 1, "heads": 2, "context": 16, "max_bytes": 90_000}


def test_the_tiny_preset_learns_through_the_command(tmp_path):
    words = ("train", "char_lm", "preset=tiny", "run_dir=run", "--nproc", "2")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = preloaded.run(*words, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval_loss"] < 3.3 < math.log(97)  # a uniform guess costs log(97) = 4.57
    assert "sample" in done.stdout


def test_text_survives_encoding():
    assert decode(encode("def f(x):\n    return x + 1\n")) == "def f(x):\n    return x + 1\n"


def test_windows_tile_the_text_and_targets_are_the_next_characters():
    data = CharLM(**SMALL).data()
    first, second = data[0], data[1]
    assert len(first) == 17
    assert first[-1] == second[0]  # the last target of one window is the first input of the next
    together = torch.stack([torch.as_tensor(w) for w in data.__getitems__([0, 1])])
    assert torch.equal(together, torch.stack([torch.as_tensor(first), torch.as_tensor(second)]))


def test_training_and_validation_text_do_not_overlap():
    task = CharLM(**SMALL | {"context": 64})
    training, validation = (
        {bytes(torch.as_tensor(data[i]).tolist()) for i in range(len(data))} for data in (task.data(), task.eval_data())
    )
    assert len(validation & training) / len(validation) < 0.02  # only runs of blanks or rules may repeat


def test_no_position_sees_its_future():
    torch.manual_seed(0)
    model = CharLM(**SMALL).model().eval()
    for p in model.parameters():
        if p.dim() > 1:  # branch outputs start at zero: give them a say
            torch.nn.init.normal_(p, std=0.1)
    ids = torch.randint(0, 90, (1, 16))
    changed = ids.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 90
    before, after = model(ids), model(changed)
    assert torch.allclose(before[0, :10], after[0, :10], atol=1e-6)
    assert not torch.allclose(before[0, 10:], after[0, 10:], atol=1e-4)


def test_wrong_options_are_named_together():
    with pytest.raises(ConfigError) as error:
        CharLM(width=30, heads=4, dropout=2.0)
    assert {problem.problem for problem in error.value.problems} == {
        "task.width=30 cannot be divided among task.heads=4",
        "task.dropout=2.0 is not in [0, 1)",
    }


def test_the_sample_is_always_the_same():
    torch.manual_seed(0)
    task = CharLM(**SMALL)
    model = task.model().eval()
    with torch.no_grad():
        assert task.show(model) == task.show(model)


@pytest.mark.parametrize("full_model", [True, False], ids=["model", "its-blocks"])
def test_growing_text_is_not_compiled(full_model):
    model, graphs = CharLM(**SMALL).model().eval(), []

    def backend(graph, given):
        graphs.append(graph)
        return graph.forward

    ids = torch.zeros(1, 5, dtype=torch.int64)
    torch.compiler.reset()
    for part in [model] if full_model else model.blocks:
        part.compile(backend=backend)
    assert model.generate(ids, count=4).shape == (1, 9)
    assert not graphs
    with torch.no_grad():
        model(ids)  # as before
    assert len(graphs) == 1
