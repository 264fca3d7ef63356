"""Two frozen readers and the wire between: its parts, and its smallest run on one process, and on two with a kill."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils.data import default_collate

from lockstep.errors import ConfigError, UserError
from lockstep.recipes.latent_wire import LatentWire
from lockstep.recipes.latent_wire.frozen import Schooling, frozen_reader
from lockstep.recipes.latent_wire.reader import Reader, ReaderShape, answer
from lockstep.recipes.latent_wire.wire import from_text
from lockstep.recipes.latent_wire.world import TOKENIZERS, WORDS, Fact, FactData, FactWorld
from lockstep.testing import fail_at

ROOT = Path(__file__).parent.parent.parent
TINY = LatentWire.presets["tiny"]["task"]
SHAPE = ReaderShape("words", 16, 1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("wire")


def task_of(folder, **options):
    return LatentWire(**TINY | {"frozen": str(folder / "frozen")} | options)


def batch_of(task, rows=4):
    data = task.data()
    return default_collate([data[i] for i in range(rows)])


def train(folder, name, *more):
    words = [sys.executable, "-m", "lockstep.cli", "train", "latent_wire", "preset=tiny", f"run_dir={name}"]
    words += ["micro_batch=8", "threads=1", "checkpoint.every=5", f"task.frozen={folder / 'frozen'}", *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(folder):
    """One process; and two, of which one is killed in the middle."""
    train(folder, "one")
    with fail_at(rank=1, step=12, phase="compute", how="kill"):
        assert "restarting 2 ranks" in train(folder, "two", "--nproc", "2")
    return folder


def test_one_process_and_two_that_were_disturbed_give_the_same_wire(runs):
    one, two = (load_file(runs / name / "model.safetensors") for name in ("one", "two"))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5


def test_frozen_readers_are_left_out_of_checkpoints(runs):
    checkpoint = max((runs / "two" / "checkpoints").glob("step-*"))
    names = set()
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    assert any("encoder" in name for name in names)
    assert not any("readers." in name for name in names)
    assert "readers.0.embed.weight" in (checkpoint / "manifest.json").read_text()  # its digest


def test_the_cost_falls(runs):
    lines = [json.loads(line) for line in (runs / "one" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]


# ---- the world ----


def test_every_text_of_a_kind_has_one_length():
    world = FactWorld(facts=2, questions=3)
    tokenizers = [make() for make in TOKENIZERS.values()]
    data = FactData(world, "train", 50, tokenizers)
    shapes = {tuple((name, tuple(tensor.shape)) for name, tensor in data[i].items()) for i in range(50)}
    assert len(shapes) == 1


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_no_two_words_look_alike(kind):
    tokenizer = TOKENIZERS[kind]()
    written = {tuple(tokenizer.ids(word)) for word in WORDS}
    assert len(written) == len(WORDS)
    assert max(max(ids) for ids in written) < tokenizer.size
    assert 0 not in set(itertools.chain(*written))  # that begins a sequence


def test_training_never_sees_a_held_out_fact():
    world = FactWorld(facts=2)
    seen, kept = ({fact for i in range(300) for fact in world.sample(split, i).facts} for split in ("train", "test"))
    assert not any(fact.held_out for fact in seen)
    assert all(fact.held_out for fact in kept)


def test_questions_about_a_context_are_different_and_their_answers_true():
    world = FactWorld(facts=2, questions=8)
    for i in range(50):
        sample = world.sample("train", i)
        asked = [" ".join(words) for words, _ in sample.questions]
        assert len(set(asked)) == 8
        assert len({fact.name for fact in sample.facts}) == len({fact.item for fact in sample.facts}) == 2
        for words, expected in sample.questions:
            [fact] = [fact for fact in sample.facts if words[1] in (fact.name, fact.item)]
            kinds = {"colour": fact.colour, "item": fact.item, "place": fact.place, "who": fact.name}
            assert expected == kinds[words[0]]


def test_a_sample_depends_on_nothing_but_its_index():
    once, again = (FactData(FactWorld(), "test", 9, [TOKENIZERS["pieces"]()]) for _ in range(2))
    [again[i] for i in range(5)]
    assert all(torch.equal(tensor, again[8][name]) for name, tensor in once[8].items())
    assert torch.equal(once[8]["other"], once[0]["context"])


# ---- readers ----


def test_a_reader_is_trained_once_and_a_changed_one_is_refused(tmp_path):
    make = lambda: frozen_reader(tmp_path, SHAPE, FactWorld(), Schooling(enough=0.0))
    first = make()
    [weights] = tmp_path.glob("*.safetensors")
    written = weights.stat().st_mtime_ns
    again = make()
    assert weights.stat().st_mtime_ns == written
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not any(p.requires_grad for p in first.parameters())
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(UserError, match="not those that were trained"):
        make()


def test_a_reader_that_does_not_learn_is_not_frozen(tmp_path):
    with pytest.raises(UserError, match=r"task\.reader_steps"):
        frozen_reader(tmp_path, SHAPE, FactWorld(), Schooling(enough=1.0, most_steps=25))
    assert not list(tmp_path.glob("*.json"))


def test_a_reader_stays_at_home_when_the_model_moves():
    reader = Reader(9, SHAPE).settle("cpu")
    around = torch.nn.ModuleList([torch.nn.Linear(2, 2), reader]).to("meta")
    assert around[0].weight.is_meta
    assert reader.device.type == "cpu"


def test_frozen_readers_do_not_change_their_ways_in_training():
    reader = Reader(9, SHAPE).settle(None)
    torch.nn.ModuleList([reader]).train()
    assert not reader.training


def test_teacher_forced_answers_are_those_of_greedy_decoding():
    torch.manual_seed(1)
    reader = Reader(9, ReaderShape("words", 16, 2, 2))
    question = torch.randint(1, 9, (400, 2))
    before = reader.beginning(400)
    ids = question
    for _ in range(2):
        ids = torch.cat((ids, reader(torch.cat((before, reader.embed(ids)), 1))[:, -1:].argmax(-1)), 1)
    expected = ids[:, 2:].clone()
    expected[::3, 0] = (expected[::3, 0] + 1) % 9
    right = answer(reader, before, question, expected).right
    assert right[::3].sum() == 0
    assert right.sum() == 400 - len(right[::3])


def test_a_reader_without_context_cannot_see_it(folder):
    task = task_of(folder)
    reader, batch = task.model().readers[0], batch_of(task)
    none = from_text(reader, batch, 0, most=0)
    changed = from_text(reader, batch | {"text_0": batch["text_0"].flip(0)}, 0, most=0)
    assert torch.equal(none.logits, changed.logits)
    assert not torch.equal(from_text(reader, batch, 0).logits, none.logits)


# ---- the wire ----

EVERYTHING = {"refiner": 1, "deep_prefix": True, "gist": True, "film": True, "teacher": 1.0}


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_gradients_reach_every_trainable_part_and_no_frozen_one(folder, options):
    task = task_of(folder, **options)
    model = task.model()
    task.loss(model, batch_of(task)).total.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (not name.startswith("readers.")), name


def test_the_loss_is_a_sum_over_questions(folder):
    task = task_of(folder, **EVERYTHING)
    model, batch = task.model(), batch_of(task)
    whole = task.loss(model, batch)
    parts = [task.loss(model, {name: t[i : i + 1] for name, t in batch.items()}) for i in range(4)]
    assert whole.weight == sum(part.weight for part in parts) == 8
    assert torch.allclose(whole.total, sum(part.total for part in parts), rtol=1e-5)


def test_vectors_arrive_at_the_size_of_the_readers_embeddings(folder):
    model = (task := task_of(folder)).model()
    vectors = model.adapters[1](model.latents(batch_of(task)["context"]))
    size = model.readers[1].embed.weight.pow(2).mean().sqrt()
    assert torch.allclose(vectors.pow(2).mean().sqrt(), size, rtol=0.05)


def test_what_the_wire_carries_is_what_is_read(folder):
    task = task_of(folder)
    model, batch = task.model(), batch_of(task)
    other = model(batch, "other")[0].answered.logits
    assert torch.equal(other, model(batch | {"context": batch["other"]})[0].answered.logits)
    assert not torch.equal(other, model(batch)[0].answered.logits)


def test_wrong_options_are_named_together():
    with pytest.raises(ConfigError) as error:
        LatentWire(questions=5, width=50, readers=[["runes", 64, 2, 4]], reader_homes=["cpu", "cpu"])
    assert len(error.value.problems) == 4


def test_a_fact_says_its_words():
    fact = Fact("anna", "red", "ball", "barn")
    assert fact.question(3) == (["who", "ball", "?"], "anna")
