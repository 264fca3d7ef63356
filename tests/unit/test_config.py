"""Layers, sources, messages and files of the configuration."""

import json
import math
import pickle
import subprocess
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lockstep import config
from lockstep.config import RunConfig, parse_overrides, read_file, resolve, resolve_for
from lockstep.errors import ConfigError, UserError


def problems_of(*layers: dict) -> list[UserError]:
    with pytest.raises(ConfigError) as caught:
        resolve([(f"layer {n}", layer) for n, layer in enumerate(layers)])
    return caught.value.problems


# ---- the keys


def test_the_defaults_are_the_agreed_ones():
    resolved = resolve([])
    assert resolved.config == RunConfig()
    assert set(resolved.sources.values()) == {"default"}
    assert set(resolved.sources) == set(config.KEYS) == set(config.flatten(RunConfig()))
    values = config.flatten(RunConfig())
    expected = {"seed": 0, "tail": "short", "precision": "auto", "compile": "auto", "lr.decay": 0.2}
    expected |= {"scaler.initial": 2.0**15, "scaler.maximum": 2.0**24, "nonfinite.max_in_a_row": 5}
    expected |= {
        "data.prefetch": 2,
        "ddp.bucket_mb": 25.0,
        "log.every": 10,
        "checks.every": 500,
        "steps": None,
    }
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize("key", config.KEYS)
def test_every_key_is_described_and_has_a_value_to_type(key):
    assert config.KEYS[key].description
    (problem,) = problems_of({key: object()})  # which no key takes
    values = parse_overrides([problem.fix.removeprefix("type ")])
    assert resolve([("command line", values)]).sources[key] == "command line"


def test_the_config_is_frozen_and_can_be_sent_to_a_worker():
    made = resolve([("a", {"steps": 3, "task": {"width": 2}})]).config
    with pytest.raises(ValidationError):
        made.steps = 4  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_config_built_directly_obeys_the_same_rules():
    for wrong in ({"steps": 1, "epochs": 2}, {"micro_batch": 8, "global_batch": 4}, {"step": 1}):
        with pytest.raises(ValidationError):
            RunConfig(**wrong)


# ---- layers


def test_later_layers_win_leaf_by_leaf():
    resolved = resolve(
        [
            ("file a.yaml", {"lr": {"peak": 0.1, "warmup": 5}, "task": {"model": {"width": 8, "depth": 2}}}),
            ("command line", {"lr.peak": 0.2, "task": {"model": {"width": 16}}, "seed": 1}),
        ]
    )
    assert (resolved.config.lr.peak, resolved.config.lr.warmup) == (0.2, 5)
    assert resolved.config.task == {"model": {"width": 16, "depth": 2}}
    chosen = {key: source for key, source in resolved.sources.items() if source != "default"}
    assert chosen == {
        "lr.peak": "command line",
        "lr.warmup": "file a.yaml",
        "task.model.width": "command line",
        "task.model.depth": "file a.yaml",
        "seed": "command line",
    }


@pytest.mark.parametrize(
    ("weak", "strong", "expected"),
    [
        ({"epochs": 2}, {"steps": 5}, {"steps": 5, "epochs": None}),
        ({"steps": 5}, {"epochs": 2}, {"steps": None, "epochs": 2.0}),
        ({"steps": 5}, {"epochs": None}, {"steps": 5, "epochs": None}),
        ({"steps": 5}, {"steps": None}, {"steps": None}),
        ({"steps": 5}, {"steps": 6, "epochs": None}, {"steps": 6}),
        ({"local_batch": 2}, {"global_batch": 8}, {"local_batch": None, "global_batch": 8}),
        ({"clip": {"norm": 1}}, {"clip.adaptive": 0.1}, {"clip.norm": None, "clip.adaptive": 0.1}),
        ({"clip": {"norm": 1}}, {"clip.norm": None}, {"clip.norm": None}),
        ({"micro_batch": 8, "local_batch": 8}, {"global_batch": 16}, {"micro_batch": 8, "local_batch": None}),
    ],
)
def test_a_stronger_layer_ends_the_rival_of_a_weaker_one(weak, strong, expected):
    resolved = resolve([("weak", weak), ("strong", strong)])
    values = config.flatten(resolved.config)
    assert {key: values[key] for key in expected} == expected


def test_an_ended_value_names_the_layer_that_ended_it():
    assert (
        resolve([("file", {"epochs": 2}), ("command line", {"steps": 5})]).sources["epochs"] == "command line"
    )


@pytest.mark.parametrize(
    ("weak", "strong", "task"),
    [
        ({"a": {"b": 1}}, {"a": 2}, {"a": 2}),
        ({"a": 2}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": {"b": 1}}, {"a": {}}, {"a": {}}),
        ({"a": {}}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": {"b": 1}}, {"a": None}, {"a": None}),
        ({"ab": 1}, {"a": 2}, {"ab": 1, "a": 2}),
        # Names that a dotted key cannot spell make the mapping one value.
        ({"rates": {"enc": 1, "enc.w": 2}}, {"other": 1}, {"rates": {"enc": 1, "enc.w": 2}, "other": 1}),
        ({"ids": {0: "a", 1: "b"}}, {"ids": {0: "c"}}, {"ids": {0: "c"}}),
    ],
)
def test_task_options_merge_without_mixing_values_and_sections(weak, strong, task):
    resolved = resolve([("weak", {"task": weak}), ("strong", {"task": strong})])
    assert resolved.config.task == task
    shown = {key for key, _, _ in config.describe(resolved.config, resolved.sources)}
    assert {key for key in resolved.sources if key.startswith("task.")} == {
        k for k in shown if k.startswith("task.")
    }


def test_task_options_may_hold_any_object():
    thing = object()
    assert resolve([("argument", {"task": {"thing": thing}})]).config.task["thing"] is thing


PRESETS = {"tiny": {"steps": 5, "task": {"width": 4}}, "gpu": {"global_batch": 512}}


@pytest.mark.parametrize(
    ("defaults", "layers", "steps", "source"),
    [
        ({"epochs": 3}, [], None, "default"),
        ({"preset": "tiny", "epochs": 3}, [], 5, "preset tiny"),
        (
            {"epochs": 3},
            [("file", {"preset": "gpu"}), ("command line", {"preset": "tiny"})],
            5,
            "preset tiny",
        ),
        ({"preset": "tiny"}, [("command line", {"preset": None})], None, "default"),
        ({"preset": "tiny"}, [("command line", {"steps": 7})], 7, "command line"),
    ],
)
def test_the_strongest_preset_lies_between_task_and_file(defaults, layers, steps, source):
    resolved = resolve_for(defaults, PRESETS, layers)
    assert (resolved.config.steps, resolved.sources["steps"]) == (steps, source)


def test_an_unknown_preset_is_reported_with_all_the_rest():
    with pytest.raises(ConfigError) as caught:
        resolve_for({}, PRESETS, [("command line", {"preset": "tyni", "seed": "x"})])
    preset, seed = caught.value.problems
    assert preset.asked == "preset = tyni (command line)"
    assert "tiny, gpu" in preset.found and preset.fix == "type preset=tiny"
    assert seed.asked == "seed = x (command line)"


def test_a_preset_cannot_choose_a_preset():
    with pytest.raises(ConfigError, match="cannot choose a preset"):
        resolve_for({"preset": "a"}, {"a": {"preset": "b"}, "b": {}}, [])


# ---- problems


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"lr": {"peek": 2}}, "type lr.peak=2"),
        ({"stpes": 2}, "type steps=2"),
        ({"Steps": 2}, "type steps=2"),
        ({"warmup": 2}, "type lr.warmup=2"),
        ({"log": {"warmup": 2}}, "type lr.warmup=2"),
        ({"every": 2}, "type evaluate.every=2 or log.every=2 or checks.every=2"),
        ({"task.width": 1, "wdith": 2}, "type task.width=2"),
        ({"zzz": 2}, "an option of the task is typed task.zzz=2"),
        ({"steps": {"x": 2}}, "type steps=1000"),
        ({"learning_rate": 0.1}, "type lr.peak=0.1"),
        ({"optimizer": {"lr": 0.1}}, "type lr.peak=0.1"),
        ({"lr": 0.1}, "type lr.peak=0.1"),
        ({"batch_size": 8}, "type global_batch=8 (all ranks together) or local_batch=8 (per rank)"),
        ({"max_steps": 8}, "type steps=8"),
        ({"num_epochs": 8}, "type epochs=8"),
        ({"fp16": True}, "type precision=fp16 (or bf16, fp32, auto)"),
        ({"max_grad_norm": 1.0}, "type clip.norm=1.0"),
        ({"grad_clip": 1.0}, "type clip.norm=1.0"),
        ({"num_workers": 4}, "type data.workers=4"),
        ({"clip": None}, "set one of its keys: clip.norm, clip.value, clip.adaptive"),
        ({"task": 3}, "set one of its keys: task.<option>"),
        ({"lr": "fast"}, "set one of its keys: lr.peak, lr.schedule"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(values, fix):
    (problem,) = problems_of(values)
    assert problem.fix.startswith(fix)
    assert "(layer 0)" in problem.asked


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("steps", "8", "steps=8"),
        ("steps", 1e5, "steps=100000"),
        ("steps", "1e5", "steps=100000"),
        ("steps", True, "steps=1000"),
        ("steps", 0, "steps=1000"),
        ("seed", None, "seed=0"),
        ("seed", -1, "seed=0"),
        ("epochs", 0, "epochs=3"),
        ("lr.peak", "1e-3", "lr.peak=0.001"),
        ("lr.peak", False, "lr.peak=0.001"),
        ("lr.peak", math.inf, "lr.peak=0.001"),
        ("lr.min_ratio", 1.5, "lr.min_ratio=0.0"),
        ("lr.warmup", -1, "lr.warmup=0"),
        ("clip.norm", 0, "clip.norm=1.0"),
        ("scaler.backoff", 1, "scaler.backoff=0.5"),
        ("precision", "BF16", "precision=bf16"),
        ("precision", "fp61", "precision=fp16"),
        ("compile", 1, "compile=auto"),
        ("compile", "yes", "compile=true"),
        ("data.shuffle", "no", "data.shuffle=false"),
        ("data.workers", [1], "data.workers=0"),
        ("run_dir", 3, "run_dir=runs/first"),
        ("log.progress", True, "log.progress=auto"),
    ],
)
def test_a_bad_value_is_shown_with_its_source_and_one_to_type(key, value, fix):
    (problem,) = problems_of({key: value})
    assert problem.fix == f"type {fix}"
    assert problem.asked.startswith(f"{key} = ") and problem.asked.endswith("(layer 0)")
    assert "should be" in problem.found


@pytest.mark.parametrize(
    ("key", "given", "taken"),
    [
        ("epochs", 2, 2.0),
        ("lr.scaling", None, "none"),
        ("log.progress", False, "off"),
        ("data.workers", 0, 0),
        ("lr.peak", 0, 0.0),
        ("compile", True, True),
        ("run_dir", Path("runs") / "a", str(Path("runs") / "a")),
    ],
)
def test_what_is_taken_for_what(key, given, taken):
    value = config.flatten(resolve([("argument", {key: given})]).config)[key]
    assert value == taken and type(value) is type(taken)


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ([{"steps": 1, "epochs": 1}], "at most one of steps, epochs can be set"),
        ([{"steps": 1, "epochs": 1}, {"steps": 2}], "at most one of steps, epochs can be set"),
        ([{"global_batch": 1, "local_batch": 1}], "at most one of global_batch, local_batch can be set"),
        (
            [{"clip": {"norm": 1, "value": 1}}],
            "at most one of clip.norm, clip.value, clip.adaptive can be set",
        ),
        ([{"lr.scaling": "sqrt"}], "lr.reference_batch, the batch that the rate was tuned for, is not set"),
        ([{"micro_batch": 8}, {"global_batch": 4}], "micro_batch is larger than global_batch"),
        ([{"micro_batch": 8, "local_batch": 4}], "micro_batch is larger than local_batch"),
        ([{"scaler.initial": 0.5}], "scaler.minimum is larger than scaler.initial"),
        ([{"scaler": {"maximum": 2}}], "scaler.initial is larger than scaler.maximum"),
        ([{"lr.peak": 1, "lr": {"peak": 2}}], "lr.peak is set twice"),
        ([{"task.a": 1, "task": {"a": {"b": 2}}}], "task.a is given a value and used as a section at once"),
        ([{"task..a": 1}], "a part of the key is empty"),
    ],
)
def test_values_that_do_not_go_together(layers, found):
    assert [problem.found for problem in problems_of(*layers)] == [found]


def test_all_problems_of_all_layers_come_at_once():
    weak = {"stpes": 1, "seed": "x", "micro_batch": 8}
    strong = {"global_batch": 4, "lr.scaling": "linear", "clip": {"norm": 1, "value": 1}, "device": "tpu"}
    found = problems_of(weak, strong)
    assert len(found) == 6
    text = str(ConfigError(found))
    for word in (
        "stpes",
        "seed",
        "micro_batch",
        "lr.reference_batch",
        "clip.value",
        "tpu",
        "layer 0",
        "layer 1",
    ):
        assert word in text


def test_problems_found_earlier_are_raised_too():
    with pytest.raises(ConfigError) as caught:
        resolve([("a", {"seed": "x"})], [UserError("a", "b", "c")])
    assert len(caught.value.problems) == 2


# ---- files


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


@pytest.mark.parametrize(("text", "value"), YAML_SCALARS)
def test_files_and_the_command_line_read_words_alike(tmp_path, text, value):
    file = tmp_path / "a.yaml"
    file.write_text(f"task:\n  x: {text}\n")
    for read in (read_file(file), parse_overrides([f"task.x={text}"])):
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
        ("a.yaml", "- steps\n", "top level is a list"),
        ("a.yaml", "steps=3\n", "top level is a str"),
        ("a.yaml", "a: \x00", "special characters"),
        ("a.yaml", "a: !!python/name:os.system\n", "line 1"),
        ("a.json", '{"steps": 3,\n}', "line "),
        ("a.json", '{"steps": 3, "steps": 4}', "steps is set twice"),
        ("a.json", "[1]", "top level is a list"),
        ("a.json", "", "line 1"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path, name, text, found):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        read_file(tmp_path / name)
    assert name in caught.value.asked and found in caught.value.found and caught.value.fix


# ---- the command line


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
    assert parse_overrides(args) == values


def test_words_that_yaml_takes_for_something_else_still_work():
    made = resolve([("command line", parse_overrides(["log.progress=off", "lr.scaling=none"]))]).config
    assert (made.log.progress, made.lr.scaling) == ("off", "none")


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["steps"], ["there is no = in it"]),
        (["=3"], ["there is no key before the ="]),
        (["steps="], ["there is no value after the ="]),
        (["steps=1", "seed=2", "steps=3"], ["steps is set twice"]),
        (["lr={peak: 1}", "lr.peak=2"], ["lr.peak is set twice"]),
        (["task.a=1", "task.a.b=2"], ["task.a is given a value and used as a section at once"]),
        (["lr.peak=1", "lr=2"], ["lr is given a value and used as a section at once"]),
        (["task.a=[1, 2", "oops"], ["the value is no complete list", "there is no = in it"]),
        (["task..a=1"], ["a part of the key is empty"]),
    ],
)
def test_malformed_overrides_are_collected(args, found):
    with pytest.raises(ConfigError) as caught:
        parse_overrides(args)
    assert len(caught.value.problems) == len(found)
    for problem, text in zip(caught.value.problems, found, strict=True):
        assert text in problem.found


# ---- objects


def test_from_object(tmp_path):
    assert config.from_object(None) == {}
    mixed = {"lr.peak": 1e-3, "lr": {"warmup": 2}, "task": {"a.b": 1}}
    assert config.from_object(mixed) == {"lr": {"peak": 1e-3, "warmup": 2}, "task": {"a": {"b": 1}}}
    (tmp_path / "a.yaml").write_text("steps: 3\n")
    assert (
        config.from_object(tmp_path / "a.yaml")
        == config.from_object(str(tmp_path / "a.yaml"))
        == {"steps": 3}
    )
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
    assert again.config.steps == 3 and again.config.epochs is None


def test_a_hydra_config_is_recognised_without_importing_omegaconf(monkeypatch):
    class Container:
        """Stands in for omegaconf's DictConfig, which the test environment need not have."""

    class OmegaConf:
        @staticmethod
        def is_config(obj):
            return isinstance(obj, Container)

        @staticmethod
        def to_container(obj, *, resolve, throw_on_missing):
            assert resolve and throw_on_missing
            return {"lr": {"peak": 0.1}}

    monkeypatch.setitem(sys.modules, "omegaconf", types.SimpleNamespace(OmegaConf=OmegaConf))
    assert config.from_object(Container()) == {"lr": {"peak": 0.1}}
    assert config.from_object({"steps": 1}) == {"steps": 1}


# ---- showing


def test_describe_and_diff():
    resolved = resolve([("file a.yaml", {"lr.peak": 0.1, "task": {"width": 2}})])
    rows = {key: (value, source) for key, value, source in config.describe(resolved.config, resolved.sources)}
    assert list(rows) == list(resolved.sources)
    assert rows["lr.peak"] == (0.1, "file a.yaml") and rows["task.width"] == (2, "file a.yaml")
    assert rows["seed"] == (0, "default")
    other = resolve([("b", {"lr.peak": 0.2})]).config
    assert config.diff(resolved.config, other) == [("lr.peak", 0.1, 0.2), ("task.width", 2, None)]
    assert config.diff(other, other) == []


def test_a_value_that_yaml_cannot_hold_is_named():
    with pytest.raises(UserError, match=r"task\.thing is an object of type set_iterator"):
        config.to_yaml(RunConfig(task={"thing": iter({1})}))


# The characters YAML has plans for, and a few it has not.
texts = st.text("ab1e.:#-+'\" \n\té😀{}[],&*!%@~=<>|?\\", max_size=6)
words = st.text("abc_-é", min_size=1, max_size=4)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
tricky = st.sampled_from(
    ["1e-4", "off", "010", "16:9", "null", "2024-01-01", "=", "<<", "~", "1_0", "", ".5", "- a"]
)
leaves = scalars | tricky | st.lists(scalars | tricky, max_size=3)
trees = st.dictionaries(
    words, st.recursive(leaves, lambda t: st.dictionaries(words, t, max_size=3), max_leaves=8)
)


@settings(deadline=None, database=None)
@given(trees)
def test_saved_yaml_reads_back_equal(task):
    made = resolve([("argument", {"task": task, "lr.peak": 1e-5, "scaler.initial": 3e4})]).config
    assert made.task == task
    again = config.yaml.load(config.to_yaml(made), Loader=config._Loader)
    assert resolve([("file", again)]).config == made


@settings(deadline=None, database=None)
@given(trees)
def test_dotted_and_nested_say_the_same(task):
    flat = config.flatten({"task": task})
    assert config.from_object(flat) == ({"task": task} if task else {})


@settings(deadline=None, database=None)
@given(trees, trees)
def test_the_stronger_layer_is_kept_whole_and_the_weaker_where_it_is_free(weak, strong):
    resolved = resolve([("weak", {"task": weak}), ("strong", {"task": strong})])
    flat_weak, flat_strong = config.flatten({"task": weak}), config.flatten({"task": strong})
    merged = config.flatten(resolved.config)
    for key, value in flat_strong.items():
        assert merged[key] == value and resolved.sources[key] == "strong"
    for key, value in flat_weak.items():
        if not any(f"{key}.".startswith(f"{k}.") or f"{k}.".startswith(f"{key}.") for k in flat_strong):
            assert merged[key] == value and resolved.sources[key] == "weak"
    assert {key for key in merged if key.startswith("task.")} <= flat_weak.keys() | flat_strong.keys()


def test_reading_a_configuration_does_not_import_torch():
    code = "import sys, lockstep.config; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
