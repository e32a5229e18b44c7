# Every target sets itself up: `make demo` and `make test` work on a machine with only Python >= 3.11 and make.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
JOBS ?= 2
KERNELS := $(wildcard tests/plugins/*/test_*triton.py tests/plugins/*/test_e4m3.py \
                      tests/plugins/*/test_interpreted*.py) \
           tests/plugins/step/test_forms.py
BIN := $(VENV)/bin

.PHONY: demo test suite kernels check lint fuzz storm soak clients cluster clean

demo: $(VENV)/serve.stamp  ## engines from the two bundled checkpoints, a real tritonserver, one streamed prompt each
	@echo "demo: torch is imported, two engines are built, a tritonserver starts with both and answers, and stops"
	@$(BIN)/python scripts/demo.py

test: $(VENV)/dev.stamp  ## both of what follows, at once
	@$(MAKE) --no-print-directory -j 2 suite kernels

suite kernels: export CI = 1
suite kernels: export PYTHONHASHSEED = 0
suite: $(VENV)/dev.stamp  ## the whole CPU suite, the real server included, in JOBS processes and one that waits for servers
	$(BIN)/python -m pytest -n $$(($(JOBS) + 1)) --dist worksteal --durations=40

kernels: $(VENV)/dev.stamp  ## GPUs' kernels, interpreted
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -p no:cacheprovider $(KERNELS) > $(VENV)/kernels.log 2>&1; \
	status=$$?; cat $(VENV)/kernels.log; exit $$status

MINUTES ?= 10
PROPERTIES = $(shell grep -rlE '^@given|^def test_a_storm\b' tests)
fuzz: $(VENV)/dev.stamp  ## property tests, 20 times as many examples, and storms: rounds of a new seed each, for MINUTES
	end=$$(($$(date +%s) + 60 * $(MINUTES))); while [ $$(date +%s) -lt $$end ]; do \
		export SEED=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); export PYTHONHASHSEED=$$SEED; echo "seed $$SEED"; \
		$(BIN)/python -m pytest -q -n $(JOBS) --hypothesis-profile=fuzz --hypothesis-seed=$$SEED \
			-k "hypothesis or test_a_storm[" $(PROPERTIES) || exit 1; \
	done

STORMS ?= 1000
RANK_STORMS ?= 100
SEED ?= 0
storm: $(VENV)/dev.stamp  ## random arrivals, drafts, aborts, preemptions: STORMS of 200 steps each, from SEED on; and of ranks
	STORMS=$(STORMS) RANK_STORMS=$(RANK_STORMS) SEED=$(SEED) $(BIN)/python -m pytest -q -n $(JOBS) -k "test_a_storm[" \
		tests/runtime/schedule/test_storms.py tests/runtime/engine/test_rank_storms.py

REQUESTS ?= 5000
soak: $(VENV)/dev.stamp engines/qwen3.5-code/manifest.json  ## callers who leave, stall and err; kills and reloads; then all is as before
	OMP_NUM_THREADS=1 $(BIN)/python scripts/soak.py engines/qwen3.5-code --requests $(REQUESTS) --kills 3 --reloads 3
	OMP_NUM_THREADS=1 $(BIN)/python scripts/hostile.py engines/qwen3.5-code
	SERVED_RANKS=1 $(BIN)/python -m pytest -q tests/model_repo/test_ranks.py

CLIENTS ?=
clients: $(VENV)/dev.stamp  ## quick starts of openai, langchain, litellm, instructor, aiperf, tritonclient, promtool, envoy against a server; the Kubernetes manifests
	PYTHONPATH=. $(BIN)/python scripts/clients.py $(CLIENTS)

TURNS ?= 2000
cluster: $(VENV)/dev.stamp engines/qwen3.5-code/manifest.json  ## Dynamo's frontend and workers that are killed, drained and added: all answers
	$(BIN)/python scripts/cluster.py engines/qwen3.5-code --turns $(TURNS)

engines/%/manifest.json: $(VENV)/dev.stamp runtime/manifest.py
	$(BIN)/build-engine demo/$* --engine-dir engines/$*

check: lint test

lint: $(VENV)/dev.stamp  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) engines build dist *.egg-info

# On a terminal pip shows what it downloads; in a log there is a line before.
PIP_INSTALL = $(BIN)/pip install $(if $(MAKE_TERMOUT),,-q) --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hemiola needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@echo "making an environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/serve.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing hemiola[serve] into $(VENV): minutes, mostly for PyTorch and tritonserver"
	$(PIP_INSTALL) -e '.[serve]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing hemiola[dev] into $(VENV): minutes, mostly for PyTorch and tritonserver"
	$(PIP_INSTALL) -e '.[dev]'
	-$(BIN)/python scripts/tensorrt_wheels.py  # without them, and without gcc, some tests skip
	-$(BIN)/python scripts/cluster_environment.py  # without it tests with Dynamo skip
	@touch $@
