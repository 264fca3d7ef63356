"""Options that count only with others: refused where somebody has given them, left out where a preset has."""

import re
from typing import Any

import pytest

from lockstep.config import resolve_for
from lockstep.errors import ConfigError, UserError
from lockstep.recipes.char_lm import TASK as CHAR_LM
from lockstep.recipes.clstm_ppo import TASK as CLSTM_PPO
from lockstep.recipes.hrm import TASK as HRM
from lockstep.recipes.hrm.build import Build, build
from lockstep.recipes.latent_wire import TASK as LATENT_WIRE
from lockstep.recipes.pixel_llm import TASK as PIXEL_LLM
from lockstep.targets import make_task, settled
from lockstep.task import Task

ALL = (CHAR_LM, LATENT_WIRE, CLSTM_PPO, PIXEL_LLM, HRM)
# The task, what makes options idle, and these.
IDLE: list[tuple[type[Task], dict[str, Any], dict[str, Any]]] = [
    (
        LATENT_WIRE,
        {"world": "topics"},
        {"facts": 4, "questions": 3, "reader_questions": 3, "reader_curriculum": True},
    ),
    (LATENT_WIRE, {"facts": 1}, {"reader_curriculum": True}),
    (
        CLSTM_PPO,
        {"game": "cue"},
        {
            "prices": "any.csv", "assets": 2, "correlation": 0.5, "lots": 2, "window": 5, "days": 30, "cost": 0.1,
            "cost_warmup": 3, "indicators": True, "halt": 0.9, "foresight": 2, "credit": "each",
        },
    ),
    (CLSTM_PPO, {"prices": "PRICES"}, {"assets": 2, "correlation": 0.5}),
    (CLSTM_PPO, {"assets": 1}, {"correlation": 0.5}),
    (CLSTM_PPO, {"cost": 0.0}, {"cost_warmup": 3}),
    (CLSTM_PPO, {"variant": "lstm_only"}, {"hidden": 8, "cascade": 2, "linears": 2}),
    (CLSTM_PPO, {"variant": "mlp"}, {"hidden": 8, "cascade": 2, "linears": 2, "width": 8, "remember": 1.0}),
    (
        PIXEL_LLM,
        {"folder": "PICTURES"},
        {"scenes": "few", "train_size": 9, "eval_size": 9, "data_seed": 1, "unrelated_captions": True},
    ),
    (PIXEL_LLM, {"stem": "conv"}, {"patch": 16}),
    (
        HRM,
        {"data_path": "PUZZLES"},
        {
            "puzzle": "maze", "train_size": 9, "test_size": 9, "data_seed": 1, "holes": 5, "least_guesses": 1.0,
            "maze_size": 9, "maze_longer_than": 9, "rules": 3, "rule_moves": True, "augment": False,
        },
    ),
    (HRM, {"puzzle": "sudoku4"}, {"maze_size": 9, "maze_longer_than": 9, "rules": 3, "rule_moves": True}),
    (HRM, {"puzzle": "maze"}, {"holes": 5, "least_guesses": 1.0, "rules": 3, "rule_moves": True}),
    (HRM, {"puzzle": "idgrid"}, {"holes": 5, "least_guesses": 1.0, "maze_size": 9, "augment": False}),
    (HRM, {"puzzle": "sudoku9"}, {"data_seed": 1}),
    (HRM, {"mixer": "mlp"}, {"heads": 4}),
    (HRM, {"halt_max_steps": 1}, {"halt_exploration": 0.5}),
    (HRM, {"puzzle_emb_frozen": True}, {"puzzle_emb_lr": 0.5, "puzzle_emb_weight_decay": 0.5}),
]  # fmt: skip


def made(task: type[Task], typed: dict[str, Any], preset: str | None = None) -> Task:
    """As the command does."""
    layers = [("command line", {"preset": preset, **{f"task.{name}": value for name, value in typed.items()}})]
    resolved = settled(task, resolve_for(task.defaults, task.presets, layers))
    return make_task(task, resolved.config.task)


def with_files(switch: dict[str, Any], tmp_path) -> dict[str, Any]:
    (tmp_path / "PRICES").write_text("date,symbol,close\n2020-01-01,a,1.0\n2020-01-02,a,1.1\n")
    (tmp_path / "PICTURES").mkdir()
    return {name: str(tmp_path / value) if str(value).isupper() else value for name, value in switch.items()}


@pytest.mark.parametrize(
    ("task", "switch", "options"), IDLE, ids=[f"{task.__name__}-{'-'.join(map(str, s))}" for task, s, _ in IDLE]
)
def test_an_option_that_nobody_would_read_is_refused(task, switch, options, tmp_path):
    switch = with_files(switch, tmp_path)
    with pytest.raises(ConfigError) as refused:
        made(task, switch | options)
    (name,) = switch
    named = [re.match(r"task\.(\w+)=.* with task\.\w+=", problem.asked) for problem in refused.value.problems]
    assert {match[1] for match in named if match} == options.keys()
    assert any(f"with task.{name}=" in problem.asked for problem in refused.value.problems)
    with pytest.raises(ConfigError):
        task(**switch | options)  # in Python too


def test_every_rule_has_a_row():
    ruled = {(task, name) for task in ALL for rule in task.option_rules for name in rule.options}
    assert ruled <= {(task, name) for task, _, options in IDLE for name in options}


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.__name__)
def test_no_preset_has_an_option_that_nobody_would_read(task):
    for preset in task.presets.values():
        task(**preset.get("task", {}))


def test_what_a_preset_has_set_for_another_game_is_left_out():
    """Nobody has asked for it; and what a run writes down is what it did."""
    task = CLSTM_PPO
    assert made(task, {"variant": "mlp"}, "gpu").shape.hidden == 32  # as nothing was said: it does not matter
    layers = [("command line", {"preset": "gpu", "task.game": "cue"})]
    resolved = settled(task, resolve_for(task.defaults, task.presets, layers))
    assert resolved.config.task.keys() == {"game", "hidden", "width", "linears", "memory", "rollout", "entropy"}
    assert not any(key in resolved.sources for key in ("task.assets", "task.foresight"))
    with pytest.raises(ConfigError, match=r"task.assets=8 with task.game=cue"):
        made(task, {"game": "cue", "assets": 8}, "gpu")  # the same number, but typed


def test_credit_for_each_of_one_asset_is_refused():
    with pytest.raises(ConfigError, match="one asset"):
        CLSTM_PPO(credit="each")
    CLSTM_PPO(credit="each", assets=2)


def test_a_vocabulary_is_not_enlarged_silently():
    with pytest.raises(UserError, match=r"task.vocabulary=2\n.*words to write"):
        PIXEL_LLM(vocabulary=2)


def test_a_build_refuses_alike():
    with pytest.raises(ConfigError, match="maze_size=9 with puzzle=sudoku9"):
        build(Build(out="nowhere", maze_size=9))
    with pytest.raises(ConfigError, match=r"holes=9 with train_csv=a\.csv"):
        build(Build(out="nowhere", holes=9, train_csv="a.csv", test_csv="b.csv"))
