"""Two frozen readers and the wire between them: its parts, and a small run on one process, and on two with a kill."""

import itertools
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import preloaded
from lockstep.errors import UserError
from lockstep.recipes.latent_wire import LatentWire
from lockstep.recipes.latent_wire.data import TOKENIZERS, WireData
from lockstep.recipes.latent_wire.reader import Reader, ReaderShape, answer, decode
from lockstep.recipes.latent_wire.reader_training import (
    ReaderTraining,
    TrainingOptions,
    frozen_reader,
    sequence_loss,
    training_batches,
)
from lockstep.recipes.latent_wire.wire import from_replay, from_text
from lockstep.recipes.latent_wire.worlds import BLANK, KEYWORDS, TOPICS, FactWorld, TopicWorld
from lockstep.testing import fail_at
from ranks.support import assert_user_errors, train

ROOT = Path(__file__).parent.parent.parent
TINY = LatentWire.presets["tiny"]["task"]
SHAPE = ReaderShape("words", 16, 1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("wire")


def task_of(folder, **options):
    return LatentWire(**TINY | {"frozen": str(folder / "frozen")} | options)


def batch_of(task, rows=4):
    return task.data().__getitems__(range(rows))


SETTINGS = {"preset": "tiny", "micro_batch": 8, "threads": 1, "checkpoint.every": 5, "log.every": 5}


def train_two(folder):
    words = ["train", "latent_wire", "--nproc", "2", "run_dir=two"]
    words += [f"{key}={value}" for key, value in SETTINGS.items()] + [f"task.frozen={folder / 'frozen'}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = preloaded.run(*words, cwd=folder, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(pool, folder):
    """One process; and two, of which one is killed in the middle."""
    more = {"run_dir": str(folder / "one"), "task.frozen": str(folder / "frozen")}
    pool.run(train, LatentWire, SETTINGS | more, world=1)
    with fail_at(rank=1, step=12, phase="compute", how="kill"):
        assert "restarting 2 ranks" in train_two(folder)
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


def test_a_wire_does_not_resume_with_other_readers(pool, runs):
    """Nor with those of another version; the error says what to do."""
    more = {
        "task.frozen": str(runs / "others"),
        "task.reader_accuracy": 0.0,
        "run_dir": str(runs / "next"),
        "steps": 30,
    }
    more["resume"] = str(max((runs / "one" / "checkpoints").glob("step-*")))
    (error,) = pool.errors(train, LatentWire, SETTINGS | more, world=1)
    assert_user_errors([error], "the frozen parameter", "resumes only with the Lockstep that wrote it")


def test_the_cost_falls(runs):
    lines = [json.loads(line) for line in (runs / "one" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


# ---- the worlds ----

WORLDS = [FactWorld(facts=2, questions=3), TopicWorld()]


def said(world, split, count):
    """(context, [(question, answer)]) in words."""
    drawn = world.draw(split, np.arange(count))
    words = np.array(world.words)
    for context, questions, answers in zip(drawn.context, drawn.question, drawn.answer, strict=True):
        yield list(words[context]), [(list(words[q]), words[a]) for q, a in zip(questions, answers, strict=True)]


@pytest.mark.parametrize("world", WORLDS, ids=["facts", "topics"])
@pytest.mark.parametrize("mode", ["context", "prompt"])
def test_a_sample_is_the_same_alone_and_in_a_batch(world, mode):
    data = WireData(world, "train", 50, [make(world.words) for make in TOKENIZERS.values()], mode)
    batch = data.__getitems__([7, 3, 49])
    for row, index in enumerate([7, 3, 49]):
        assert all(torch.equal(tensor, batch[name][row]) for name, tensor in data[index].items())
    other = data[(49 + 1) % 50]["context"]
    part = slice(None) if mode == "context" else (..., slice(0, 8 * 10))  # the question is this sample's
    assert torch.equal(batch["other"][2][part], other[part])
    assert not torch.equal(batch["other"][2], batch["context"][2])


@pytest.mark.parametrize("world", WORLDS, ids=["facts", "topics"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_no_two_words_look_alike(kind, world):
    tokenizer = TOKENIZERS[kind](world.words)
    written = {tuple(tokenizer.encode(np.array([number]))) for number in range(len(world.words))}
    assert len(written) == len(world.words)
    assert max(max(ids) for ids in written) < tokenizer.size
    assert 0 not in set(itertools.chain(*written))  # that begins a sequence


def test_no_two_splits_share_a_fact():
    facts = {
        split: {tuple(context[i : i + 4]) for context, _ in said(FactWorld(facts=2), split, 3000) for i in (0, 5)}
        for split in ("train", "validation", "test")
    }
    assert len(facts["train"]) > 1500  # of 1920
    assert len(facts["validation"]) == 128
    assert len(facts["test"]) == 256
    assert len(set.union(*facts.values())) == sum(map(len, facts.values()))


def test_readers_are_never_trained_or_validated_on_test_contexts(tmp_path, monkeypatch):
    drawn, draw = set(), FactWorld.draw
    monkeypatch.setattr(FactWorld, "draw", lambda world, split, ids: drawn.add(split) or draw(world, split, ids))
    frozen_reader(tmp_path, SHAPE, FactWorld(), TrainingOptions(accuracy=0.0, batch=8))
    assert drawn == {"train", "validation"}


def test_questions_about_a_context_are_different_and_their_answers_true():
    for context, questions in said(FactWorld(facts=2, questions=8), "train", 50):
        facts = [context[:4], context[5:9]]
        assert context[4] == context[9] == "."
        assert len({name for name, *_ in facts}) == len({item for _, _, item, _ in facts}) == 2
        assert len({" ".join(words) for words, _ in questions}) == 8
        for (kind, about, mark), expected in questions:
            [(name, colour, item, place)] = [fact for fact in facts if about in fact]
            assert (about, mark) == (item if kind == "who" else name, "?")
            assert expected == {"colour": colour, "item": item, "place": place, "who": name}[kind]


def test_a_sentence_is_about_the_topic_that_most_of_its_words_belong_to():
    topic_of = {word: topic for topic, words in KEYWORDS.items() for word in words.split()}
    assert len(topic_of) == 72
    answers, lengths = Counter(), set()
    for context, [(question, expected)] in said(TopicWorld(), "test", 600):
        assert question == ["topic", "?"]
        words = context[: context.index(BLANK)] if BLANK in context else context
        assert set(context[len(words) :]) <= {BLANK}
        [(best, most), *rest] = Counter(topic_of[word] for word in words if word in topic_of).most_common()
        assert best == expected
        assert most > (rest[0][1] if rest else 0)
        answers[expected] += 1
        lengths.add(len(words))
    assert lengths == set(range(12, 21))
    assert set(answers) == set(TOPICS)
    assert min(answers.values()) > 60


# ---- readers ----


def test_a_reader_is_trained_once_and_a_changed_one_is_refused(tmp_path):
    make = lambda: frozen_reader(tmp_path, SHAPE, FactWorld(), TrainingOptions(accuracy=0.0))
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
        frozen_reader(tmp_path, SHAPE, FactWorld(), TrainingOptions(accuracy=1.0, most_steps=25))
    assert not list(tmp_path.glob("*.json"))


def test_an_interrupted_training_resumes_with_the_same_bits(tmp_path, monkeypatch):
    """Two worlds, of one fact and of two: the validation at step 4 opens the second, the one at step 8 ends it."""

    def training(saved):
        torch.manual_seed(0)
        reader = Reader(TOKENIZERS["words"](FactWorld().words).size, SHAPE)
        options = TrainingOptions(
            accuracy=0.0, most_steps=20, batch=8, easier_first=True, validate_every=4, save_every=6
        )
        return ReaderTraining(reader, FactWorld(facts=2), options, tmp_path / saved)

    undisturbed, broken = training("undisturbed"), training("broken")
    assert undisturbed.run()["steps"] == 8
    step = broken._step
    monkeypatch.setattr(broken, "_step", lambda: step() if broken.progress.step < 7 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        broken.run()
    again = training("broken")
    assert (again.progress.step, again.progress.stage) == (6, 1)
    assert again.run()["steps"] == 8
    pairs = zip(undisturbed.reader.parameters(), again.reader.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not list(tmp_path.iterdir())


def test_facts_are_learned_one_two_four_at_a_time():
    assert [world.facts for world in FactWorld(facts=4, questions=8).easier()] == [1, 2]
    assert [world.questions for world in FactWorld(facts=4, questions=8).easier()] == [4, 8]
    assert FactWorld(facts=1).easier() == []
    at_once, in_turn = (LatentWire(facts=4, reader_curriculum=on).reader_training for on in (False, True))
    assert (at_once.easier_first, in_turn.easier_first) == (False, True)


def test_the_loss_of_a_first_answer_is_the_same_alone_and_in_a_sequence():
    """Later questions of a sequence have no effect on earlier ones."""
    torch.manual_seed(0)
    world = FactWorld(facts=2, questions=3)
    reader = Reader(TOKENIZERS["pieces"](world.words).size, SHAPE)
    rows = WireData(world, "train", 99, [TOKENIZERS["pieces"](world.words)]).__getitems__(range(5))
    first = {
        name: tensor[:, :1] if name.startswith(("question", "answer")) else tensor for name, tensor in rows.items()
    }
    ids, positions = next(training_batches(world, TOKENIZERS["pieces"](world.words), 5, 0, "cpu"))
    assert positions.shape == (3 * 2,)
    assert torch.equal(ids[:, positions], rows["answer_0"].flatten(1))
    alone = from_text(reader, first, 0).cost.mean()
    assert torch.allclose(sequence_loss(reader, ids, positions[:2]), alone, atol=1e-5)


def test_a_reader_stays_on_its_device_when_the_model_moves():
    reader = Reader(9, SHAPE).freeze("cpu")
    around = torch.nn.ModuleList([torch.nn.Linear(2, 2), reader]).to("meta")
    assert around[0].weight.is_meta
    assert reader.device.type == "cpu"


def test_frozen_readers_stay_in_evaluation_mode():
    reader = Reader(9, SHAPE).freeze(None)
    torch.nn.ModuleList([reader]).train()
    assert not reader.training


def test_teacher_forced_answers_are_those_of_greedy_decoding():
    torch.manual_seed(1)
    reader = Reader(9, ReaderShape("words", 16, 2, 2))
    question = torch.randint(1, 9, (400, 2))
    before = reader.embed(torch.zeros(400, 1, dtype=torch.int64))
    ids = question
    for _ in range(2):
        ids = torch.cat((ids, reader(torch.cat((before, reader.embed(ids)), 1))[:, -1:].argmax(-1)), 1)
    expected = ids[:, 2:].clone()
    assert torch.equal(decode(reader, before, question, 2), expected)
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


def test_embeddings_in_place_of_the_wire_are_the_text(folder):
    task = task_of(folder)
    reader, batch = task.model().readers[1], batch_of(task)
    assert torch.allclose(from_replay(reader, batch, 1).logits, from_text(reader, batch, 1).logits, atol=1e-5)
    shuffled = batch | {"text_1": batch["text_1"].flip(0)}
    assert not torch.allclose(from_replay(reader, shuffled, 1).logits, from_text(reader, batch, 1).logits, atol=1e-3)


def test_positions_near_each_other_are_mixed_and_only_backwards():
    torch.manual_seed(0)
    plain, mixing = Reader(9, SHAPE), Reader(9, replace(SHAPE, near=3))
    mixing.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(1, 8, 16)
    assert torch.equal(mixing(x), plain(x))  # at first nothing is
    torch.nn.init.normal_(mixing.blocks[0].near.weight)
    changed = x.clone()
    changed[:, 4] += 1.0
    differs = (mixing.blocks[0].near(x) - mixing.blocks[0].near(changed)).abs().amax((0, 2)) > 1e-6
    assert differs.nonzero().flatten().tolist() == [4, 5, 6]
