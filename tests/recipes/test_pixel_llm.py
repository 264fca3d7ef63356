"""The captioning recipe: its parts, and its smallest run on one process, on two, and with one of two killed."""

import itertools
import json
import os
import struct
import subprocess
import sys
import zlib
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import default_collate

import lockstep
import preloaded
from lockstep.errors import ConfigError, UserError
from lockstep.recipes.pixel_llm import PixelLLM
from lockstep.recipes.pixel_llm.drawing import Thing, _grid, _inside, _put, draw
from lockstep.recipes.pixel_llm.folder import ImageFolder, export, read_folder
from lockstep.recipes.pixel_llm.generation import generate, next_word
from lockstep.recipes.pixel_llm.model import Cache
from lockstep.recipes.pixel_llm.png import SIGNATURE, read_png, write_png
from lockstep.recipes.pixel_llm.scenes import COMP, IID, KINDS, TRAIN, Sample, ShapeScenes, is_held_out, relation
from lockstep.recipes.pixel_llm.task import SCENE_OPTIONS
from lockstep.recipes.pixel_llm.words import BOS, EOS, PAD, Words
from ranks.support import train

ROOT = Path(__file__).parent.parent.parent
TINY = PixelLLM.presets["tiny"]["task"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}


def command(*words, cwd):
    done = preloaded.run_python(*words, cwd=cwd, env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- runs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory):
    """`one`, and `two` with a rank killed, of the acceptance run; `undisturbed`: two ranks with the same settings."""
    folder = tmp_path_factory.mktemp("runs")
    script = Path(__file__).with_name("pixel_acceptance.py")
    output = command(str(script), "--steps", "40", "--preset", "tiny", "--out", "runs", cwd=folder)
    values = {"preset": "tiny", "micro_batch": 8, "threads": 1, "run_dir": str(folder / "runs" / "undisturbed")}
    pool.run(train, PixelLLM, values, world=2)
    return folder / "runs", output


def test_one_process_and_two_give_the_same_losses(runs):
    folder, output = runs
    assert output.splitlines()[-1] == "pass"
    assert "restarts of the two processes: 1" in output  # resumed from the checkpoint in the middle
    one, two = (load_file(folder / name / "model.safetensors") for name in ("one", "two"))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-5


def test_a_killed_rank_changes_no_bit(runs):
    folder, _ = runs
    killed, undisturbed = (load_file(folder / name / "model.safetensors") for name in ("two", "undisturbed"))
    assert all(torch.equal(killed[name], undisturbed[name]) for name in undisturbed)


def test_the_tiny_preset_reaches_its_goals(runs):
    folder, _ = runs
    summary = json.loads((folder / "undisturbed" / "summary.json").read_text())
    assert summary["pass"], summary["goals"]
    assert {goal["target"] for goal in summary["goals"]} == {"iid_place >= 0.9", "iid_colour >= 0.5"}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_it_trains_in_half_precision(tmp_path, precision):
    values = PixelLLM.presets["tiny"] | {"task": {}, "goals": [], "steps": 12, "evaluate": {"at_end": False}}
    task = PixelLLM(**TINY)
    done = lockstep.fit(
        task, values, precision=precision, run_dir=tmp_path / "run", **{"log.progress": "off", "log.every": 3}
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert done.summary["applied"] + done.summary["skipped"] == 12
    assert ("scale" in rows[-1]) == (precision == "fp16")


def test_layers_that_are_computed_again_give_the_same_weights(tmp_path):
    task = PixelLLM(**TINY | {"vision_layers": 2, "text_layers": 2})
    found = []
    for layers in ({}, {"remat": "full", "blocks": ["EncoderLayer", "DecoderLayer"]}):
        values = {"preset": None, "steps": 2, "global_batch": 4, "evaluate.at_end": False, "log.progress": "off"}
        found.append(lockstep.fit(task, values | layers, run_dir=tmp_path / f"run-{len(found)}").weights)
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-6) for name in found[0])


# ---- scenes -------------------------------------------------------------------------------------------------


def test_a_scene_is_a_function_of_seed_split_and_number():
    one, again = (ShapeScenes(KINDS["many"], 64, TRAIN, 50, seed=3) for _ in range(2))
    order = [41, 0, 7]
    assert all(torch.equal(one[i].image, again[i].image) for i in order)
    first = [again[i] for i in order]
    assert all(torch.equal(a.ids, one[i].ids) for a, i in zip(first, order, strict=True))
    others = [
        ShapeScenes(KINDS["many"], 64, TRAIN, 50, seed=4)[0],
        ShapeScenes(KINDS["many"], 64, "iid", 50, seed=3)[0],
    ]
    assert all(not torch.equal(one[0].image, other.image) for other in [*others, one[1]])


@pytest.mark.parametrize(
    ("kind", "size", "digests"),
    [
        ("few", 16, "387a7065 3da3f32f 1338d5f2"),
        ("one", 32, "cd6ed6ab 481e4634 14112411"),
        ("pair", 48, "c57a46c5 ecc56baf 3ec74b31"),
        ("many", 64, "b62c8528 adc147f7 18deaee3"),
    ],
    ids=str,
)
def test_pictures_and_captions_never_change(kind, size, digests):
    """The results in the log were measured on these pictures, which are the same one by one and in batches."""
    for split, expected in zip((TRAIN, IID, COMP), digests.split(), strict=True):
        data = ShapeScenes(KINDS[kind], size, split, 10**7, seed=2)
        order = [*range(24), 9_999_999]
        batch = data.__getitems__(order)
        one_by_one = default_collate([data[i] for i in reversed(order)])
        assert all(torch.equal(a, b.flip(0)) for a, b in zip(batch, one_by_one, strict=True))
        assert blake2b(b"".join(rows.numpy().tobytes() for rows in batch), digest_size=4).hexdigest() == expected
    with pytest.raises(IndexError):
        data.__getitems__([0, 10**7])


def test_things_with_different_names_look_different():
    """An outlined ring was once an outlined circle, pixel by pixel. Bright, without noise, in the same place."""
    kind, quiet = KINDS["many"], SimpleNamespace(uniform=lambda *_: 0.0, standard_normal=np.zeros)
    for radius in (4.8, 6.0, 8.4, 10.4):
        things = [
            Thing("white", shape, texture, 15.7, 16.2, radius, 1.0)
            for shape in kind.shapes
            for texture in kind.textures
        ]
        pictures = [draw([thing], 32, quiet) for thing in things]
        for one, other in itertools.combinations(pictures, 2):
            assert (one != other).any(0).sum() > 4


@pytest.mark.parametrize("shape", KINDS["many"].shapes)
def test_a_thing_is_drawn_completely(shape):
    """The part of the picture that is searched covers every shape, at the border too."""
    for x, y, radius in ((15.7, 16.2, 9.9), (1.3, 30.9, 5.0), (40.0, 16.0, 5.0)):
        thing = Thing("white", shape, "solid", x, y, radius, 1.0)
        image = np.zeros((3, 32, 32), np.float32)
        _put(thing, image)
        across, down = _grid(32)
        assert np.array_equal(image[0] > 0, _inside(shape, across - np.float32(x), down - np.float32(y), radius))


def test_training_never_shows_what_is_held_out():
    kind = KINDS["one"]
    seen, held_out = (
        {" ".join(ShapeScenes(kind, 32, split, 400).scene(i).caption) for i in range(400)} for split in (TRAIN, COMP)
    )
    assert not seen & held_out
    assert 12 <= len(held_out) <= 36  # a tenth of 240 combinations, as a hash happens to choose
    assert len(seen) > 150


@pytest.mark.parametrize("name", ["pair", "many"])
def test_a_scene_has_one_right_caption(name):
    data = ShapeScenes(KINDS[name], 64, TRAIN, 60)
    lengths = set()
    for index in range(60):
        scene = data.scene(index)
        colours = [KINDS[name].colours.index(thing.colour) for thing in scene.things]
        assert colours == sorted(set(colours))  # which thing is named first can be seen
        relations = [part.word for part in scene.parts if part.slot == "relation"]
        spots = [(thing.x, thing.y) for thing in scene.things]
        assert relations == [relation(a, b) for a, b in itertools.pairwise(spots)]
        lengths.add(len(scene.caption))
        assert is_held_out(scene) is False
    assert max(lengths) <= KINDS[name].words.longest
    assert relation((1, 9), (2, 3)) == "below"
    assert relation((1, 3), (9, 2)) == "left-of"


def test_the_loss_counts_words_and_not_padding():
    task = PixelLLM(**TINY | {"scenes": "many", "image": 32})
    batch = default_collate([task.data()[i] for i in range(6)])
    lengths = [len(task.data().scene(i).caption) + 1 for i in range(6)]  # and <eos>
    assert len(set(lengths)) > 1
    model = task.model()
    together = task.loss(model, batch)
    apart = [task.loss(model, [part[i : i + 1] for part in batch]) for i in range(6)]
    assert int(together.weight) == sum(lengths)
    assert together.total.item() == pytest.approx(sum(loss.total.item() for loss in apart), rel=1e-5)


def test_the_control_has_captions_of_other_pictures():
    task = PixelLLM(unrelated_captions=True)
    data = task.data()
    same = [data.words.decode(data[i].ids[1:]) == " ".join(data.scene(i).caption) for i in range(200)]
    assert sum(same) < 12  # one in about 216 by chance


def test_slots_are_judged_where_the_caption_has_them():
    task = PixelLLM(**TINY)
    data = task.eval_data()
    batch = Sample(*default_collate([data[i] for i in (0, 1, 32, 33)]))  # two seen, two held out
    written = batch.ids[:, 1:].long().clone()
    written[0, 2] = EOS  # "a small red ...": the third word is the colour
    score = {name: tuple(map(int, value)) for name, value in task._score(written, batch).items()}
    assert score["iid_exact"] == (1, 2)
    assert score["iid_colour"] == (1, 2)
    assert {score[name] for name in ("iid_size", "iid_shape", "iid_place", "comp_exact", "comp_colour")} == {(2, 2)}


# ---- the model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "millions"), [("tiny", 0.071), ("cpu", 0.606), ("gpu", 25.2), ("bench", 233.6)], ids=str
)
def test_the_presets_have_their_sizes(preset, millions):
    with torch.device("meta"):
        model = PixelLLM(**PixelLLM.presets[preset].get("task", {})).model()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=5e-3)


@pytest.fixture(scope="module")
def writer():
    """Return an untrained model, pictures, and the words of their captions."""
    torch.manual_seed(0)
    task = PixelLLM(**TINY | {"spatial_pool": True})
    images = torch.stack([task.data()[i].image for i in range(3)])
    model = task.model().eval()
    with torch.no_grad():
        model.head.weight.mul_(20)  # decided enough that captions differ
    return model, images, task.words


def test_the_cache_changes_nothing(writer):
    model, images, words = writer
    ids = torch.randint(3, len(words), (3, words.length), generator=torch.Generator().manual_seed(1))
    cache = Cache()
    with torch.no_grad():
        at_once = model(images, ids)
        one_by_one = torch.cat([model(images, ids[:, t : t + 1], cache) for t in range(words.length)], dim=1)
    torch.testing.assert_close(one_by_one, at_once, rtol=1e-4, atol=1e-4)  # the head multiplies by 20
    assert not torch.allclose(at_once[:, 0], at_once[:, 1], atol=1e-3)


def likelihood(model, images, captions):
    """Return the log-likelihood of captions (B, T), computed at once, without a cache."""
    ids = torch.cat([torch.full((len(captions), 1), BOS), captions[:, :-1]], dim=1)
    with torch.no_grad():
        logits = model(images, ids)
        logits[:, :, [PAD, BOS]] = -torch.inf  # no words
        each = logits.log_softmax(-1).gather(2, captions[:, :, None])[:, :, 0]
    return each.masked_fill(captions == PAD, 0.0).sum(1)


def test_greedy_takes_the_likeliest_word_each_time(writer):
    model, images, words = writer
    ids = torch.full((3, 1), BOS)
    for _ in range(words.length):
        with torch.no_grad():
            ids = torch.cat([ids, next_word(model(images, ids)).argmax(-1, keepdim=True)], dim=1)
    written = generate(model, images, words.length)
    before_end = (written == EOS).cumsum(1) - (written == EOS).long() == 0
    assert torch.equal(written[before_end], ids[:, 1:][before_end])
    assert (written[~before_end] == PAD).all()
    drawn = generate(model, images, words.length, temperature=1.0, top_k=1)
    assert torch.equal(drawn, written)
    assert torch.equal(generate(model, images, words.length, temperature=1.0, top_p=1e-6), written)
    wild = generate(model, images, words.length, temperature=50.0, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(wild, written)


def test_a_wide_beam_finds_the_likeliest_caption_of_all(writer):
    model, images, words = writer
    vocabulary = len(words)
    found = generate(model, images, 2, beam=vocabulary)
    pairs = torch.tensor([(EOS, PAD), *itertools.product(range(EOS + 1, vocabulary), range(EOS, vocabulary))])
    for row in range(3):
        scores = likelihood(model, images[row].expand(len(pairs), -1, -1, -1), pairs)
        assert float(likelihood(model, images[row][None], found[row][None])) == pytest.approx(
            float(scores.max()), abs=1e-4
        )


def test_a_beam_of_three_is_no_worse_than_greedy(writer):
    model, images, words = writer
    greedy, beam = (generate(model, images, words.length, beam=width) for width in (1, 3))
    assert (likelihood(model, images, beam) >= likelihood(model, images, greedy) - 1e-4).all()


def test_wrong_options_are_named_together():
    with pytest.raises(ConfigError) as error:
        PixelLLM(image=30, width=90, stem="cnn", scenes="three")
    assert {problem.problem for problem in error.value.problems} == {
        "task.scenes=three is not known",
        "task.stem=cnn is not known",
        "task.image=30 is not a multiple of 8, the pixels of a token",
        "task.width=90 is not a multiple of 4",
    }
    found = {problem.found for problem in error.value.problems}
    assert found >= {f"task.scenes takes {', '.join(KINDS)}", "task.stem takes conv, patch"}


# ---- files --------------------------------------------------------------------------------------------------


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def filtered_png(image, kind, colour):
    """`image` (height, width, channels) with every row written by one filter, as the format describes them."""
    height, width, channels = image.shape
    rows, above = b"", [0] * (width * channels)
    for line in image.reshape(height, -1).tolist():
        row = [kind]
        for i, value in enumerate(line):
            left = line[i - channels] if i >= channels else 0
            corner = above[i - channels] if i >= channels else 0
            distance = {p: abs(left + above[i] - corner - p) for p in (corner, above[i], left)}
            paeth = next(p for p in (left, above[i], corner) if distance[p] == min(distance.values()))
            row.append((value - (0, left, above[i], (left + above[i]) // 2, paeth)[kind]) % 256)
        rows, above = rows + bytes(row), line
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    half = zlib.compress(rows)
    parts = [chunk(b"IDAT", half[:20]), chunk(b"IDAT", half[20:])]
    return SIGNATURE + chunk(b"IHDR", head) + b"".join(parts) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (6, 4)], ids=["grey", "rgb", "rgba"])
def test_png_rows_of_every_kind_are_read(tmp_path, kind, colour, channels):
    image = np.random.default_rng(0).integers(0, 256, (7, 9, channels), dtype=np.uint8)
    (tmp_path / "x.png").write_bytes(filtered_png(image, kind, colour))
    expected = np.repeat(image, 3, axis=2) if channels == 1 else image[:, :, :3]
    assert np.array_equal(read_png(tmp_path / "x.png"), expected.transpose(2, 0, 1))


def test_a_damaged_picture_is_refused(tmp_path):
    path = tmp_path / "x.png"
    write_png(path, np.zeros((3, 8, 8), np.uint8))
    data = bytearray(path.read_bytes())
    for broken in (data[:40], data[:45] + b"x" + data[46:], b"GIF89a" + bytes(data)):
        path.write_bytes(bytes(broken))
        with pytest.raises(UserError, match="not a PNG that can be read"):
            read_png(path)


@pytest.mark.parametrize("form", ["json", "txt"])
def test_exported_scenes_are_read_back_byte_by_byte(tmp_path, form):
    data = ShapeScenes(KINDS["one"], 32, TRAIN, 12)
    export(data, tmp_path, form)
    entries = read_folder(tmp_path)
    again = ImageFolder(entries, Words.of([entry.caption for entry in entries]), 32)
    assert len(again) == 12
    for i in range(12):
        assert torch.equal(again[i].image, data[i].image)
        assert again.words.decode(again[i].ids[1:]) == " ".join(data.scene(i).caption)
    assert ImageFolder(entries, again.words, 16)[0].image.shape == (3, 16, 16)


def test_the_command_that_exports_scenes_warns_of_nothing(tmp_path):
    words = ["-W", "error", "-m", "lockstep.recipes.pixel_llm.folder", "pictures", "--count", "2"]
    said = subprocess.run([sys.executable, *words], cwd=tmp_path, env=ENV, capture_output=True, check=True).stdout
    assert said == b"2 pictures in pictures\n"


def test_it_trains_on_a_folder_of_pictures(tmp_path):
    export(ShapeScenes(KINDS["few"], 24, TRAIN, 60), tmp_path / "pictures", "txt")
    sizes = {name: value for name, value in TINY.items() if name not in SCENE_OPTIONS}
    task = PixelLLM(**sizes, folder=tmp_path / "pictures")
    sides = [{entry.image for entry in side.entries} for side in (task.data(), task.eval_data())]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 60
    done = lockstep.fit(
        task, {"preset": None, "steps": 3, "global_batch": 8}, run_dir=tmp_path / "run", **{"log.progress": "off"}
    )
    assert set(done.summary["eval_metrics"]) == {"exact"}


def test_a_folder_without_pictures_is_refused(tmp_path):
    with pytest.raises(UserError, match="no picture"):
        PixelLLM(folder=tmp_path)
    (tmp_path / "x.txt").write_text("a red square")
    with pytest.raises(UserError, match=r"lacks 1 of 1 pictures, first .*x\.png"):
        PixelLLM(folder=tmp_path)
