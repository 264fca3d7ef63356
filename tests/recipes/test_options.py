"""Options of recipes that have no effect beside others: a warning names them."""

import re
import warnings
from contextlib import suppress
from typing import Any

import pytest

from lockstep import api
from lockstep.config import resolve_for
from lockstep.errors import ConfigError, UserError
from lockstep.recipes.char_lm import TASK as CHAR_LM
from lockstep.recipes.clstm_ppo import TASK as CLSTM_PPO
from lockstep.recipes.hrm import TASK as HRM
from lockstep.recipes.hrm.build import Build, build
from lockstep.recipes.latent_wire import TASK as LATENT_WIRE
from lockstep.recipes.pixel_llm import TASK as PIXEL_LLM
from lockstep.targets import make_task
from lockstep.task import Task

ALL = (CHAR_LM, LATENT_WIRE, CLSTM_PPO, PIXEL_LLM, HRM)
RULED = (LATENT_WIRE, CLSTM_PPO, PIXEL_LLM, HRM)
# The task, the setting that leaves options without effect, and these options.
UNUSED: list[tuple[type[Task], dict[str, Any], dict[str, Any]]] = [
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
    (HRM, {"mixer": "mlp"}, {"heads": 4}),
    (HRM, {"halt_max_steps": 1}, {"halt_exploration": 0.5}),
    (HRM, {"puzzle_emb_frozen": True}, {"puzzle_emb_lr": 0.5, "puzzle_emb_weight_decay": 0.5}),
]  # fmt: skip


def made(task: type[Task], typed: dict[str, Any], preset: str | None = None) -> Task:
    """Make a task as the command does."""
    layers = [("command line", {"preset": preset, **{f"task.{name}": value for name, value in typed.items()}})]
    return make_task(task, resolve_for(task.defaults, task.presets, layers).config.task)


def with_files(switch: dict[str, Any], tmp_path) -> dict[str, Any]:
    (tmp_path / "PRICES").write_text("date,symbol,close\n" + "".join(f"2020-01-{d:02},a,1.{d}\n" for d in range(1, 32)))
    (tmp_path / "PICTURES").mkdir()
    (tmp_path / "PICTURES" / "a.png").touch()
    (tmp_path / "PICTURES" / "a.txt").write_text("a word")
    return {name: str(tmp_path / value) if str(value).isupper() else value for name, value in switch.items()}


def warned_about(caught: list[warnings.WarningMessage]) -> set[str]:
    ours = [str(warning.message) for warning in caught if ": no effect with " in str(warning.message)]
    return {name for text in ours for name in re.findall(r"(?:task\.)?(\w+)=", text.partition(": no effect")[0])}


@pytest.mark.parametrize(
    ("task", "switch", "options"), UNUSED, ids=[f"{task.__name__}-{'-'.join(map(str, s))}" for task, s, _ in UNUSED]
)
def test_an_option_without_effect_is_warned_about(task, switch, options, tmp_path):
    switch = with_files(switch, tmp_path)
    (name,) = switch
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(ConfigError):  # the files of this test hold too little to train on
            made(task, switch | options)
    assert options.keys() <= warned_about(caught)
    assert any(f"no effect with task.{name}=" in str(warning.message) for warning in caught)


def test_every_rule_has_a_row():
    ruled = {(task, name) for task in RULED for rule in task.option_rules for name in rule.options}
    assert ruled <= {(task, name) for task, _, options in UNUSED for name in options}


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.__name__)
def test_no_preset_has_an_option_without_effect(task):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for preset in task.presets.values():
            task(**preset.get("task", {}))


def test_options_of_a_preset_for_another_game_have_no_effect():
    """They are warned about, and the model is that of the defaults."""
    with pytest.warns(UserWarning, match=r"task.assets=8.*task.foresight=24.*: no effect with task.game=cue"):
        found = made(CLSTM_PPO, {"game": "cue"}, "gpu")
    gpu = CLSTM_PPO.presets["gpu"]["task"]
    plain = {name: gpu[name] for name in ("hidden", "width", "linears", "memory", "rollout", "entropy") if name in gpu}
    assert found.shape == CLSTM_PPO(game="cue", **plain).shape
    assert found.source.options == CLSTM_PPO(game="cue", **plain).source.options


def test_topics_have_no_questions_to_school_readers_with():
    with pytest.warns(UserWarning, match="no effect with task.world=topics"):
        found = LATENT_WIRE(world="topics", reader_questions=3, reader_curriculum=True)
    plain = LATENT_WIRE(world="topics")
    assert (found.reader_questions, found.reader_training) == (plain.reader_questions, plain.reader_training)


def test_credit_for_each_of_one_asset_is_refused():
    with pytest.raises(ConfigError, match="one asset"):
        CLSTM_PPO(credit="each")
    CLSTM_PPO(credit="each", assets=2)


def test_a_subclass_may_pass_its_options_on():
    class Mazes(HRM):
        def __init__(self, **options: Any):
            super().__init__(puzzle="maze", **options)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Mazes(maze_size=7)
    with pytest.warns(UserWarning, match="task.holes=5: no effect with task.puzzle=maze"):
        Mazes(holes=5)


def test_an_object_with_a_constructor_of_its_own_reaches_the_ranks(monkeypatch):
    class Narrow(HRM):
        def __init__(self, *, width: int = 32):
            super().__init__(width=width)

    seen = []
    monkeypatch.setattr(
        api, "_fit_here", lambda task, resolved, *_: seen.append((task.model_options.width, resolved.config.task))
    )
    for task, options in ((Narrow(), {}), (HRM(width=64, heads=2), {"width": 64, "heads": 2})):
        with api._pickled(task, options, callbacks=()) as path:
            api.work({"task": path, "name": "hrm", "layers": [("argument", {"task": options})], "path": []})
    [narrow, (width, recorded)] = seen
    assert narrow == (32, {})
    assert (width, recorded["heads"]) == (64, 2)


def test_a_vocabulary_is_not_enlarged_silently(tmp_path):
    with pytest.raises(UserError, match=r"task.vocabulary=2 is less than the 23 words"):
        PIXEL_LLM(vocabulary=2)
    (tmp_path / "a.png").touch()
    (tmp_path / "a.txt").write_text(" ".join(f"word{number}" for number in range(70)))
    assert made(PIXEL_LLM, {"folder": str(tmp_path), "vocabulary": 200}, "gpu").model_options.vocabulary == 200
    assert made(PIXEL_LLM, {"folder": str(tmp_path)}, "gpu").model_options.vocabulary is None  # 64 is for scenes
    assert made(PIXEL_LLM, {}, "gpu").model_options.vocabulary == 64
    with pytest.raises(UserError, match=r"task.vocabulary=63 is less than the 73 words(.|\n)*task.vocabulary=null"):
        made(PIXEL_LLM, {"folder": str(tmp_path), "vocabulary": 63}, "gpu")


def test_a_build_warns_alike(tmp_path):
    for options, text in (
        ({"maze_size": 9}, "maze_size=9: no effect with puzzle=sudoku9"),
        ({"holes": 9, "train_csv": "a.csv"}, r"holes=9: no effect with train_csv=a\.csv"),
    ):
        with pytest.warns(UserWarning, match=text), pytest.raises((UserError, OSError)):
            build(Build(out="nowhere", train_size=0, **{"test_csv": "b.csv"} | options))
