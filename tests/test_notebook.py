"""`lockstep.fit` where people try things: exceptions as they were raised, and a real Jupyter kernel."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Loss, Task, UserError, fit
from lockstep.errors import RanksFailed

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.usefixtures("zygotes")


class Trouble(ValueError):
    """An exception that keeps more than its text."""

    def __init__(self, code: int, place: str):
        super().__init__(code, place)
        self.code = code


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("this cannot be pickled")


class Failing(Task):
    defaults = {"global_batch": 4, "steps": 3, "log": {"progress": "off"}}

    def __init__(self, how: str):
        self.how = how

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self) -> TensorDataset:
        return TensorDataset(torch.arange(8.0)[:, None])

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch[0]).sum(), weight=len(batch[0]))

    def after_step(self, run: Any, result: Any) -> None:
        if os.environ.get("RANK") != "1":
            return
        match self.how:
            case "own":
                raise Trouble(7, "after a step")
            case "user":
                raise UserError("the task gives up", "no luck", "try again")
            case "unpicklable":
                raise Unpicklable("some text")
            case "exit":
                os._exit(3)


def failed(how: str, folder: Path, kind: type[BaseException]) -> Any:
    with pytest.raises(kind) as raised:
        fit(Failing(how), nproc=2, run_dir=str(folder / "run"))
    return raised.value


def test_the_exception_of_a_rank_is_raised_with_its_traceback(tmp_path, capfd):
    error = failed("own", tmp_path, Trouble)
    assert (error.code, error.args) == (7, (7, "after a step"))
    note = error.__notes__[-1]  # after that of the hook
    assert note.startswith("raised on rank 1 of 2; ")
    assert re.search(r'test_notebook\.py", line \d+, in after_step', note)
    assert "rank 1 on" in capfd.readouterr().err  # the launcher has shown it, too


def test_an_error_for_people_stays_one(tmp_path):
    error = failed("user", tmp_path, UserError)
    assert (error.problem, error.fix) == ("the task gives up", "try again")
    assert not isinstance(error, RanksFailed)
    assert "Traceback" not in error.__notes__[-1]


@pytest.mark.long
@pytest.mark.parametrize(("how", "found"), [("unpicklable", "Unpicklable: some text"), ("exit", "ended with code 3")])
def test_what_cannot_be_raised_again_is_told(tmp_path, how, found):
    assert found in str(failed(how, tmp_path, RanksFailed))


# ---- a real kernel ----------------------------------------------------------------------------------------

CELLS = [
    """
import torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset


class Trouble(ValueError):
    def __init__(self, code):
        super().__init__(code)
        self.code = code


class Line(lockstep.Task):
    defaults = {"global_batch": 16, "steps": 40, "lr": {"peak": 0.05}, "evaluate": {"every": 10}}

    def __init__(self, *, fails=False):
        self.fails = fails

    def model(self):
        return nn.Linear(1, 1)

    def data(self):
        x = torch.linspace(-1, 1, 64)[:, None]
        return TensorDataset(x, 3 * x + 1)

    eval_data = data

    def loss(self, model, batch):
        x, y = batch
        if self.fails and model.training:
            raise Trouble(7)
        return lockstep.Loss(((model(x) - y) ** 2).sum(), weight=len(x))
""",
    "one = lockstep.fit(Line())\none",
    "two = lockstep.fit(Line(), nproc=2)\ntwo",
    "try:\n    lockstep.fit(Line(fails=True), nproc=2)\nexcept Trouble as error:\n    print('caught', error.code)",
    "lockstep.fit(Line(fails=True), nproc=2)",
    "lockstep.fit(Line(fails=True))",
]


@pytest.mark.long
def test_a_notebook_in_a_real_kernel(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.setenv("JPY_SESSION_NAME", "some/where/My Birds.ipynb")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, allow_errors=True, resources=resources).execute()
    imports, one, two, caught, ranks, alone = (cell.outputs for cell in notebook.cells)
    assert imports == []

    # One output that was redrawn, and the result; the runs are named after the notebook.
    for outputs, world in ((one, "1 rank"), (two, "2 ranks")):
        (shown,) = [output for output in outputs if output.output_type == "display_data"]
        assert shown.data["text/plain"].startswith(f"my-birds-line  {world}  cpu")
        assert "step    40/40" in shown.data["text/plain"]
        assert "<polyline" in shown.data["text/html"]
        (result,) = [output for output in outputs if output.output_type == "execute_result"]
        assert "40 steps, loss" in result.data["text/plain"]
        assert "eval_loss  █" in result.data["text/plain"]
        assert "<polyline" in result.data["text/html"]

    assert [output.text for output in caught if output.get("name") == "stdout"] == ["caught 7\n"]
    for outputs in (ranks, alone):
        (error,) = [output for output in outputs if output.output_type == "error"]
        assert (error.ename, error.evalue) == ("Trouble", "7")
        plain = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
        assert re.search(r"in (Line\.)?loss\b", plain)
