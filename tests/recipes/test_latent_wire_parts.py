"""The trainable parts around frozen readers: what each adds, and that without effect it adds nothing."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from lockstep import fit
from lockstep.errors import ConfigError
from lockstep.recipes.latent_wire import LatentWire
from lockstep.recipes.latent_wire.metrics import compression, distinct, f1
from lockstep.recipes.latent_wire.wire import distance_bias, from_text

TINY = LatentWire.presets["tiny"]["task"] | {"reader_accuracy": 0.0}
EVERYTHING = {
    "refiner": 1, "deep_prefix": True, "gist": True, "film": True, "teacher": 1.0, "latent_adapter": [0], "lora": 2,
    "colour": True, "private": 1, "mode": "prompt",
}  # fmt: skip


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    return tmp_path_factory.mktemp("readers")


def made(frozen, rows=4, **options):
    """(task, model, batch); models with the same options and more begin with the same numbers where both have them."""
    task = LatentWire(**TINY | {"frozen": str(frozen)} | options)
    torch.manual_seed(0)
    return task, task.model(), task.data().__getitems__(range(rows))


def logits(model, batch):
    return [read.answered.logits for read in model(batch)]


@pytest.mark.parametrize("options", [{}, EVERYTHING, {"world": "topics"}], ids=["plain", "everything", "topics"])
def test_gradients_reach_every_trainable_part_and_no_frozen_one(frozen, options):
    task, model, batch = made(frozen, **options)
    task.loss(model, batch).total.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (not name.startswith("readers.")), name


def test_the_loss_is_a_sum_over_questions(frozen):
    task, model, batch = made(frozen, **EVERYTHING)
    whole = task.loss(model, batch)
    parts = [task.loss(model, {name: t[i : i + 1] for name, t in batch.items()}) for i in range(4)]
    assert whole.weight == sum(part.weight for part in parts) == 8
    assert torch.allclose(whole.total, sum(part.total for part in parts), rtol=1e-5)


@pytest.mark.parametrize("colour", [False, True])
def test_vectors_arrive_at_the_size_of_the_readers_embeddings(frozen, colour):
    _, model, batch = made(frozen, rows=64, colour=colour)
    with torch.no_grad():
        vectors = model.adapters[1](model.latents(batch["context"]))
    weight = model.readers[1].embed.weight
    assert torch.allclose(vectors.pow(2).mean().sqrt(), weight.pow(2).mean().sqrt(), rtol=0.1)
    adapter = model.adapters[1]
    if colour:  # a vector of ones and minus ones would have exactly the embeddings' mean and deviation per channel
        assert torch.allclose(adapter.mean * adapter.first_size, weight.mean(0), atol=1e-6)
        assert torch.allclose(adapter.std * adapter.first_size, weight.std(0), atol=1e-6)
        plain = (vectors / adapter.first_size - adapter.mean) / adapter.std
        assert torch.allclose(plain.mean(-1), torch.zeros(()), atol=1e-4)


def test_what_the_wire_carries_is_what_is_read(frozen):
    _, model, batch = made(frozen)
    other = model(batch, "other")[0].answered.logits
    assert torch.equal(other, model(batch | {"context": batch["other"]})[0].answered.logits)
    assert not torch.equal(other, model(batch)[0].answered.logits)


def test_each_vector_sees_its_own_part_of_the_text_best(frozen):
    _, model, batch = made(frozen, vectors=4, private=2, spread=True)
    pool = model.encoder.pool
    assert torch.allclose(pool.centres, torch.tensor([1, 3, 5, 7, 2, 6, 2, 6]) / 8)  # shared, and each reader's own
    (score,) = distance_bias(pool.centres, heads=4, length=16)
    assert score.shape == (4, 8, 16)
    assert score[0].argmax(-1).tolist() == [1, 5, 9, 13, 3, 11, 3, 11]
    assert torch.equal(score[1], score[0] / 2)
    assert not score[-1].any()
    seen = batch["context"].clone()
    seen[:, -1] = 0  # a change at the end of the text is noticed at the end of the wire most
    with torch.no_grad():
        change = (model.latents(seen) - model.latents(batch["context"])).norm(dim=-1).mean(0)
    assert change[3] > 2 * change[0]


@pytest.mark.parametrize(("options", "shapes"), [
    ({"refiner": 2}, [(4, 40, 32), (4, 2, 32), (8, 6, 32), (8, 34, 48)]),
    ({"latent_adapter": [0, 1], "lora": 2}, [(4, 40, 32), (8, 6, 32), (8, 34, 48)]),
], ids=["plain", "additions"])  # fmt: skip
def test_one_graph_for_each_stack_of_blocks_and_none_for_an_evaluation(frozen, options, shapes):
    readers = [["words", 32, 2, 2, 2], ["bytes", 48, 2, 2, 4]]
    task, model, batch = made(frozen, layers=2, near=3, readers=readers, **options)
    graphs = []

    def backend(graph, given):
        graphs.append(next(tuple(one.shape) for one in given if one.dim() == 3))
        return graph.forward

    task.loss(model, batch).total.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    torch.compiler.reset()
    model.compile(backend=backend)
    for _ in range(2):
        model.zero_grad()
        task.loss(model, batch).total.backward()
        with torch.no_grad():
            task.eval_loss(model, {name: tensor[:3] for name, tensor in batch.items()})
    assert graphs == shapes
    assert all(torch.equal(gradient, model.get_parameter(name).grad) for name, gradient in plain.items())


# ---- parts that begin without effect ----


@pytest.mark.parametrize("options", [{"lora": 8}, {"latent_adapter": [0]}], ids=["lora", "latent_adapter"])
def test_a_new_part_changes_nothing_at_first_and_something_when_trained(frozen, options):
    _, plain, batch = made(frozen)
    _, model, _ = made(frozen, **options)
    for with_part, without in zip(logits(model, batch), logits(plain, batch), strict=True):
        assert torch.equal(with_part, without)
    for name, parameter in model.aids.named_parameters():
        if name.endswith((".b", ".gate")):
            torch.nn.init.constant_(parameter, 0.3)
    for with_part, without in zip(logits(model, batch), logits(plain, batch), strict=True):
        assert not torch.allclose(with_part, without, atol=1e-3)


def test_a_closed_gate_can_open(frozen):
    task, model, batch = made(frozen, latent_adapter=[0])
    task.loss(model, batch).total.backward()
    assert all(aids.looks[0].gate.grad != 0 for aids in model.aids)


def test_low_rank_changes_are_trained_and_saved_and_the_readers_are_not(frozen, tmp_path):
    task, model, _ = made(frozen, lora=2, size=32, eval_size=8)
    trained = {name for name, p in model.named_parameters() if p.requires_grad and "lora" in name}
    assert trained == {f"aids.{r}.lora.0.{part}.{m}" for r in (0, 1) for part in ("qkv", "out") for m in ("a", "b")}
    assert model.aids[0].lora[0].qkv.a.shape == (32, 2)
    before = {name: p.clone() for name, p in model.readers.named_parameters()}
    fit(task, steps=2, global_batch=8, threads=1, run_dir=str(tmp_path), checkpoint={"frozen": False, "every": 2})
    [checkpoint] = (tmp_path / "checkpoints").glob("step-*")
    names: set[str] = set()
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    assert all(any(one in name for name in names) for one in trained)
    assert not any("readers." in name for name in names)
    _, again, _ = made(frozen, lora=2)
    assert all(torch.equal(p, before[name]) for name, p in again.readers.named_parameters())


# ---- who sees what ----


def test_private_vectors_reach_one_reader_only(frozen):
    _, model, batch = made(frozen, private=1)
    latents = model.latents(batch["context"])
    assert latents.shape[1] == 2 + 2 * 1
    assert [model.seen_by(number, latents).shape[1] for number in (0, 1)] == [3, 3]
    before = logits(model, batch)
    with torch.no_grad():
        model.encoder.pool.queries[3] += 1.0  # the last is reader b's own
    after = logits(model, batch)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_in_prompt_mode_the_question_goes_through_the_wire(frozen):
    _, model, batch = made(frozen, mode="prompt")
    assert batch["context"].shape[:2] == (4, 2)  # a wire for each question
    assert not torch.equal(batch["context"][:, 0], batch["context"][:, 1])
    asked = batch | {name: t.flip(1) for name, t in batch.items() if name.startswith("question")}
    assert torch.equal(logits(model, batch)[0], logits(model, asked)[0])  # the reader never sees it as text
    carried = batch | {"context": batch["context"].flip(1)}
    assert not torch.equal(logits(model, batch)[0], logits(model, carried)[0])
    _, plain, in_context = made(frozen)
    asked = in_context | {name: t.flip(1) for name, t in in_context.items() if name.startswith("after")}
    assert in_context["context"].dim() == 2
    assert not torch.equal(logits(plain, in_context)[0], logits(plain, asked)[0])


# ---- what is measured ----


def test_an_evaluation_reports_all_ways_of_asking(frozen):
    task, model, _ = made(frozen)
    with torch.no_grad():
        found = task.eval_loss(model.eval(), task.eval_data().__getitems__(range(32)))
    ways = ("exact", "first", "f1", "text", "replay", "none", "cut", "other", "other_above_none", "of_text", "variety")
    assert set(found.metrics) == {f"{letter}_{way}" for letter in "ab" for way in ways} | {"alike"}
    assert found.metrics["a_replay"] == found.metrics["a_text"]
    assert found.metrics["b_exact"] <= found.metrics["b_f1"]
    assert found.metrics["a_of_text"] == (found.metrics["a_exact"], found.metrics["a_text"])
    written, expected = found.metrics["a_variety"]
    assert 1 <= written < expected  # a wire that has learned nothing says the same of everything


def test_f1_counts_tokens_in_any_order_but_no_blanks():
    said = torch.tensor([[1, 2, 3, 9], [3, 2, 1, 9], [1, 1, 9, 9], [4, 4, 4, 4]])
    expected = torch.tensor([[1, 2, 3, 9]]).expand(4, 4)
    assert torch.allclose(f1(said, expected, blank=9), torch.tensor([1.0, 1.0, 2 * 1 / 5, 0.0]))
    assert torch.allclose(f1(said, expected, blank=None)[2], torch.tensor(2 * 2 / 8))
    assert distinct(said) == 4
    assert distinct(expected) == 1


@pytest.mark.parametrize("mode", ["context", "prompt"])
def test_compression_counts_text_without_its_filling(frozen, mode):
    task, _, _ = made(frozen, mode=mode, private=1)
    shown = compression(task.eval_data(), task.shape)
    words = task.world.words
    drawn = task.world.draw("test", torch.arange(64).numpy())
    texts = [" ".join(words[i] for i in context) + " " for context in drawn.context]
    asked = [" ".join(words[i] for i in q) + " " for q in drawn.question.reshape(-1, 3)] if mode == "prompt" else [""]
    size = sum(map(len, texts)) / len(texts) + sum(map(len, asked)) / len(asked)
    assert f"carried: {size:.0f} bytes of text, {'8 and 14' if mode == 'prompt' else '5 and 9'} tokens" in shown
    assert f"4 vectors, {4 * 32 * 2} bytes in bf16, {4 * 32} in 8 bits" in shown
    assert f"tokens per vector: {'2.7 and 4.7' if mode == 'prompt' else '1.7 and 3.0'}" in shown


def test_the_teacher_is_the_reader_that_sees_the_text(frozen):
    task, model, batch = made(frozen, teacher=1.0)
    plain, _, _ = made(frozen)
    read = model(batch)
    said = [task._from_teacher(model, batch, number, read[number]) for number in (0, 1)]
    assert min(said) > 0
    assert torch.allclose(task.loss(model, batch).total - plain.loss(model, batch).total, sum(said), rtol=1e-4)
    perfect = replace(read[0], answered=from_text(model.readers[0], batch, 0))
    assert abs(task._from_teacher(model, batch, 0, perfect)) < 1e-6


def test_wrong_options_are_named_together():
    with pytest.raises(ConfigError) as error:
        LatentWire(questions=5, width=50, readers=[["runes", 64, 2, 4]], reader_homes=["cpu", "cpu"])
    assert len(error.value.problems) == 4 + 1  # the questions for the readers follow the others
    with pytest.raises(ConfigError) as error:
        LatentWire(world="letters", mode="whisper", lora=-1, latent_adapter=[2])
    assert len(error.value.problems) == 4  # both readers have two layers, which is one problem
    with pytest.raises(ConfigError, match=r"set task\.world=topics"):
        LatentWire(world="topic")
    with pytest.raises(ConfigError, match="has 0 readers"):
        LatentWire(readers=[])
