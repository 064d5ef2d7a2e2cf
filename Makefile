# Everything a checkout needs: make demo, make test. See README.md.
VENV ?= .venv
PYTHON ?= python3
TEST_PROCESSES ?= 2
CONSTRAINTS ?= constraints.txt
OUT ?= bench/results
# A venv that is there has all it takes; PYTHON=... is taken at its word.
GPU_PYTHON := $(if $(and $(filter file,$(origin PYTHON)),$(wildcard $(VENV)/bin/python)),$(VENV)/bin/python,$(PYTHON))
# pip would compile 10,000 modules, which takes 40 s; Python compiles those that are imported, once if it may keep them.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(VENV)/bin/pip install --no-compile --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)
CLIENTS_PIP := .venv-clients/bin/pip install --quiet --disable-pip-version-check
BUILD_INPUTS := pyproject.toml setup.py $(CONSTRAINTS) $(shell find csrc -name '*.cpp' -o -name '*.h')

.PHONY: demo test test-rest test-all test-oldest test-newest test-clients lint report docs sanitize compilers bench soak exactness \
  sweep gpu-check dist dist-check clean

demo: $(VENV)/.installed
	$(VENV)/bin/specdec-fast demo

# A slice of every grid; test-rest runs what it leaves out, test-all both.
test: $(VENV)/.installed-test
test-rest test-all: $(VENV)/.installed-test-rest
test test-rest test-all:
	$(VENV)/bin/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(MARKED)

test-rest: MARKED = -m grid
test-all: MARKED = -m ''

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# How large the source tree is, and how many files a step and a call pass through; nothing fails here.
report: $(VENV)/.installed
	$(VENV)/bin/python tools/report.py

# The site in build/site; a broken link or a docstring that contradicts its signature is an error (not with --quiet).
docs: $(VENV)/.installed-docs
	PATH=$(abspath $(VENV)/bin):$$PATH NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

# The C++ ops under ASan and UBSan, in a build of their own; four minutes.
sanitize: $(VENV)/.installed-dev
	$(VENV)/bin/python tools/sanitize.py

# Whether a row's bits depend on its batch, in builds of csrc/ by every compiler that is found, and with flags that change
# what GCC does: some six minutes for each (COMPILERS="g++-13 clang++-16" takes only these).
compilers: $(VENV)/.installed-dev
	$(VENV)/bin/python tools/compilers.py $(COMPILERS)

# The tables of bench/README.md; takes some twenty minutes, and wants the machine for itself.
bench: $(VENV)/.installed-bench
	$(VENV)/bin/python -m bench.engine
	$(VENV)/bin/python -m bench.ops
	$(VENV)/bin/python -m bench.realign
	$(VENV)/bin/python -m bench.forwards
	$(VENV)/bin/python -m bench.ablation

# A service under faults for five minutes: random requests, small pools, steps that raise (SOAK="--seconds 3600").
soak: $(VENV)/.installed-bench
	$(VENV)/bin/python -m bench.soak $(SOAK)

# Every token against plain decoding in all settings, dtype after dtype (an hour and a half, on one thread: the bundled
# pair is too small for more), and what that costs: bench/results/exactness-*.json.
exactness: $(VENV)/.installed-bench
	$(VENV)/bin/python -m bench.exactness --parts cost,acceptance --json bench/results/exactness-cost.json
	for dtype in bfloat16 float16 float32; do \
	  $(VENV)/bin/python -m bench.exactness --parts matrix --dtype $$dtype --threads 1 \
	    --json bench/results/exactness-$$dtype.json --plot bench/results/exactness-$$dtype.png || exit 1; done

# Every causal architecture of transformers as a tiny random model, in some ten minutes: docs/models.md.
sweep: $(VENV)/.installed
	$(VENV)/bin/python -m bench.sweep

# Everything that needs an NVIDIA GPU, in nine minutes: $(OUT)/gpu.json. Runs with the Python it is given and installs
# nothing: make gpu-check PYTHON=python3 OUT=... GPU_CHECK="--parts compile,graphs --budget 300"
gpu-check:
	@$(GPU_PYTHON) -c 'import torch, triton, transformers, tqdm' || \
	  { echo "gpu-check needs torch, triton, transformers and tqdm in $(GPU_PYTHON); set PYTHON=..., or run: make demo" >&2; exit 1; }
	$(GPU_PYTHON) -m bench.gpu --out $(OUT) $(GPU_CHECK)

# The suite with the oldest versions that pyproject.toml admits of what can be had in more than one: their own venv.
test-oldest:
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

# The suite with the newest of everything but torch: what `pip install .` takes today. Python >= 3.11.
test-newest:
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=constraints-newest.txt

# The clients of others (instructor, litellm, langchain-openai, lm-eval) against the server, in a venv of their own; where
# there is npm, its openai, too.
test-clients: $(VENV)/.installed-test
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	$(CLIENTS_PIP) litellm langchain-openai 'lm_eval[api]' transformers
	$(CLIENTS_PIP) --no-deps instructor  # which asks for an old openai
	$(CLIENTS_PIP) docstring_parser tenacity rich typer
	! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix .venv-clients/node openai
	CLIENTS_PYTHON=$(abspath .venv-clients/bin/python) CLIENTS_NODE_MODULES=$(abspath .venv-clients/node/node_modules) \
	  $(VENV)/bin/python -m pytest tests/server/test_clients.py

# A release in dist/: the source distribution, the manylinux wheel of this Python, and the demo in a fresh venv that has
# the wheel and no compiler. Everything compiles anew; dist-check repeats only the demo.
dist: $(VENV)/.installed-dist
	$(VENV)/bin/python tools/release.py

dist-check: $(VENV)/.installed-dist
	$(VENV)/bin/python tools/release.py check

# One stamp per set of extras: a second run installs nothing, a changed C++ file compiles again, alone (setup.py).
$(VENV)/.installed: $(BUILD_INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "specdec_fast needs Python >= 3.10; $(PYTHON) is $$($(PYTHON) --version 2>&1). Set PYTHON=..." >&2; exit 1; }
	@test "$(SPECDEC_NO_CPP)" = 1 || \
	  cxx="$${CXX:-$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_config_var("CXX") or "c++")')}"; \
	  test "$(SPECDEC_NO_CPP)" = 1 || command -v $${cxx%% *} >/dev/null || \
	  { echo "specdec_fast needs a C++17 compiler; $$cxx was not found. Install one (apt-get install g++), or set SPECDEC_NO_CPP=1." >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(PIP) --editable '.[bench]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/.installed-test-rest: $(VENV)/.installed-test
	$(PIP) --editable '.[ray,eval,rl]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/.installed-dist: $(VENV)/.installed
	$(PIP) --editable '.[dist]'
	@touch $@

clean:
	rm -rf $(VENV)/.installed* $(VENV)/build build dist *.egg-info specdec_fast/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
