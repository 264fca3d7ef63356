import pytest

from lockstep.config import resolve
from lockstep.engine.log import banner
from lockstep.errors import UserError
from lockstep.plan.plan import make_plan


def plan(world=1, samples=100, **values):
    return make_plan(resolve([("test", values)]).config, world, samples)


@pytest.mark.parametrize(
    ("world", "values", "expected"),  # expected: global batch, micro-batch, micro-batches, accumulation
    [
        (1, {"global_batch": 32}, (32, 32, 1, 1)),
        (4, {"global_batch": 32}, (32, 8, 4, 1)),
        (4, {"local_batch": 8}, (32, 8, 4, 1)),
        (2, {"global_batch": 32, "micro_batch": 4}, (32, 4, 8, 4)),
        (3, {"global_batch": 32, "micro_batch": 4}, (32, 4, 8, 3)),  # 8 micro-batches on 3 ranks: 2, 3, 3
        (2, {"global_batch": 7}, (7, 4, 2, 1)),
        (4, {"global_batch": 9}, (9, 2, 5, 2)),  # micro-batches of 3 would leave one rank idle
    ],
)
def test_batch_arithmetic(world, values, expected):
    made = plan(world, steps=1, **values)
    assert (made.global_batch, made.micro_batch, made.global_num_micro_batches, made.accumulation) == expected
    assert set(made.reasons) >= {"global_batch", "micro_batch", "accumulation", "steps"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"global_batch": 16, "micro_batch": 5}, "= 4 micro-batches of 5, the last one 1 (as asked)"),
        ({"global_batch": 16, "micro_batch": 4}, "= 4 micro-batches of 4 (as asked)"),
        ({"global_batch": 300}, "100 samples, 1 step an epoch, which has fewer samples than global_batch=300; 2 steps"),
        ({"global_batch": 30}, "100 samples, 4 steps an epoch, last one short; 2 steps"),
        ({"global_batch": 30, "tail": "drop"}, "3 steps an epoch, the last 10 samples of an epoch dropped; 2 steps"),
    ],
)
def test_the_banner_says_where_sizes_do_not_fit(values, said):
    config = resolve([("test", {"steps": 2, **values})]).config
    made = make_plan(config, 1, 100)
    assert said in f"{banner._batch(made)}\n{banner._data(made, config)}"


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("batch", range(8, 33))
def test_a_derived_micro_batch_leaves_no_rank_idle(world, batch):
    assert plan(world, steps=1, global_batch=batch).global_num_micro_batches >= world


def test_epochs_become_steps():
    assert plan(epochs=3, global_batch=32).steps == 3 * 4  # the last window of an epoch is short
    assert plan(epochs=3, global_batch=32, tail="drop").steps == 3 * 3
    assert plan(epochs=0.5, global_batch=10).steps == 5


@pytest.mark.parametrize(
    ("world", "samples", "values", "words"),
    [
        (4, 100, {"global_batch": 3, "steps": 1}, "cannot be split"),
        (4, 100, {"global_batch": 32, "micro_batch": 16, "steps": 1}, "cannot be split"),
        (1, 100, {"global_batch": 32}, "neither steps nor epochs"),
        (1, 100, {"steps": 1}, "neither global_batch nor local_batch"),
        (1, 10, {"global_batch": 32, "steps": 1, "tail": "drop"}, "leaves no step"),
        (1, None, {"global_batch": 32, "epochs": 2}, "stream"),
    ],
)
def test_what_cannot_work_is_refused_with_something_to_type(world, samples, values, words):
    with pytest.raises(UserError, match=words) as error:
        plan(world, samples, **values)
    assert "set" in error.value.fix


@pytest.mark.parametrize("asked", [None, "auto"])
@pytest.mark.parametrize(
    ("world", "batch", "depth", "samples", "expected"),
    [(1, 16, 4, 100, 4), (2, 24, 3, 100, 4), (1, 10, 4, 100, 2), (1, 3, 4, 100, 1), (1, 10, 4, None, 2)],
)
def test_a_pipeline_has_a_micro_batch_for_every_stage(asked, world, batch, depth, samples, expected):
    config = resolve([("test", {"global_batch": batch, "steps": 1, "micro_batch": asked})]).config
    assert make_plan(config, world, samples, depth=depth).micro_batch == expected
    assert make_plan(config, world, samples, most=1, depth=depth).micro_batch == 1  # what memory holds comes first
