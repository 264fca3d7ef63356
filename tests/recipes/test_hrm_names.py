"""HRM by the names of its document: the same engine behind them, and what their originals got wrong."""

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import lockstep
import preloaded
from evaluate import evaluate_checkpoint
from evaluate import main as evaluate_main
from lockstep.errors import UserError
from lockstep.recipes.hrm import HRM
from lockstep.recipes.hrm.arguments import overrides
from lockstep.recipes.hrm.build import Build, build
from lockstep.recipes.hrm.model import SparseEmbedding
from lockstep.recipes.hrm.optimizers import CastedSparseEmbeddingSignSGD_Distributed
from lockstep.runtime.context import join
from ports import free_port
from pretrain import (
    PuzzleDataset,
    PuzzleDatasetConfig,
    compute_metrics,
    evaluate,
    init_train_state,
    load_synced_config,
    process_aggregated_metrics,
    save_train_state,
    train_batch,
)
from pretrain import main as pretrain_main

ROOT = Path(__file__).parent.parent.parent

WORDS = (
    "epochs=3 eval_interval=1 global_batch_size=24 lr=5e-3 weight_decay=0.1 lr_warmup_steps=2 seed=3 micro_batch=6 "
    "task.width=32 task.heads=2 task.layers=1 task.halt_max_steps=2 "
    "log.progress=off device=cpu precision=fp32 threads=1"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("names")
    build(Build(out=str(found / "data"), puzzle="sudoku4", holes=6, train_size=60, test_size=21, augmentations=2))
    return found


def config_of(folder, name, **more):
    values = overrides(WORDS.split()) | {"data_path": str(folder / "data"), "checkpoint_path": str(folder / name)}
    return load_synced_config(values | more, rank=0, world_size=1)


# ---- step by step -------------------------------------------------------------------------------------------


def step_by_step(world, store, folder):
    """A job: the loop of the document."""
    rank, size = world.rank, world.size
    env = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    config = config_of(folder, f"loop-{size}")
    with mock.patch.dict(os.environ, env):
        join(world, torch.device("cpu"), store)
        with init_train_state(config) as state:
            losses = [train_batch(config, state, batch, rank, size) for batch in state.batches]
            found = evaluate(state, state.task.eval_data(), rank, size)
            path = save_train_state(config, state)
    return losses, found, path


def test_the_loop_of_the_document_gives_the_bits_of_fit(pool, folder):
    done = lockstep.fit(HRM, config_of(folder, "fit").settings())
    expected = load_file(done.run_dir / "model.safetensors")
    for size in (1, 2):
        ranks = pool.run(step_by_step, folder, world=size)
        losses, found, path = ranks[0]
        saved = load_file(path)
        assert path.name == "checkpoint_step_7.safetensors"  # 3 epochs of 60 groups in batches of 24
        for name, tensor in expected.items():
            assert torch.allclose(saved[name], tensor, atol=1e-5, rtol=1e-4), name
            assert size == 2 or torch.equal(saved[name], tensor), name
        assert losses[-1]["loss"] < losses[0]["loss"]
        assert found["exact"] == pytest.approx(done.summary["eval_metrics"]["exact"], abs=0.05)
        assert {"cell", "exact", "q_halt", "loss"} <= losses[0].keys() & found.keys()
        if size == 1:
            alone = losses
        else:
            assert ranks[1][0] == [None] * 7  # only rank 0 gets metrics
            assert ranks[1][1] is None
            assert [line["loss"] for line in losses] == pytest.approx([line["loss"] for line in alone], rel=1e-4)


def test_a_resumed_loop_continues_its_step_count(folder):
    """The rate of the average follows from the step: counted from 0 again, it would forget what it has."""

    def looped(name, until):
        config = config_of(folder, name, **{"task.ema": 0.999, "resume": "auto"})
        with init_train_state(config) as state:
            for batch in state.batches:
                train_batch(config, state, batch, 0, 1)
                if state.step == until:
                    break
        assert state.step == until
        return state.task.average.weights

    looped("in-parts", 4)
    parts, whole = looped("in-parts", 7), looped("whole", 7)
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())


def test_metrics_are_sums_until_the_end():
    """A mean of the means of unequal parts would be another number."""
    labels = torch.tensor([[1, 2, 0], [1, 1, 0], [2, 2, 2], [1, 2, 1]])
    predictions = torch.tensor([[1, 2, 9], [1, 2, 9], [2, 2, 2], [1, 1, 1]])
    parts = [compute_metrics(predictions[some], labels[some]) for some in (slice(0, 1), slice(1, 4))]
    added = {name: (parts[0][name][0] + parts[1][name][0], parts[0][name][1] + parts[1][name][1]) for name in parts[0]}
    found = process_aggregated_metrics(added)
    assert found == process_aggregated_metrics(compute_metrics(predictions, labels))
    assert found == {"cell": 8 / 10, "exact": 2 / 4}


# ---- the stream of batches ----------------------------------------------------------------------------------


def passes(folder, split, rank, replicas, batch=12, count=1):
    config = PuzzleDatasetConfig(str(folder / "data"), batch, rank=rank, num_replicas=replicas, seed=5)
    data = PuzzleDataset(config, split)
    return [[[tuple(row.tolist()) for row in piece["inputs"]] for piece in data] for _ in range(count)]


def test_ranks_agree_on_a_global_batch_and_slice_it(folder):
    alone = passes(folder, "train", 0, 1, count=2)
    random.seed(99)  # whatever the process has drawn before
    thirds = [passes(folder, "train", rank, 3, count=2) for rank in range(3)]
    for epoch in range(2):
        for number, batch in enumerate(alone[epoch]):
            assert batch == [row for third in thirds for row in third[epoch][number]]
            assert len(thirds[1][epoch][number]) == 4
    assert len(alone[0]) == 5
    assert alone[0] != alone[1]  # another order, and other examples of the groups
    assert passes(folder, "train", 0, 1) == alone[:1]


def test_loader_processes_share_the_batches_and_the_loops_own_draws_stay(folder):
    data = PuzzleDataset(PuzzleDatasetConfig(str(folder / "data"), 12, seed=5), "train")
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    read = [[[tuple(row.tolist()) for row in piece["inputs"]] for piece in loader] for _ in range(2)]
    random.seed(1)
    assert read == passes(folder, "train", 0, 1, count=2)
    drawn = random.random()
    assert drawn == random.Random(1).random()


def test_every_test_puzzle_is_read_once(folder):
    """21 in batches of 12: the last one is short, and some rank has nothing of it."""
    [[first, last]] = passes(folder, "test", 0, 1)
    assert (len(first), len(last)) == (12, 9)
    ranks = [passes(folder, "test", rank, 4)[0] for rank in range(4)]
    assert sorted(row for rank in ranks for piece in rank for row in piece) == sorted(first + last)
    assert [sum(map(len, rank)) for rank in ranks] == [6, 6, 6, 3]
    with pytest.raises(UserError, match="global_batch_size=15"):
        PuzzleDatasetConfig(str(folder / "data"), 12, num_replicas=5)


def test_rows_of_any_number_can_be_looked_up_and_updated():
    """Nothing is laid out for one local batch: a rank may have another in every step."""
    embedding = SparseEmbedding(6, 3)
    optimizer = CastedSparseEmbeddingSignSGD_Distributed(embedding.buffers(), lr=0.5, weight_decay=0.0, world_size=1)
    for ids in ([1, 2, 3, 4], [5], [2, 5, 5]):
        rows = embedding(torch.tensor(ids))
        rows.backward(torch.ones(len(ids), 3))
        optimizer.note(0, torch.tensor(ids), rows)
        assert optimizer.get_active_indices().tolist() == sorted(set(ids))
        optimizer.step()
        optimizer.forget()
    assert embedding.table[:, 0].tolist() == [0.0, -0.5, -1.0, -0.5, -0.5, -1.0]


def test_what_travels_is_the_rows_of_a_step(monkeypatch):
    """Three rows of a table of 20,000: slots, ids and gradients of these, whatever the size of the table."""
    sent = []

    def gather(tensors, size):
        sent.append([tuple(tensor.shape) for tensor in tensors])
        return [torch.cat([tensor] * size) for tensor in tensors]

    monkeypatch.setattr("lockstep.recipes.hrm.optimizers.gather_rows", gather)
    embedding = SparseEmbedding(20_000, 3)
    optimizer = CastedSparseEmbeddingSignSGD_Distributed(embedding.buffers(), lr=0.5, weight_decay=0.0, world_size=2)
    ids = torch.tensor([7, 19_999, 7])
    rows = embedding(ids)
    rows.backward(torch.ones(3, 3))
    optimizer.note(0, ids, rows)
    optimizer.step()
    assert sent == [[(3,), (3,), (3, 3)]]
    assert embedding.table.nonzero()[:, 0].unique().tolist() == [7, 19_999]


# ---- the commands -------------------------------------------------------------------------------------------


def test_a_run_is_evaluated_again_from_what_it_left(folder, monkeypatch, capsys):
    """The run folder has the code of the model and checkpoints; answers are written if save_outputs is set."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DISABLE_COMPILE", "1")
    seen = []
    real = lockstep.fit
    monkeypatch.setattr(lockstep, "fit", lambda task, values, **more: seen.append(values) or real(task, values, **more))
    words = [*WORDS.split(), "data_path=data", "project_name=puzzles", "run_name=first"]
    pretrain_main([*words, "use_distributed_checkpoint=true", "evaluate.at_end=false"])
    assert seen[0]["compile"] is False
    run = Path("runs/puzzles/first")
    assert {path.name for path in (run / "checkpoints").iterdir()} >= {"step-00000004", "step-00000006"}
    assert "class HierarchicalReasoningModel" in (run / "source" / "model.py").read_text()
    (run / "checkpoints" / "step-00000009.tmp-abc-0").mkdir()  # a writer was killed
    capsys.readouterr()

    evaluate_main([f"checkpoint={run}", "task.eval_steps=4"])
    assert "exact_2" in capsys.readouterr().out  # more segments than it was trained with
    middle = evaluate_checkpoint(run / "checkpoints" / "step-00000004", save_outputs=True, run_dir="middle")
    answers = load_file("middle/answers-rank-0.safetensors")
    assert (middle.summary["step"], len(answers["labels"])) == (4, 21)
    sums = compute_metrics(answers["predictions"], answers["labels"])
    assert process_aggregated_metrics(sums)["cell"] == pytest.approx(middle.summary["eval_metrics"]["cell"])
    Path("begun").mkdir()
    Path("begun/config.yaml").write_text("{}")
    for words_of, said in (
        (["checkpoint=nowhere"], "found: no such folder"),
        (["checkpoint=begun"], "found: begun has no folder checkpoints\n  do:    set checkpoint=RUN or "),
        ([f"checkpoint={run}", "save_output=true"], "set save_outputs=true"),
    ):
        with pytest.raises(SystemExit):
            evaluate_main(words_of)
        assert said in capsys.readouterr().err
    events = run / "events.jsonl"
    events.write_text(events.read_text().replace('"task": "hrm"', '"task": "pixel_llm"'))
    with pytest.raises(SystemExit):
        evaluate_main([f"checkpoint={run}"])
    assert "is a run of pixel_llm" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        pretrain_main(words)
    assert "add resume=auto to resume it; or set another run_name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "advice"),
    [("resume=auto", "add run_name=NAME"), ("lrr=1", "set lr=1"), ("eval_intervall=3", "set eval_interval=3")],
)
def test_errors_use_the_keys_of_the_script(folder, monkeypatch, capsys, word, advice):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as left:
        pretrain_main([*WORDS.split(), "data_path=data", word])
    assert left.value.code == 2
    assert f"do:    {advice}" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "key"), [(pretrain_main, "lr_warmup_steps"), (evaluate_main, "save_outputs")])
def test_help_has_all_keys(command, key, capsys):
    command(["--help"])
    assert {key, "task.variant"} <= set(capsys.readouterr().out.split())


def test_arguments_override_a_file_of_settings(folder):
    path = folder / "pretrain.yaml"
    path.write_text("lr: 0.002\nepochs: 7\ntask: {width: 64, heads: 4}\nlog.every: 3\n")
    found = overrides(["lr=0.5", f"config={path}", "task.heads=2"])
    assert found == {"lr": 0.5, "epochs": 7, "task.width": 64, "task.heads": 2, "log.every": 3}
    for text in ("- 1\n", "a: [\n"):
        path.write_text(text)
        with pytest.raises(UserError, match="a YAML file"):
            overrides([f"config={path}"])


def test_pretrain_learns_on_two_machines_under_torchrun(folder):
    """As the document starts them: each has its number, and knows the address of the first."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    words = ["data_path=data", *WORDS.replace("epochs=3", "epochs=12").replace("micro_batch=6", "log.every=10").split()]
    words.append("eval_interval=12")  # the later word counts
    torchrun = [*preloaded.TORCHRUN, "--nproc-per-node=1", "--nnodes=2"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    command = [str(ROOT / "systems" / "hrm" / "pretrain.py"), *words, "run_name=nodes"]
    with ThreadPoolExecutor(2) as nodes:
        starts = ((*torchrun, f"--node-rank={rank}", *command) for rank in range(2))
        done = list(nodes.map(lambda words: preloaded.run_python(*words, cwd=folder, env=env), starts))
    assert [node.returncode for node in done] == [0, 0], done
    run = folder / "runs" / "nodes"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 30]  # 12 epochs of 60 groups in batches of 24
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert json.loads((run / "summary.json").read_text())["world"] == 2
