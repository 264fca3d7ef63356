"""What Lockstep does today, as text: loss curves, digests of weights, first screens, the files of a run folder.

    python tests/golden/record.py                    write all of it again, next to this script
    python tests/golden/record.py --compare          run again, and print what differs
    python tests/golden/record.py --compare --bits   every number and every weight must be equal to the last bit
    python tests/golden/record.py --compare --words  screens may differ: show how, and do not fail
    python tests/golden/record.py --compare --only char_lm   only the runs and screens with this in their name

It knows the command line and the files of a run folder, and nothing of what is inside the package, so that it still
runs when everything inside has been moved. The exit code is 1 if something differs that must not.

Numbers are compared within `LIMITS`, because another CPU may round differently. The text that `char_lm` learns is the
standard library's source, so its numbers belong to one version of Python.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "src"
CURVES, SCREENS, RUN_FOLDER = HERE / "curves.json", HERE / "screens", HERE / "run_folder.txt"

RECIPES = ("char_lm", "pixel_llm", "latent_wire", "clstm_ppo", "hrm")
ALIKE = ("preset=tiny", "device=cpu", "threads=1", "seed=7")
QUIET = ("log.every=1", "log.progress=off")
STEPS = "steps=8"
TWO = ("--nproc", "2")

LAYOUTS = {
    "1": (),
    "ddp2": TWO,
    "fsdp2": ("strategy=fsdp", *TWO),
    "pp2": ("strategy=pp", *TWO),
    "exact1": ("exact=true",),
    "exact2": ("exact=true", *TWO),
}
# The first steps in fp16 overflow and are skipped: a few more are needed to see some that count.
FP16_STEPS = "steps=14"
FP16 = ("precision=fp16", FP16_STEPS)
ONLY_CHAR_LM = {
    "fp16-1": FP16,
    "fp16-ddp2": (*FP16, *TWO),
    "bf16-1": ("precision=bf16",),
    "zero1-2": ("strategy=zero1", *TWO),
    "fsdp-grads2": ("strategy=fsdp-grads", *TWO),
    "tp2": ("strategy=tp", *TWO),
}
CASES = {f"{recipe}-{layout}": (recipe, *words) for recipe in RECIPES for layout, words in LAYOUTS.items()} | {
    f"char_lm-{layout}": ("char_lm", *words) for layout, words in ONLY_CHAR_LM.items()
}

SHOWN = ("train", "char_lm", *ALIKE, STEPS, "log.every=2", "log.progress=plain", "run_dir=run")
WORDS_OF_SCREENS = {
    "train-1": SHOWN,
    "train-2": (*SHOWN, *TWO),
    "help": ("--help",),
    "help-train": ("train", "--help"),
    "recipes": ("recipes",),
    "config-show": ("config", "show", "char_lm"),
    "misspelt": ("train", "char_lm", "preset=tiny", "stepz=3"),
}

COLUMNS = ("step", "loss", "grad_norm", "lr", "skipped", "scale")
# The largest relative difference that still counts as equal; what is not named must be equal. Measures such as an
# accuracy count things, and one thing more or less is no small difference: they are compared with --bits only.
LIMITS = {"loss": 1e-6, "eval_loss": 1e-6, "lr": 1e-6, "grad_norm": 1e-4}


# ---- running ---------------------------------------------------------------------------------------------


@dataclass
class Ended:
    code: int
    output: str
    errors: str


def lockstep(folder: Path, *words: str) -> Ended:
    """The command, as typed in `folder`, from this checkout, whatever is installed."""
    environment = os.environ | {
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        "CUDA_VISIBLE_DEVICES": "",  # a GPU would change what `auto` means
        "RES_OPTIONS": "attempts:0",  # no name server is asked: a lost answer costs five seconds
    }
    import preloaded  # here: a script has to say first where it is found

    done = preloaded.run(*words, cwd=folder, env=environment, timeout=280)
    return Ended(done.returncode, done.stdout, done.stderr)


def run_case(name: str, folder: Path) -> dict[str, Any]:
    """One run and what came of it. Of a run that is refused only the exit code is recorded: its words may change."""
    recipe, *words = CASES[name]
    if FP16_STEPS not in words:
        words.insert(0, STEPS)
    ended = lockstep(folder, "train", recipe, *ALIKE, *QUIET, *words, f"run_dir={name}")
    typed = " ".join([recipe, *words])
    if ended.code:
        return {"words": typed, "exit": ended.code, "errors": ended.errors}
    run = folder / name
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    tensors = hashes(run / "model.safetensors")
    found = {
        "words": typed,
        "exit": ended.code,
        "curve": [[line.get(column) for column in COLUMNS] for line in lines],
        "eval_loss": summary.get("eval_loss"),
        "eval_metrics": summary.get("eval_metrics"),
        "digest": hashlib.sha256("\n".join(f"{k} {v}" for k, v in sorted(tensors.items())).encode()).hexdigest(),
    }
    return found | ({"tensors": tensors} if "-exact" in name else {})


def hashes(path: Path) -> dict[str, str]:
    """For every tensor of a safetensors file: its type, its shape, and the sha256 of its bytes."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        shape = "x".join(map(str, about["shape"]))
        found[name] = f"{about['dtype']} [{shape}] {hashlib.sha256(content[start + begin : start + end]).hexdigest()}"
    return dict(sorted(found.items()))


def made_with() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": version("torch"), "machine": platform.machine()}


# ---- words -----------------------------------------------------------------------------------------------


def screen(name: str, folder: Path) -> str:
    ended = lockstep(folder, *WORDS_OF_SCREENS[name])
    text = f"$ lockstep {' '.join(WORDS_OF_SCREENS[name])}\n{masked(ended.output, folder)}"
    if errors := masked(ended.errors, folder):
        text += f"--- stderr\n{errors}"
    return text + f"exit code {ended.code}\n"


def masked(text: str, folder: Path) -> str:
    """Without what differs from run to run and from machine to machine."""
    text = text.replace(str(folder), "FOLDER").replace(str(SOURCE), "SOURCE").replace(os.uname().nodename, "HOST")
    text = re.sub(r"^\[W\S+ \S+ \w+\.cpp.*\n", "", text, flags=re.M)  # torch's own: no name server answers, say
    text = re.sub(
        r"^(slow |lockstep: no rank has advanced for).*\n(  (rank|\d+ rank|process group) .*\n|    \S+:.*\n)*",
        "",
        text,
        flags=re.M,
    )  # a busy machine
    text = re.sub(r"\n {9}(?=\S)", "  ", text)  # where a line of an event is broken depends on its times
    text = re.sub(r"(rank \d+) \d+(?=,|$)", r"\1 PID", text, flags=re.M)
    text = re.sub(r" +[\d.]+[kMG]? (\w+/s)", r" RATE \1", text)
    text = re.sub(r"\bmem +[\d.]+ (MB|GB)", "mem SIZE", text)
    text = re.sub(r"\beta \S+", "eta ETA", text)
    text = re.sub(r"\b(mb|stall_s|write_s) [\d.e-]+", r"\1 N", text)
    text = re.sub(r"\b\d+\.\d+ s\b", "N s", text)
    text = re.sub(r"(127\.0\.0\.1|localhost|HOST):\d+", r"\1:PORT", text)
    text = re.sub(r"\d{4}-?\d\d-?\d\d[-T ]\d\d:?\d\d:?\d\d", "TIME", text)
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def files_of(run: Path) -> list[str]:
    """Every file of a run folder, sorted. What a process or a clock has put into a name is masked."""
    names = sorted(str(path.relative_to(run)) + "/" * path.is_dir() for path in run.rglob("*"))
    return [re.sub(r"\b\d{5,}(?=\.(?!safetensors)|$)", "N", name) for name in names]


def run_folder(folders: dict[str, Path]) -> str:
    """The files after `train` on one rank and on two."""
    parts = [f"# {name}\n" + "".join(f"{file}\n" for file in files_of(run)) for name, run in folders.items()]
    return "\n".join(parts)


# ---- comparing -------------------------------------------------------------------------------------------


def numbers(case: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Every number of a case: where it is, what it is, and its value."""
    for row in case.get("curve", []):
        for column, value in zip(COLUMNS, row, strict=True):
            yield f"step {row[0]} {column}", column, value
    if "eval_loss" in case:
        yield "eval_loss", "eval_loss", case["eval_loss"]
    for name, value in (case.get("eval_metrics") or {}).items():
        yield f"eval {name}", "measure", value


def relative(old: Any, new: Any) -> float:
    if old == new:
        return 0.0
    if not isinstance(old, int | float) or not isinstance(new, int | float):
        return float("inf")
    return abs(old - new) / max(abs(old), abs(new))


@dataclass
class Difference:
    text: str
    fatal: bool


def differences(name: str, old: dict[str, Any], new: dict[str, Any], bits: bool = False) -> Iterator[Difference]:
    """How a run differs from the recorded one; what is within its limit is told, and is no failure without `bits`."""
    if old["exit"] != new["exit"]:
        text = f"{name}: exit code {old['exit']} was recorded, now {new['exit']}"
        yield Difference(f"{text}\n{new.get('errors', '')[-2000:]}".rstrip(), True)
        return
    before, now = ({where: (kind, value) for where, kind, value in numbers(case)} for case in (old, new))
    for where in sorted(before.keys() ^ now.keys()):
        yield Difference(f"{name}: {where} is {'gone' if where in before else 'new'}", True)
    worst: dict[str, tuple[float, str]] = {}
    for where in before.keys() & now.keys():
        kind = before[where][0]
        far = relative(before[where][1], now[where][1])
        if far > 0:
            worst[kind] = max(worst.get(kind, (0.0, "")), (far, where))
    for kind, (far, where) in sorted(worst.items()):
        limit = float("inf") if kind == "measure" else LIMITS.get(kind, 0.0)
        text = f"{name}: {kind} differs by up to {far:.2e} (relative), at {where}: "
        yield Difference(text + f"{before[where][1]!r} was recorded, now {now[where][1]!r}", bits or far > limit)
    if old.get("digest") != new.get("digest"):
        yield Difference(f"{name}: the digest of the weights differs", bits)


def unequal_exact(cases: dict[str, dict[str, Any]]) -> list[Difference]:
    """What `exact=true` promises: the same bits on one rank and on two."""
    pairs = [(name, name.removesuffix("1") + "2") for name in cases if name.endswith("-exact1")]
    return [
        Difference(f"{one} and {two} end with different bits", True)
        for one, two in pairs
        if two in cases and cases[one].get("tensors") != cases[two].get("tensors")
    ]


def unified(name: str, old: str, new: str) -> str:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), f"{name} (recorded)", f"{name} (now)", lineterm="")
    return "\n".join(lines)


# ---- the command -----------------------------------------------------------------------------------------


@dataclass
class Found:
    cases: dict[str, dict[str, Any]]
    screens: dict[str, str]
    folder: str | None  # the list of files; not known when only some screens were asked for


def observe(only: str) -> Found:
    cases, screens, runs = {}, {}, {}
    with tempfile.TemporaryDirectory() as made:
        top = Path(made).resolve()
        for name in [name for name in CASES if only in name]:
            began = time.monotonic()
            # All in one folder: latent_wire keeps the readers that it has schooled, and schools them once.
            cases[name] = run_case(name, top)
            last = cases[name].get("curve", [[None, None]])[-1][1]
            print(f"{name:22} exit {cases[name]['exit']}  loss {last}  {time.monotonic() - began:.1f} s", flush=True)
        for name in [name for name in WORDS_OF_SCREENS if only in name]:
            folder = top / f"screen-{name}"
            folder.mkdir()
            screens[name] = screen(name, folder)
            if name.startswith("train-"):
                runs[name] = folder / "run"
        return Found(cases, screens, run_folder(runs) if len(runs) == 2 else None)


def text_of(cases: dict[str, dict[str, Any]]) -> str:
    """JSON with one line for each step, so that a difference can be read."""

    def entry(key: str, value: Any) -> str:
        if key == "curve":
            return "[\n      " + ",\n      ".join(json.dumps(row) for row in value) + "\n    ]"
        if key == "tensors":
            return (
                "{\n      "
                + ",\n      ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
                + "\n    }"
            )
        return json.dumps(value)

    parts = []
    for name, case in cases.items():
        inside = ",\n    ".join(
            f"{json.dumps(key)}: {entry(key, value)}" for key, value in case.items() if key != "errors"
        )
        parts.append(f"  {json.dumps(name)}: {{\n    {inside}\n  }}")
    head = f'"made_with": {json.dumps(made_with())},\n"alike": {json.dumps(" ".join((*ALIKE, *QUIET)))},\n'
    return "{\n" + head + f'"columns": {json.dumps(COLUMNS)},\n"cases": {{\n' + ",\n".join(parts) + "\n}\n}\n"


def write(found: Found) -> None:
    CURVES.write_text(text_of(found.cases))
    SCREENS.mkdir(exist_ok=True)
    for name, text in found.screens.items():
        (SCREENS / f"{name}.txt").write_text(text)
    if found.folder is not None:
        RUN_FOLDER.write_text(found.folder)


def compare(found: Found, bits: bool, words: bool) -> int:
    recorded = json.loads(CURVES.read_text())
    if recorded["made_with"] != made_with():
        print(f"recorded with {recorded['made_with']}, this is {made_with()}: numbers may differ for that reason")
    told = []
    for name, case in found.cases.items():
        told += differences(name, recorded["cases"][name], case, bits)
    told += unequal_exact(found.cases)
    for difference in told:
        print(("FAILS  " if difference.fatal else "       ") + difference.text)
    failed = any(difference.fatal for difference in told)
    for name, text in found.screens.items():
        if changes := unified(f"screens/{name}.txt", (SCREENS / f"{name}.txt").read_text(), text):
            print(changes)
            failed |= not words
    if found.folder is not None and (changes := unified("run_folder.txt", RUN_FOLDER.read_text(), found.folder)):
        print(changes)
        failed = True
    losses = [
        relative(value, now[where])
        for name, case in found.cases.items()
        for now in [{where: value for where, _, value in numbers(case)}]
        for where, kind, value in numbers(recorded["cases"][name])
        if kind in ("loss", "eval_loss") and where in now
    ]
    trained = {name: case["digest"] for name, case in found.cases.items() if "digest" in case}
    same = sum(recorded["cases"][name].get("digest") == digest for name, digest in trained.items())
    print(f"largest relative difference of a loss: {max(losses, default=0.0):.2e}")
    print(f"{same} of {len(trained)} digests equal, {len(found.cases) - len(trained)} runs refused")
    print("FAILED" if failed else "nothing differs that must not")
    return int(failed)


def main() -> int:
    sys.path.append(str(Path(__file__).parent.parent))
    parser = argparse.ArgumentParser(description="Record what Lockstep does, or compare with the record.")
    parser.add_argument("--compare", action="store_true", help="run again and print the differences; write nothing")
    parser.add_argument("--bits", action="store_true", help="fail if any number or digest is not equal to the bit")
    parser.add_argument("--words", action="store_true", help="show how screens differ, and do not fail for it")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the runs and screens with this in their name")
    options = parser.parse_args()
    if not options.compare and (options.only or options.bits or options.words):
        parser.error("--only, --bits and --words go with --compare: a record is always whole")
    if not any(options.only in name for name in (*CASES, *WORDS_OF_SCREENS)):
        parser.error(f"no run and no screen has {options.only} in its name")
    began = time.monotonic()
    found = observe(options.only)
    if options.compare:
        code = compare(found, options.bits, options.words)
    else:
        write(found)
        broken = unequal_exact(found.cases)
        for difference in broken:
            print(f"FAILS  {difference.text}")
        code = int(bool(broken))
    print(f"{time.monotonic() - began:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
