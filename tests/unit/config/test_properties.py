"""What holds for any values: saving, dotted keys, merging."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import config
from lockstep.config import resolve, yaml_dialect

# The characters YAML has plans for, and a few it has not.
texts = st.text("ab1e.:#-+'\" \n\té😀{}[],&*!%@~=<>|?\\", max_size=6)
words = st.text("abc_-é", min_size=1, max_size=4)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
tricky = st.sampled_from(["1e-4", "off", "010", "16:9", "null", "2024-01-01", "=", "<<", "~", "1_0", "", ".5", "- a"])
leaves = scalars | tricky | st.lists(scalars | tricky, max_size=3)
trees = st.dictionaries(words, st.recursive(leaves, lambda t: st.dictionaries(words, t, max_size=3), max_leaves=8))


@pytest.mark.slow
@settings(deadline=None, database=None)
@given(trees)
def test_saved_yaml_reads_back_equal(task):
    made = resolve([("argument", {"task": task, "lr.peak": 1e-5, "scaler.initial": 3e4})]).config
    assert made.task == task
    again = yaml_dialect.load(config.to_yaml(made))
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
        assert merged[key] == value
        assert resolved.sources[key] == "strong"
    for key, value in flat_weak.items():
        if not any(f"{key}.".startswith(f"{k}.") or f"{k}.".startswith(f"{key}.") for k in flat_strong):
            assert merged[key] == value
            assert resolved.sources[key] == "weak"
    assert {key for key in merged if key.startswith("task.")} <= flat_weak.keys() | flat_strong.keys()
