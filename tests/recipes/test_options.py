"""Options that count only with others: refused where somebody has given them, left out where a preset has."""

import json
import re
from typing import Any

import pytest

from lockstep import api
from lockstep.api import fit
from lockstep.cli import main
from lockstep.config import flatten, read_layers, resolve_for
from lockstep.errors import ConfigError, UserError
from lockstep.recipes.char_lm import TASK as CHAR_LM
from lockstep.recipes.clstm_ppo import TASK as CLSTM_PPO
from lockstep.recipes.hrm import TASK as HRM
from lockstep.recipes.hrm.build import Build, build
from lockstep.recipes.latent_wire import TASK as LATENT_WIRE
from lockstep.recipes.pixel_llm import TASK as PIXEL_LLM
from lockstep.targets import make_task, settled
from lockstep.task import OnlyWith, Task

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
    ruled = {(task, name) for task in ALL for rule in task.option_rules if rule.refused for name in rule.options}
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


def test_a_preset_can_be_extended_in_python():
    """What most of a preset was given with was not typed. One value that a preset happens to have was."""
    gpu, tiny = CLSTM_PPO.presets["gpu"]["task"], HRM.presets["tiny"]["task"]
    CLSTM_PPO(**gpu | {"variant": "mlp"})
    HRM(**tiny | {"puzzle": "maze", "maze_size": 5})
    with pytest.raises(ConfigError, match=r"1 problem.*\n- task.cascade=2 with task.variant=mlp"):
        CLSTM_PPO(**gpu | {"variant": "mlp", "cascade": 2})
    with pytest.raises(ConfigError, match=r"task.linears=3 with task.variant=mlp"):
        CLSTM_PPO(variant="mlp", linears=gpu["linears"])


# ---- classes that are derived from a recipe ----


class Narrow(HRM):
    def __init__(self, *, width: int = 32):
        super().__init__(width=width, maze_size=9)  # for the day that the puzzle is a maze


class Wide(HRM):
    def __init__(self, loudness: float = 1.0, **options: Any):
        super().__init__(**options)


class Mazes(HRM):
    def __init__(self, **options: Any):
        super().__init__(puzzle="maze", **options)


class Moody(HRM):
    option_rules = (*HRM.option_rules, OnlyWith(("strength",), "mode", ("loud",), found="silence"))

    def __init__(self, *, puzzle: str = "sudoku4", maze_size: int = 9, mode: str = "quiet", strength: float = 1.0):
        super().__init__(puzzle=puzzle, maze_size=maze_size)


def derived(task: type[Task], **typed: Any) -> Task:
    """As the command does, without the presets of the recipe, which have options that these classes lack."""
    values = {f"task.{name}": value for name, value in typed.items()}
    return make_task(task, settled(task, resolve_for({}, {}, [("command line", values)])).config.task)


def test_a_subclass_may_have_a_constructor_of_its_own():
    for task in (Narrow, Wide, Mazes, Moody):
        assert isinstance(task(), HRM)
        assert isinstance(derived(task), HRM)
    assert derived(Narrow, width=64).width == 64
    assert derived(Wide, loudness=2.0, width=64, holes=5).asked.holes == 5
    assert derived(Mazes, maze_size=7).asked.size == 7  # who knows what the class hands on
    assert derived(Moody, puzzle="idgrid").asked.size == 9  # which nobody typed
    assert derived(Wide, puzzle="maze", holes=None).asked.holes is None  # as it is when nobody sets it
    for task, typed, refused in (
        (Wide, {"puzzle": "maze", "holes": 5}, "task.holes=5 with task.puzzle=maze"),
        (Moody, {"maze_size": 7}, "task.maze_size=7 with task.puzzle=sudoku4"),
        (Moody, {"strength": 2.0}, "task.strength=2.0 with task.mode=quiet"),
    ):
        with pytest.raises(ConfigError, match=refused):
            derived(task, **typed)


def test_an_object_with_a_constructor_of_its_own_reaches_the_ranks(monkeypatch):
    seen = []
    monkeypatch.setattr(api, "_fit_here", lambda task, resolved, name: seen.append((task.width, resolved.config.task)))
    for task, options in ((Narrow(), {}), (HRM(width=64, heads=2), {"width": 64, "heads": 2})):
        with api._shipped(task, options) as path:
            api.fit_shipped(path, [("argument", {"task": options})])
    [narrow, (width, recorded)] = seen
    assert narrow == (32, {})
    assert (width, recorded["heads"]) == (64, 2)


# ---- where the options come from ----


def test_a_configuration_that_a_run_has_written_is_read_again(tmp_path, monkeypatch):
    """It has every key, whoever chose it; that of an older version has fewer of them, and options that do not count."""
    layers = [("command line", {"preset": "tiny", "task.data_path": "puzzles"})]
    values = flatten(resolve_for(HRM.defaults, HRM.presets, layers).config)
    assert "task.train_size" in values
    (tmp_path / "config.yaml").write_text(json.dumps({key: values[key] for key in values if key != "attention"}))
    file = str(tmp_path / "config.yaml")
    again = settled(HRM, resolve_for(HRM.defaults, HRM.presets, read_layers([file], [])))
    assert "train_size" not in again.config.task
    assert make_task(HRM, again.config.task).data_path == "puzzles"
    monkeypatch.setattr(api, "_fit_here", lambda task, resolved, name: resolved.config.task)
    assert "train_size" not in fit(HRM, file, steps=3)
    with pytest.raises(ConfigError, match=r"task.test_size=7 with task.data_path=puzzles"):
        fit(HRM, file, **{"task.test_size": 7})
    with pytest.raises(ConfigError, match=r"task.holes=9 with task.data_path=puzzles"):
        settled(HRM, resolve_for(HRM.defaults, HRM.presets, read_layers([file], ["task.holes=9"])))


def test_a_command_line_may_leave_the_options_of_a_file_alone(tmp_path, capsys):
    """The other way round they are refused; and what would not be trained is not shown as if it were."""
    (tmp_path / "mine.yaml").write_text("task: {holes: 9}\n")
    (tmp_path / "maze.yaml").write_text("task: {puzzle: maze}\n")
    show = ["config", "show", "hrm", "preset=tiny", "--config"]
    assert main([*show, str(tmp_path / "mine.yaml"), "task.puzzle=maze", "task.maze_size=5"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"task.maze_size +5 +command line", shown)
    assert "task.holes" not in shown
    for typed, refused in (("task.holes=9", "task.holes=9 with task.puzzle=maze"), ("task.loss=none", "task.loss")):
        assert main([*show, str(tmp_path / "maze.yaml"), typed]) == 2
        assert refused in capsys.readouterr().err


def test_what_goes_with_its_switch_goes_too():
    """`tone` counts with a voice, and `voice` with sound: without sound nobody has to take back either."""

    class Sound(Task):
        option_rules = (OnlyWith(("tone",), "voice", (True,)), OnlyWith(("voice",), "sound", (True,)))

        def __init__(self, sound: bool = True, voice: bool = False, tone: int = 0):
            self.heard = sound, voice, tone

    layers = [("file a", {"task": {"voice": True, "tone": 3}}), ("command line", {"task.sound": False})]
    resolved = settled(Sound, resolve_for({}, {}, layers))
    assert make_task(Sound, resolved.config.task).heard == (False, False, 0)
    with pytest.raises(ConfigError, match=r"task.tone=3 with task.voice=false"):
        settled(Sound, resolve_for({}, {}, [*layers, ("later", {"task.tone": 3})]))


def test_the_vocabulary_of_a_preset_is_not_for_a_folder_of_pictures(tmp_path):
    """One that is typed is for whatever there is."""
    (tmp_path / "a.png").touch()
    (tmp_path / "a.txt").write_text(" ".join(f"word{number}" for number in range(70)))
    assert made(PIXEL_LLM, {"folder": str(tmp_path)}, "gpu").model_options.vocabulary is None
    assert made(PIXEL_LLM, {"folder": str(tmp_path), "vocabulary": 200}, "gpu").model_options.vocabulary == 200
    assert made(PIXEL_LLM, {}, "gpu").model_options.vocabulary == 64
    with pytest.raises(UserError, match=r"task.vocabulary=64 is less than the 73 words(.|\n)*task.vocabulary=null"):
        made(PIXEL_LLM, {"folder": str(tmp_path), "vocabulary": 64}, "gpu")


def test_a_vocabulary_is_not_enlarged_silently():
    with pytest.raises(UserError, match=r"task.vocabulary=2 is less than"):
        PIXEL_LLM(vocabulary=2)


def test_a_build_refuses_alike():
    with pytest.raises(ConfigError, match="maze_size=9 with puzzle=sudoku9"):
        build(Build(out="nowhere", maze_size=9))
    with pytest.raises(ConfigError, match=r"holes=9 with train_csv=a\.csv"):
        build(Build(out="nowhere", holes=9, train_csv="a.csv", test_csv="b.csv"))
