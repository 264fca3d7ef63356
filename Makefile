# Every target makes the virtual environment that it needs; a second call finds it ready.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
READY_LAB := $(VENV)/.ready-lab
READY_DOCS := $(VENV)/.ready-docs
LONG := tests/ranks/test_strategies.py tests/ranks/test_exact.py tests/ranks/test_exact_borrowed.py tests/ranks/test_remat.py tests/ranks/test_meta.py tests/ranks/test_hooks.py tests/ranks/test_tensor.py tests/faults tests/golden tests/recipes tests/systems tests/test_api.py tests/test_classic_manager.py tests/test_docs.py tests/test_verify.py
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: setup demo lab docs pictures quick test test-long test-ray test-slurm zoo lint format clean

# What a user needs.
setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Lockstep needs Python 3.11 or newer, found " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

# What a developer needs on top: pytest, ruff, pyrefly and the packages that some tests try. A torchvision that was built
# for another torch fails when it is imported, and takes transformers down with it: then only tests/zoo sees it.
$(READY_DEV): $(READY)
	$(PIP) --editable '.[dev]'
	@$(BIN)/python -c 'import torchvision' 2> /dev/null || { $(PIP) --no-deps --upgrade --target $(VENV)/apart torchvision && $(BIN)/python -m pip uninstall --quiet --yes torchvision; }
	@touch $@

demo: $(READY)
	$(BIN)/lockstep train char_lm --nproc auto
	@echo
	@echo "For the commands of the README: source $(BIN)/activate"

# The course: what it needs (matplotlib on top), and then the first steps.
lab: $(READY_LAB)
	@echo
	@$(BIN)/lockstep lab
	@echo
	@echo "Your first steps:"
	@echo "  source $(BIN)/activate                               so that 'lockstep' and 'python' are those of the course"
	@echo "  open lab/exercises/01_ddp_basic.py                      in your editor; docs/lab/01_ddp_basic.md explains it"
	@echo "  lockstep lab check 1 lab/exercises/01_ddp_basic.py      says what is still wrong, and why"
	@echo "  lockstep lab predict 1                                  the questions: guess before you see the numbers"
	@echo "  python lab/solution/01_ddp_basic.py                     what the finished exercise shows"

$(READY_LAB): $(READY)
	$(PIP) --editable '.[lab]'
	@touch $@

# The docs site, in site/. Any warning is an error. To read it: python3 -m http.server --directory site
docs: $(READY_DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open site/index.html"

$(READY_DOCS): $(READY)
	$(PIP) --editable '.[docs]'
	@touch $@

# The pictures of the README, from real runs.
pictures: $(READY)
	$(BIN)/python docs/pictures/make.py

# The tests of single modules, without those that take seconds.
quick: $(READY_DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m quick -n 2

# Three files at a time, on two cores too: most tests wait for processes that they have started. The longest files come first (tests/conftest.py).
# What costs most are processes that import torch, seconds of CPU time each: commands and scripts are forked from one
# that has it (tests/preloaded.py), ranks from another (tests/pool.py). Of products of cases a sample runs (tests/sampled.py).
# A worker that dies of a hang is not replaced: its replacement would begin with the same test. One thread each: on
# shared cores two that wait for each other take many times as long.
test: $(READY_DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not long" -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Too long for every change: all pairs of strategies and signals, the exact mode in every combination, the cases that
# tests/sampled.py leaves out, a hundred kills in one run, every command a fresh process, and the recorded loss curves compared to the last bit (they belong to one CPU and one torch).
test-long: $(READY_DEV)
	OMP_NUM_THREADS=1 LOCKSTEP_ALL_PAIRS=1 LOCKSTEP_ALL_EXACT=1 LOCKSTEP_FRESH=1 $(BIN)/python -m pytest $(LONG)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long --ignore tests/cluster
	$(BIN)/python tests/faults/torture.py --kills 100
	$(BIN)/python tests/golden/record.py --compare --bits

# A real Slurm cluster of two nodes on this machine (tests/cluster/slurm-lab), and jobs of `lockstep launch slurm` on it, in
# minutes. Needs root: it installs Slurm from Debian's packages if it is missing, and makes network namespaces.
test-slurm: $(READY_DEV)
	@if [ "$$(id -u)" != 0 ]; then echo "test-slurm: skipped: only root can start a Slurm cluster on this machine"; \
	elif ! command -v slurmctld > /dev/null && ! command -v apt-get > /dev/null; then echo "test-slurm: skipped: Slurm is not installed, and there is no apt-get to install it with"; \
	else tests/cluster/run-slurm $(BIN)/python; fi

# On a real Ray cluster of several nodes on this machine, in minutes. Ray is 240 MB, and 500 MB with what it needs.
test-ray: $(READY_DEV)
	@$(BIN)/python -c 'import ray.train' 2> /dev/null || $(PIP) --editable '.[dev,ray]'
	RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cluster/test_ray.py

# Public models under every strategy against plain PyTorch: a table, in minutes.
zoo: $(READY_DEV)
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m zoo.compare

lint: $(READY_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

format: $(READY_DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) runs site .pytest_cache .ruff_cache .hypothesis
