"""The trading recipe: its agent, its rollouts on several ranks, and its smallest runs through commands."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_trader import SETTINGS, attached, tiny
from torch import nn

import lockstep
import preloaded
from lockstep.classic.clstm_ppo import gpu_optimizations, setup_check
from lockstep.classic.clstm_ppo.trainer import DistributedCLSTMPPOTrainer
from lockstep.classic.clstm_ppo.trainer import main as train_script
from lockstep.errors import ConfigError, UserError
from lockstep.recipes.clstm_ppo import ClstmPpo, counter_rng
from lockstep.recipes.clstm_ppo.game import CueRecall
from lockstep.recipes.clstm_ppo.model import Agent, AgentShape, read_daily
from lockstep.recipes.clstm_ppo.rollout import RunningStats, advantages, log_probs, stats_of
from lockstep.recipes.clstm_ppo.task import foresight_loss
from lockstep.task import SourceContext, Task
from ranks.support import Trace, assert_user_errors, fit, flat

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.usefixtures("zygotes")


def command(*words: str, folder: Path, **variables: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), **variables}
    done = preloaded.run_python(*words, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# ---- ranks ----------------------------------------------------------------------------------------------


def trained(pool: Any, world: int, options: dict[str, Any] | None = None, **values: Any) -> list[Trace]:
    return pool.run(fit, tiny(**options or {}), SETTINGS | {"lr.schedule": "constant"} | values, world=world)


@pytest.fixture(scope="module")
def one(pool) -> Trace:
    return trained(pool, 1)[0]


@pytest.fixture(scope="module")
def two(pool) -> list[Trace]:
    return trained(pool, 2)


def ids(traces: list[Trace]) -> list[list[int]]:
    """Return for every step the environments that all ranks together learnt from."""
    return [[env for trace in traces for env in trace.steps[step].ids] for step in range(len(traces[0].steps))]


def test_environments_on_two_ranks_are_those_of_one(one, two):
    assert ids(two) == ids([one])
    assert all(len(set(step)) == 8 for step in ids(two))
    for mine, reference in zip(two[0].steps, one.steps, strict=True):
        torch.testing.assert_close(flat(mine.weights), flat(reference.weights), rtol=0, atol=1e-6)


def test_parameters_are_the_same_bits_on_both_ranks_after_every_update(two):
    for left, right in zip(two[0].steps, two[1].steps, strict=True):
        assert torch.equal(flat(left.weights), flat(right.weights))
    assert not torch.equal(flat(two[0].initial), flat(two[0].steps[-1].weights))


def test_an_epoch_visits_every_environment_once(one):
    assert sorted(env for step in ids([one])[:2] for env in step) == list(range(16))
    assert ids([one])[:2] != ids([one])[2:4]  # another assignment


def test_it_resumes_with_another_number_of_ranks_in_the_middle_of_a_rollout(pool, one):
    """A rollout has 4 steps, and no change is at its end: days, hidden states and environments move between ranks."""
    run = {"run_dir": f"run-{uuid.uuid4().hex}", "resume": "auto"}
    parts = [trained(pool, world, steps=steps, **run) for world, steps in ((2, 10), (3, 17), (1, 24))]
    assert [step for part in parts for step in ids(part)] == ids([one])
    torch.testing.assert_close(flat(parts[-1][0].steps[-1].weights), flat(one.steps[-1].weights), rtol=0, atol=1e-5)


def test_the_ranks_stop_early_together_when_the_policy_has_moved(pool, one):
    """Every update is far enough for so small a limit: one epoch of 2 steps in place of 2."""
    alone, several = (trained(pool, world, {"target_kl": 1e-9}, steps=6) for world in (1, 2))
    updates = [[step.pieces[0].epoch for step in traces[0].steps] for traces in (alone, several)]
    assert updates[0] == updates[1] == [0, 0, 1, 1, 2, 2]
    assert [step.pieces[0].epoch for step in one.steps] == [step // 4 for step in range(24)]


def test_a_killed_run_ends_with_the_same_bits(tmp_path, two):
    faults = json.dumps([{"how": "kill", "rank": 1, "step": 14, "marks": str(tmp_path / "once")}])
    (tmp_path / "once").mkdir()
    words = ("-m", "lockstep.cli", "train", "clstm_ppo", "preset=tiny", "lr.schedule=constant", "checkpoint.every=3")
    output = command(*words, "run_dir=run", "--nproc", "2", folder=tmp_path, LOCKSTEP_FAULTS=faults)
    assert "resumed at step 12" in " ".join(output.split()) or "resumed at step 9" in " ".join(output.split())
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(flat(weights), flat(two[0].steps[-1].weights))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"score", "of_bayes"} <= summary["eval_metrics"].keys()
    assert "oracle" in output


class Queue(Task):
    """A model in two pipeline stages, and a source that calls the model itself."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def data(self) -> Any:
        return tiny().source


def test_a_pipeline_is_refused_since_no_rank_holds_the_model(pool):
    values = {"strategy": "pp", "global_batch": 8, "micro_batch": 2, "steps": 1}
    assert_user_errors(pool.errors(fit, Queue(), values, world=2), "Rollouts calls the model itself", "pipeline")


def test_ranks_whose_forwards_are_collective_need_equal_numbers_of_micro_batches():
    task = tiny()
    around = SourceContext(task.model(), torch.device("cpu"), 0, 8, 2, range(1), 3, True, lambda values: values)
    with pytest.raises(UserError, match="set global_batch=6 or a multiple"):
        task.source.attach(around)


# ---- rollouts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["clstm", "lstm_only", "mlp"])
def test_the_ratio_is_one_before_the_first_step(variant):
    """It is one in the second rollout too, which starts with a memory; and it is not if that memory is cleared."""
    task = tiny(variant=variant, cascade=2 if variant == "clstm" else 1)
    agent = task.model()
    torch.nn.init.normal_(agent.policy.weight)  # with opinions
    source = attached(task, agent)
    for _ in range(4):  # one rollout
        source.commit(source.take(), None)
    assert source.update == 1
    off, forgetful = [], []
    for micro in source.take():
        batch = micro.data
        days = {name: batch[name].transpose(0, 1) for name in ("windows", "starts", "actions", "logp")}
        for state, found in (
            ((batch["hidden"], batch["cell"]), off),
            (agent.initial_state(2, torch.device("cpu")), forgetful),
        ):
            logits, _, _ = agent(days["windows"], state, days["starts"])
            found.append(((log_probs(logits, days["actions"]).sum(-1) - days["logp"]).exp() - 1).abs().max().item())
    assert max(off) < 1e-5
    assert (max(forgetful) > 1e-3) == (variant != "mlp")


def test_advantages_of_a_minibatch_are_normalised_over_all_its_cohorts():
    task = tiny()
    source = attached(task, task.model())
    gained = torch.cat([micro.data["advantages"].flatten() for micro in source.take()])
    assert gained.mean().abs() < 1e-5
    assert abs(gained.std(correction=0) - 1) < 1e-5


def test_with_credit_for_each_asset_a_choice_learns_from_its_own_asset_only():
    task = tiny(assets=3, credit="each")
    agent = task.model()
    source = attached(task, agent)
    (micro, *_) = source.take()
    batch = micro.data
    assert batch["rewards"].shape == batch["advantages"].shape == batch["logp"].shape == batch["actions"].shape
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    batch["advantages"][..., 1] = 1.0
    task.loss_options = replace(task.loss_options, value_weight=0.0, entropy=0.0)
    task.loss(agent, batch).total.backward()
    gradient = agent.policy.weight.grad.unflatten(0, (3, -1)).abs().sum((1, 2))
    assert gradient[1] > 0
    assert gradient[0] == gradient[2] == 0


def test_with_one_asset_credit_for_each_is_credit_for_all():
    """Therefore task.credit=each is refused for a single asset."""
    found = []
    for each in (False, True):
        torch.manual_seed(0)
        task = tiny()
        task.shape = replace(task.shape, value_per_asset=each)
        agent = task.model()
        found.append([float(task.loss(agent, micro.data).total.detach()) for micro in attached(task, agent).take()])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_advantages_stop_at_the_end_of_an_episode():
    starts = torch.tensor([[False, False, True, False]])
    days = {"starts": starts, "over": torch.tensor([True])}
    rewards, values = torch.tensor([[1.0, 2.0, 4.0, 8.0]]), torch.tensor([[0.5, 0.5, 0.5, 0.5, 99.0]])
    found = advantages(rewards, values, days, discount=0.5, trace=0.25)
    last, before_last = 8 - 0.5, 4 + 0.5 * 0.5 - 0.5  # each day's own surprise
    second, first = 2 - 0.5, 1 + 0.5 * 0.5 - 0.5
    assert found.tolist() == [[first + 0.125 * second, second, before_last + 0.125 * last, last]]


def test_exploration_follows_the_environment_and_the_update_only():
    keys = torch.arange(6)
    drawn = counter_rng.uniform(0, counter_rng.EXPLORE, 3, keys)
    assert torch.equal(drawn[2:4], counter_rng.uniform(0, counter_rng.EXPLORE, 3, keys[2:4]))
    assert not torch.equal(drawn, counter_rng.uniform(0, counter_rng.EXPLORE, 4, keys))
    many = counter_rng.normal(0, counter_rng.RETURN, torch.arange(100_000))
    assert abs(many.mean()) < 0.02
    assert abs(many.std() - 1) < 0.02


def test_statistics_of_parts_are_those_of_the_whole():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).double() * 3 + 100
    merged = RunningStats().merged([stats_of(part).tolist() for part in values.split([1, 300, 699])])
    assert math.isclose(merged.mean, values.mean().item(), rel_tol=1e-12)
    assert math.isclose(merged.std, values.std(correction=0).item(), rel_tol=1e-12)
    assert RunningStats().std == 1.0


# ---- a game of memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["cue", pytest.param("cue-control", marks=pytest.mark.long)])
def test_memory_names_the_cue_and_the_control_guesses(tmp_path, preset):
    done = lockstep.fit(ClstmPpo, preset=preset, run_dir=str(tmp_path / preset), log={"progress": "off"})
    assert [goal["pass"] for goal in done.summary["goals"]] == [True], done.summary


def test_the_cue_is_shown_once_and_rewarded_at_the_end():
    game = CueRecall(days=4)
    worlds = game.open(0, torch.arange(64))
    shown, cue = [], worlds.cue()
    assert 16 < cue.sum() < 48
    for day in range(4):
        shown.append(worlds.windows()[:, 0])
        earned, ended = worlds.step(torch.where(torch.arange(64) < 32, cue, 1 - cue)[:, None])
        assert ended.all() == (day == 3)
        assert earned.tolist() == [float(day == 3)] * 32 + [0.0] * 32
    assert (shown[0][:, 0] == 2 * cue - 1).all()
    assert not torch.stack(shown)[1:, :, 0].any()
    assert torch.stack(shown)[:, :, 1].mean(dim=1).tolist() == [0, 0, 0, 1]
    assert not torch.equal(worlds.cue(), cue)  # another episode


# ---- the agent ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("episode", "days"), [(5, 12), (252, 7), (3, 4)])
def test_days_at_once_are_the_days_one_by_one(episode, days):
    """Outputs and gradients agree, with as many new episodes on the way as there can be."""
    torch.manual_seed(0)
    agent = Agent(
        AgentShape(features=3, window=2, assets=1, choices=3, episode=episode, hidden=4, width=6, memory=7)
    ).double()
    begun = torch.arange(9) % episode
    starts = torch.stack([(begun + day) % episode == 0 for day in range(days)])
    seen = torch.randn(days, 9, 6, dtype=torch.float64, requires_grad=True)
    state = torch.randn(2, 9, 7, dtype=torch.float64).unbind(0)
    found = []
    for way in (agent.recall_daily, agent.recall_at_once):
        out, _ = way(seen, state, starts)
        found.append([out, *torch.autograd.grad(out.square().sum(), [seen, *agent.recall.parameters()])])
    for one_by_one, at_once in zip(*found, strict=True):
        torch.testing.assert_close(at_once, one_by_one, rtol=0, atol=1e-12)


def test_windows_day_by_day_are_the_windows_at_once():
    lstm, windows = nn.LSTM(3, 5, batch_first=True), torch.randn(7, 6, 3)
    torch.testing.assert_close(torch.stack(read_daily(lstm, windows), dim=1), lstm(windows)[0])


def test_foresight_teaches_the_first_stage_before_ppo_begins(pool):
    """In the first two updates the policy does not change; then PPO takes over."""
    trace = trained(pool, 2, {"foresight": 2, "target_kl": 1e-9}, steps=12)[0]
    weights = [trace.initial, *(step.weights for step in trace.steps)]
    policy = [step["policy.weight"] for step in weights]
    assert all(torch.equal(policy[0], later) for later in policy[:9])
    assert not torch.equal(policy[0], policy[9])
    assert not torch.equal(weights[0]["foresee.weight"], weights[8]["foresee.weight"])
    moved = torch.tensor([[1.0, -2.0]])
    good, bad = torch.tensor([[[9.0, 1.0], [-9.0, 2.0]]]), torch.tensor([[[-9.0, 1.0], [9.0, 2.0]]])
    assert foresight_loss(good, moved) < 0.01 < 10 < foresight_loss(bad, moved)


# ---- options, and the script ----------------------------------------------------------------------------


def test_wrong_options_are_named_together():
    with pytest.raises(ConfigError) as error:
        ClstmPpo(epochs=0, hidden=30, cascade=3)
    assert {problem.problem for problem in error.value.problems} == {
        "task.epochs=0 is less than 1",
        "task.hidden=30 is not a multiple of 4",
    }


def test_another_number_of_environments_is_not_the_same_run():
    task, other = tiny(), tiny(minibatches=4)
    state = attached(task, task.model()).state_dict()
    with pytest.raises(UserError, match=r"environments of .*minibatches=2 .* this run has .*minibatches=4"):
        attached(other, other.model()).load_state_dict(state)


def test_the_script_and_its_trainer(tmp_path, monkeypatch, capsys):
    script = str(ROOT / "systems" / "clstm_ppo" / "train_distributed_clstm_ppo.py")
    words = ("--num_gpus", "2", "--num_episodes", "26", "--batch_size", "8", "--preset", "tiny", "--run_dir", "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(script, run_name="__main__")
    assert "score per test episode: " in capsys.readouterr().out
    trainer = DistributedCLSTMPPOTrainer(1, 13, 8, preset="tiny", run_dir="alone", log={"progress": "off"})
    trainer.initialize()
    before = trainer._run_episode()
    found = trainer.train()
    # 13 episodes of 30 days; an update is 12 days of 16 environments: 3 updates of 4 steps. On two ranks twice of all.
    assert found["step"] == 12
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == 12
    assert found["last_interval"]["step"] == 12
    assert set(before) == {*trainer._run_episode()} == {*found["eval_metrics"]} - {"of_bayes"}
    saved = load_file(trainer._save_checkpoint(tmp_path / "agent.safetensors"))
    assert torch.equal(flat(saved), flat(load_file(tmp_path / "alone" / "model.safetensors")))

    assert train_script(words) == 2  # before any process is started
    output = capsys.readouterr().err
    assert output.count("already holds a run") == output.count("add --resume auto") == 1
    alone = ["--num_gpus", "1", "--num_episodes", "13", *words[4:8], "--run_dir", "alone"]
    assert train_script([*alone, "--resume", "auto"]) == 0
    assert "resumed        at step 12" in capsys.readouterr().out
    monkeypatch.setattr(DistributedCLSTMPPOTrainer, "train", lambda self: found)
    for rank in "01":  # under torchrun one rank prints the score
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert train_script(alone) == 0
    assert capsys.readouterr().out.count("score per test episode") == 1


def test_a_short_run_of_the_script_also_comes_to_ppo_and_to_full_costs():
    """5000 episodes in 512 environments are 39 updates: fewer than the preset's whole beginning takes."""
    preset = ClstmPpo.presets["gpu"]
    trainer = DistributedCLSTMPPOTrainer(1, 5000, 128, preset="gpu")
    trainer.initialize()
    options = trainer.task.source.options
    assert trainer.values["steps"] == 39 * 16
    assert preset["task"]["cost_warmup"] > 39
    for name in ("foresight", "cost_warmup"):
        wanted = preset["task"][name] * 39 * 16 / preset["steps"]
        assert wanted <= getattr(options, name) < wanted + 1


def test_the_script_takes_a_precision_and_fp16_on_a_cpu_is_answered_in_words(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--num_gpus", "1", "--num_episodes", "13", "--batch_size", "8", "--preset", "tiny", "--run_dir", "run"]
    assert train_script([*words, "--precision", "fp16"]) == 2
    assert "torch has no fp16 LSTM" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
    assert train_script([*words, "--precision", "bf16"]) == 0
    assert "1 rank  cpu  bf16" in capsys.readouterr().out

    # The recipe says the same, however it is started. The control has no LSTM, and its loss is scaled.
    with pytest.raises(UserError, match="torch has no fp16 LSTM"):
        lockstep.fit(tiny(), SETTINGS | {"precision": "fp16", "run_dir": str(tmp_path / "lstm"), "steps": 2})
    half = {"precision": "fp16", "run_dir": str(tmp_path / "mlp"), "steps": 2, "checkpoint.every": 2}
    lockstep.fit(tiny(variant="mlp"), SETTINGS | half)
    assert "scale" in (tmp_path / "mlp" / "metrics.jsonl").read_text()

    # On a GPU the script hands fp16 on.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    trainer = DistributedCLSTMPPOTrainer(1, 13, 8, preset="tiny", precision="fp16")
    trainer.initialize()
    assert trainer.values["precision"] == "fp16"


def test_processes_are_never_made_up(monkeypatch):
    with pytest.raises(UserError, match="--num_gpus 0"):
        gpu_optimizations.processes(0)
    with pytest.raises(UserError, match="--batch_size 12"):
        DistributedCLSTMPPOTrainer(1, 10, 9)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert gpu_optimizations.processes(-1) == 4  # torchrun's: all of them share the number of episodes


def test_time_and_cost_are_those_of_the_document_and_measurements_are_marked():
    price = gpu_optimizations.price_per_hour("NVIDIA H100 80GB HBM3")
    words = [line.split() for line in gpu_optimizations.speedup_table(10.2 / 60, price)[1:]]
    assert [(row[0], row[1], row[2], row[3], row[5]) for row in words] == [
        ("1", "1.0x", "100%", "10.2", "$0.17"),
        ("2", "1.9x", "95%", "5.4", "$0.18"),
        ("4", "3.6x", "90%", "2.8", "$0.19"),
        ("8", "6.8x", "85%", "1.5", "$0.20"),
    ]
    assert {row[-1] for row in words} == {"estimate"}
    rows = {line.split()[0]: line for line in gpu_optimizations.speedup_table(1.0, None, {1: 100.0, 2: 150.0})[1:]}
    assert "75%" in rows["2"]
    assert [rows[gpus].split()[-1] for gpus in "1248"] == ["measured", "measured", "estimate", "estimate"]
    assert gpu_optimizations.price_per_hour("Some GPU") is None


def test_the_setup_is_checked_by_a_real_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert setup_check.main(["--preset", "tiny", "--num_episodes", "10", "--batch_size", "16"]) == 0
    output = capsys.readouterr().out
    for name in ("CUDA", "NCCL", "GPU memory", "model memory", "distributed training", "training time"):
        assert f"] {name}: " in output
    assert "two processes trained 4 steps together" in output
    assert re.search(r"[\d,]+ environment steps/s measured here: 10 episodes take", output)

    # What it estimates is what the script trains, and the script is what it recommends.
    assert "preset tiny with 16 environments a step" in output
    words = "--num_episodes 10 --batch_size 16 --preset tiny"
    assert re.search(rf"python train_distributed_clstm_ppo\.py --num_gpus \d+ {words}", output)
    assert not any(tmp_path.iterdir())


def test_a_model_that_does_not_fit_is_reported_with_a_batch_size_that_does(monkeypatch):
    monkeypatch.setattr(setup_check, "get_gpu_info", lambda: [{"free_gb": 8.0}])

    def memory(batch_size: int) -> setup_check.SetupFinding:
        trainer = DistributedCLSTMPPOTrainer(1, 10, batch_size, preset="gpu")
        trainer.initialize()
        return setup_check.model_memory(trainer)

    assert memory(16).state == "ok"
    found = memory(2**16)
    assert found.state == "fail"
    assert memory(int(found.advice.split()[2].rstrip(","))).state == "ok"


def test_training_is_launched_without_touching_the_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MASTER_PORT", "12355")
    done = gpu_optimizations.launch_distributed_training(
        tiny(), 1, config=SETTINGS | {"steps": 4, "run_dir": str(tmp_path / "run")}
    )
    assert done.summary["step"] == 4
    assert os.environ["MASTER_PORT"] == "12355"
    gpu_optimizations.print_gpu_info()
    gpu_optimizations.print_training_speedup_estimates(1.0)
    assert "8      6.8x" in capsys.readouterr().out


def test_no_policy_can_reach_the_goal_and_pass_for_the_control():
    goals = [ClstmPpo.presets[name]["goals"][0].split() for name in ("cpu", "cpu-control")]
    assert [words[:2] for words in goals] == [["score", ">="], ["score", "<="]]
    assert float(goals[0][2]) > float(goals[1][2])
