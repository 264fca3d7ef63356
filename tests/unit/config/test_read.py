"""Files, command line and objects."""

import importlib.util
import json
import math
import sys
import types

import pytest
import yaml

from lockstep import config
from lockstep.config import RunConfig, read_file, read_layers, resolve, yaml_dialect
from lockstep.errors import ConfigError, UserError

YAML_SCALARS = [
    ("1e-4", 1e-4),
    ("1E5", 1e5),
    ("1e3", 1e3),
    ("-1e3", -1e3),
    ("1.5e3", 1500.0),
    ("1.", 1.0),
    (".5", 0.5),
    (".inf", math.inf),
    ("1_000", 1000),
    ("0", 0),
    ("0x10", 16),
    ("-7", -7),
    ("true", True),
    ("off", False),
    ("null", None),
    ("~", None),
    ("010", "010"),
    ("16:9", "16:9"),
    ("1.2.3", "1.2.3"),
    ("2024-01-01", "2024-01-01"),
    ("e5", "e5"),
    ("'8'", "8"),
    ("[1, 2e0, a]", [1, 2.0, "a"]),
    ("{a: 1e-3}", {"a": 1e-3}),
]


def overrides(*args: str) -> dict:
    """Return the values of a command line."""
    [(_, values)] = read_layers([], args)
    return values


@pytest.mark.parametrize(("text", "value"), YAML_SCALARS)
def test_files_and_the_command_line_read_words_alike(tmp_path, text, value):
    file = tmp_path / "a.yaml"
    file.write_text(f"task:\n  x: {text}\n")
    for read in (read_file(file), overrides(f"task.x={text}")):
        assert read == {"task": {"x": value}}
        assert type(read["task"]["x"]) is type(value)


def test_a_json_file(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"lr": {"peak": 1e-4}, "steps": 3}, indent="\t"))
    assert read_file(file) == {"lr": {"peak": 1e-4}, "steps": 3}


def test_yaml_anchors_and_an_empty_file(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("task:\n  a: &base {x: 1, y: 2}\n  b: &more {<<: *base, y: 3}\n  c: {<<: *more, y: 4}\n")
    assert read_file(file)["task"]["c"] == {"x": 1, "y": 4}
    file.write_text("# nothing yet\n")
    assert read_file(file) == {}


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("missing.yaml", None, "No such file"),
        ("a.toml", "", "neither YAML nor JSON"),
        ("a.yaml", "steps: 3\nlr: [1,\n", "line 3"),
        ("a.yaml", "steps: 3\nseed: 1\nsteps: 4\n", "steps is set twice in line 3"),
        ("a.yaml", "lr:\n  peak: 1\n  peak: 2\n", "peak is set twice in line 3"),
        ("a.yaml", "- steps\n", "a list at its top level"),
        ("a.yaml", "steps=3\n", "a str at its top level"),
        ("a.yaml", "a: \x00", "special characters"),
        ("a.yaml", "a: !!python/name:os.system\n", "line 1"),
        ("a.json", '{"steps": 3,\n}', "line "),
        ("a.json", '{"steps": 3, "steps": 4}', "steps is set twice"),
        ("a.json", "[1]", "a list at its top level"),
        ("a.json", "", "line 1"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path, name, text, found):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        read_file(tmp_path / name)
    assert name in caught.value.problem
    assert found in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("args", "values"),
    [
        ([], {}),
        (["lr.peak=1e-3", "lr.warmup=5", "steps=10"], {"lr": {"peak": 1e-3, "warmup": 5}, "steps": 10}),
        (["lr={peak: 1, warmup: 2}", "lr.decay=0.1"], {"lr": {"peak": 1, "warmup": 2, "decay": 0.1}}),
        (["steps=none", "epochs=None"], {"steps": None, "epochs": None}),
        (
            ["run_dir=a=b", "task.text=a: b", "task.c=# d"],
            {"run_dir": "a=b", "task": {"text": "a: b", "c": "# d"}},
        ),
        (["task.x='none'", "task.y=''", "task.z=<<"], {"task": {"x": "none", "y": "", "z": "<<"}}),
        ([" steps = 5 "], {"steps": 5}),
    ],
)
def test_overrides(args, values):
    assert overrides(*args) == values


def test_words_that_yaml_takes_for_something_else_still_work():
    made = resolve([("command line", overrides("log.progress=off", "lr.scaling=none"))]).config
    assert (made.log.progress, made.lr.scaling) == ("off", "none")


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["steps"], ["has no ="]),
        (["=3"], ["has no key before the ="]),
        (["steps="], ["has no value after the ="]),
        (["steps=1", "seed=2", "steps=3"], ["steps is set twice"]),
        (["lr={peak: 1}", "lr.peak=2"], ["lr.peak is set twice"]),
        (["task.a=1", "task.a.b=2"], ["task.a cannot be both a value and a section"]),
        (["lr.peak=1", "lr=2"], ["lr cannot be both a value and a section", "lr is a section"]),
        (["task.a=[1, 2", "oops"], ["is not a complete list", "has no ="]),
        (["task..a=1"], ["has a key with an empty part"]),
    ],
)
def test_malformed_overrides_are_collected(args, found):
    with pytest.raises(ConfigError) as caught:
        overrides(*args)
    assert len(caught.value.problems) == len(found)
    for problem, text in zip(caught.value.problems, found, strict=True):
        assert text in problem.problem


@pytest.mark.parametrize(
    ("word", "example"), [("foo", "steps=1000"), ("global_bacth", "global_batch=64"), ("seed", "seed=0")]
)
def test_a_word_without_a_value_names_the_nearest_key(word, example):
    with pytest.raises(ConfigError) as caught:
        overrides(word)
    assert [problem.fix for problem in caught.value.problems] == [f"write key=value, such as {example}"]


def test_the_layers_of_a_command(tmp_path):
    (tmp_path / "a.yaml").write_text("steps: 3\n")
    file = str(tmp_path / "a.yaml")
    layers = read_layers([file], ["lr.peak=1e-3"])
    assert layers == [(f"file {file}", {"steps": 3}), ("command line", {"lr": {"peak": 1e-3}})]


def test_all_problems_of_a_command_come_at_once(tmp_path):
    (tmp_path / "a.yaml").write_text("sede: 3\nmicro_batch: 8\n")
    (tmp_path / "b.yaml").write_text("steps: [\n")
    files = [str(tmp_path / name) for name in ("a.yaml", "b.yaml", "missing.yaml")]
    overrides = ["foo", "steps=1", "steps=2", "lr.peak=abc", "global_batch=4", "clip.norm=1", "clip.value=1"]
    with pytest.raises(ConfigError) as caught:
        read_layers(files, overrides)
    found = [
        "line 2",
        "No such file",
        "has no =",
        "steps is set twice",
        "there is no key sede",
        "at most one of clip.norm",
        "lr.peak = abc (command line) should be a valid number\n  found: 'abc' (str)",
        "is larger than global_batch",
    ]
    for problem, text in zip(caught.value.problems, found, strict=True):
        assert text in str(problem)


def test_from_object(tmp_path):
    assert config.from_object(None) == {}
    mixed = {"lr.peak": 1e-3, "lr": {"warmup": 2}, "task": {"a.b": 1}}
    assert config.from_object(mixed) == {"lr": {"peak": 1e-3, "warmup": 2}, "task": {"a": {"b": 1}}}
    (tmp_path / "a.yaml").write_text("steps: 3\n")
    assert config.from_object(tmp_path / "a.yaml") == config.from_object(str(tmp_path / "a.yaml")) == {"steps": 3}
    for wrong in (3, [("steps", 3)]):
        with pytest.raises(UserError, match="a configuration"):
            config.from_object(wrong)
    with pytest.raises(ConfigError, match="set twice"):
        config.from_object({"lr.peak": 1, "lr": {"peak": 2}})


def test_a_runconfig_brings_only_what_was_chosen():
    chosen = RunConfig(steps=3, lr=config.LrConfig(peak=0.1), task={"width": 2})
    values = config.from_object(chosen)
    assert values == {"steps": 3, "lr": {"peak": 0.1}, "task": {"width": 2}}
    resolved = resolve([("task default", {"lr": {"warmup": 7}}), ("argument", values)])
    assert resolved.config.lr == config.LrConfig(peak=0.1, warmup=7)
    again = resolve([("task default", {"epochs": 3}), ("argument", config.from_object(resolved.config))])
    assert again.config.steps == 3
    assert again.config.epochs is None


def test_a_hydra_config_is_recognised_without_importing_omegaconf(monkeypatch):
    class Container:
        """Stands in for omegaconf's DictConfig, which the test environment need not have."""

    class OmegaConf:
        @staticmethod
        def is_config(obj):
            return isinstance(obj, Container)

        @staticmethod
        def to_container(obj, *, resolve, throw_on_missing):
            assert resolve
            assert throw_on_missing
            return {"lr": {"peak": 0.1}}

    monkeypatch.setitem(sys.modules, "omegaconf", types.SimpleNamespace(OmegaConf=OmegaConf))
    assert config.from_object(Container()) == {"lr": {"peak": 0.1}}
    assert config.from_object({"steps": 1}) == {"steps": 1}


def test_a_value_that_yaml_cannot_hold_is_named():
    with pytest.raises(UserError, match=r"YAML cannot hold task\.thing, a set_iterator object"):
        config.to_yaml(RunConfig(task={"thing": iter({1})}))


def test_a_pyyaml_without_libyaml_reads_and_writes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml, "__with_libyaml__", False)
    spec = importlib.util.find_spec(yaml_dialect.__name__)
    slow = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(slow)

    text = slow.to_yaml(RunConfig(steps=3, run_dir="a: 'b' \u00e4"))
    assert text == yaml_dialect.to_yaml(RunConfig(steps=3, run_dir="a: 'b' \u00e4"))
    assert slow.load(text, aliases=False) == yaml_dialect.load(text, aliases=False)

    for dialect in (slow, yaml_dialect):
        with pytest.raises(yaml.YAMLError, match="an alias"):
            dialect.load("a: &x 1\nb: *x", aliases=False)
