"""Layers, sources, presets, and what is said about problems."""

import math

import pytest

from lockstep import config
from lockstep.config import check, read_layers, resolve, resolve_for
from lockstep.config.schema import RENAMED
from lockstep.errors import ConfigError, UserError
from lockstep.task import Task

PRESETS = {"tiny": {"steps": 5, "task": {"width": 4}}, "gpu": {"global_batch": 512}}


def problems_of(*layers: dict) -> list[UserError]:
    with pytest.raises(ConfigError) as caught:
        resolve([(f"layer {n}", layer) for n, layer in enumerate(layers)])
    return caught.value.problems


@pytest.mark.parametrize("key", config.KEYS)
def test_every_key_is_described_and_has_a_value_to_type(key):
    assert config.KEYS[key].description
    (problem,) = problems_of({key: object()})  # which no key takes
    [(_, values)] = read_layers([], [problem.fix.removeprefix("set ")])
    # As a task's: typed alone, an option of something that is off would be refused.
    assert resolve([("task default", values)]).sources[key] == "task default"


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


@pytest.mark.parametrize(
    ("weak", "strong", "expected"),
    [
        ({"lr": {"peak": 1, "warmup": 3}}, {"lr.peak": 2}, {"lr.warmup": 3, "lr.peak": 2}),
        ({"epochs": 3, "seed": 1}, {"steps": 5}, {"seed": 1, "steps": 5}),
        ({"epochs": 3}, {"steps": None}, {"epochs": 3, "steps": None}),
        ({"clip": {"norm": 1.0}}, {"clip": {"norm": None}}, {"clip": {"norm": None}}),
    ],
)
def test_a_subclass_inherits_the_defaults_of_its_base_key_by_key(weak, strong, expected):
    base = type("Base", (Task,), {"defaults": weak})
    assert type("Derived", (base,), {"defaults": strong}).defaults == expected
    assert type("Derived", (base,), {}).defaults == weak
    assert base.defaults == weak


def test_an_ended_value_names_the_layer_that_ended_it():
    assert resolve([("file", {"epochs": 2}), ("command line", {"steps": 5})]).sources["epochs"] == "command line"


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
    shown = config.flatten(resolved.config)
    assert {key for key in resolved.sources if key.startswith("task.")} == {k for k in shown if k.startswith("task.")}


def test_task_options_may_hold_any_object():
    thing = object()
    assert resolve([("argument", {"task": {"thing": thing}})]).config.task["thing"] is thing


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
    assert preset.problem == "preset = tyni (command line) is not a preset of the task"
    assert "tiny, gpu" in preset.found
    assert preset.fix == "set preset=tiny"
    assert seed.problem == "seed = x (command line) should be a valid integer"


def test_a_preset_cannot_choose_a_preset():
    with pytest.raises(ConfigError, match="a preset cannot choose another one"):
        resolve_for({"preset": "a"}, {"a": {"preset": "b"}, "b": {}}, [])


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"lr": {"peek": 2}}, "set lr.peak=2"),
        ({"stpes": 2}, "set steps=2"),
        ({"Steps": 2}, "set steps=2"),
        ({"warmup": 2}, "set lr.warmup=2"),
        ({"log": {"warmup": 2}}, "set lr.warmup=2"),
        ({"every": 2}, "set evaluate.every=2 or checkpoint.every=2 or log.every=2 or checks.every=2"),
        ({"task.width": 1, "wdith": 2}, "set task.width=2"),
        ({"zzz": 2}, "an option of the task is set as task.zzz=2"),
        ({"steps": {"x": 2}}, "set steps=1000"),
        ({"learning_rate": 0.1}, "set lr.peak=0.1"),
        ({"optimizer": {"lr": 0.1}}, "set lr.peak=0.1"),
        ({"lr": 0.1}, "set lr.peak=0.1"),
        ({"batch_size": 8}, "set global_batch=8 (all ranks together) or local_batch=8 (per rank)"),
        ({"batch": 8}, "set global_batch=8 (all ranks together)"),
        ({"per_device_train_batch_size": 8}, "set local_batch=8 (per rank)"),
        ({"accumulate_grad_batches": 8}, "set micro_batch=... (samples per backward)"),
        ({"weight_decay": 0.1}, "set optim.groups='[{match: \"*\", weight_decay: 0.1}]'"),
        ({"warmup_steps": 5}, "set lr.warmup=5"),
        ({"nproc": 2}, "use --nproc 2: it is an option, not a setting"),
        ({"devices": 2}, "use --nproc 2"),
        ({"max_steps": 8}, "set steps=8"),
        ({"num_epochs": 8}, "set epochs=8"),
        ({"fp16": True}, "set precision=fp16 (or bf16, fp32, auto)"),
        ({"max_grad_norm": 1.0}, "set clip.norm=1.0"),
        ({"grad_clip": 1.0}, "set clip.norm=1.0"),
        ({"num_workers": 4}, "set data.workers=4"),
        ({"clip": None}, "set one of its keys: clip.norm, clip.value, clip.adaptive"),
        ({"task": 3}, "set one of its keys: task.<option>"),
        ({"lr": "fast"}, "set one of its keys: lr.peak, lr.schedule"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(values, fix):
    (problem,) = problems_of(values)
    assert problem.fix.startswith(fix)
    assert "(layer 0)" in problem.problem


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
    assert problem.fix == f"set {fix}"
    assert problem.problem.startswith(f"{key} = ")
    assert "(layer 0) should be" in problem.problem


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([{"steps": 1, "epochs": 1}], "at most one of steps, epochs can be set"),
        ([{"steps": 1, "epochs": 1}, {"steps": 2}], "at most one of steps, epochs can be set"),
        ([{"global_batch": 1, "local_batch": 1}], "at most one of global_batch, local_batch can be set"),
        (
            [{"clip": {"norm": 1, "value": 1}}],
            "at most one of clip.norm, clip.value, clip.adaptive can be set",
        ),
        ([{"lr.scaling": "sqrt"}], "needs lr.reference_batch, the batch that lr.peak was tuned for"),
        ([{"micro_batch": 8}, {"global_batch": 4}], "(layer 0) is larger than global_batch = 4 (layer 1)"),
        ([{"micro_batch": 8, "local_batch": 4}], "micro_batch = 8 (layer 0) is larger than local_batch = 4 (layer 0)"),
        ([{"scaler.initial": 0.5}], "(default) is larger than scaler.initial = 0.5 (layer 0)"),
        ([{"scaler": {"maximum": 2}}], "(default) is larger than scaler.maximum = 2 (layer 0)"),
        ([{"lr.peak": 1, "lr": {"peak": 2}}], "lr.peak is set twice: lr.peak = 1 (layer 0) and lr.peak = 2 (layer 0)"),
        (
            [{"task.a": 1, "task": {"a": {"b": 2}}}],
            "task.a cannot be both a value and a section: task.a = 1 (layer 0) and task.a.b = 2 (layer 0)",
        ),
        ([{"task..a": 1}], "has a key with an empty part"),
    ],
)
def test_values_that_do_not_go_together(layers, problem):
    (found,) = problems_of(*layers)
    assert found.problem.endswith(problem)


def test_rules_for_names_without_weights_have_no_effect():
    (found,) = problems_of({"weights.allow_extra": ["head.*"]})
    assert found.problem.endswith("has no effect with init_from=null")
    resolve([("file", {"weights.allow_extra": ["head.*"], "init_from": "some.safetensors"})])


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


@pytest.mark.parametrize(
    ("key", "value", "expected", "found"),
    [
        ("seed", "x", "should be a valid integer", "'x' (str)"),
        ("compile", 1, "should be 'auto' or a valid boolean", "1 (int)"),
        ("data.pin_memory", None, "should be 'auto' or a valid boolean", "null"),
        ("lr.min_ratio", 2, "should be less than or equal to 1", "2 (int)"),
    ],
)
def test_what_a_value_should_be_is_said_once(key, value, expected, found):
    (problem,) = problems_of({key: value})
    assert problem.problem.endswith(f"(layer 0) {expected}")
    assert problem.found == found


def test_a_renamed_key_answers_with_its_new_name():
    for old, new in RENAMED.items():
        assert old not in config.KEYS
        assert new in config.KEYS
        (problem,) = problems_of({old: "auto"})
        assert problem.problem == f"{old} = auto (layer 0) cannot be set: {old} is now called {new}"
        assert problem.fix == f"set {new}=auto"


def test_problems_found_earlier_are_raised_too():
    with pytest.raises(ConfigError) as caught:
        resolve([("a", {"seed": "x"})], [UserError("a", "b", "c")])
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("values", [{"lr.scaling": "sqrt"}, {"scaler.initial": 0.5}, {"steps": 3, "epochs": None}])
def test_a_check_leaves_room_for_what_a_task_may_add(values):
    check([("command line", values)])


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ([{"micro_batch": 8}, {"global_batch": 4}], "is larger than global_batch"),
        ([{"steps": 1, "epochs": 1}], "at most one of steps, epochs can be set"),
        ([{"stpes": 1}], "there is no key stpes"),
        ([{"seed": -1}], "should be greater than or equal to 0"),
        ([{"lr": {"scaling": "sqrt", "reference_batch": None}}], "lr.reference_batch, the batch"),
    ],
)
def test_a_check_finds_what_no_task_can_fix(layers, found):
    with pytest.raises(ConfigError) as caught:
        check([("file", layer) for layer in layers])
    (problem,) = caught.value.problems
    assert found in problem.problem


def test_every_value_has_a_source():
    resolved = resolve([("file a.yaml", {"lr.peak": 0.1, "task": {"width": 2}})])
    values = config.flatten(resolved.config)
    rows = {key: (value, resolved.sources[key]) for key, value in values.items()}
    assert list(rows) == list(resolved.sources)
    assert rows["lr.peak"] == (0.1, "file a.yaml")
    assert rows["task.width"] == (2, "file a.yaml")
    assert rows["seed"] == (0, "default")
