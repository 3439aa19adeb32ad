# The two main commands are `make reproduce` and `make test`; both install into .venv first.
PROFILE ?= quick
BIN     := .venv/bin
PY      := $(BIN)/python
READY   := .venv/.ready
NOTICES := .venv/share/jupyter/lab/settings/overrides.json

export PIP_DISABLE_PIP_VERSION_CHECK := 1
.DEFAULT_GOAL := help
.PHONY: help setup reproduce paper docs test quick check bench export lab hooks clean always

help:  ## show these lines
	@echo "usage: make TARGET"; echo
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' Makefile | while IFS='|' read -r t d; do printf '  %-10s %s\n' "$$t" "$$d"; done

setup: $(READY)  ## install into .venv, once (2 to 3 minutes, 1.6 GB)

reproduce: $(READY)  ## train the main grid, draw its report (PROFILE=quick or full)
	@$(BIN)/ega-paper reproduce --profile $(PROFILE)

paper: $(READY)  ## committed results -> tables, figures, paper/report.pdf
	@$(PY) paper/build.py

docs: $(READY)  ## chapters, tutorials, API -> build/docs/index.html, offline
	@$(PY) -c 'import furo, latex2mathml, myst_nb' 2>/dev/null || { echo "Adding Sphinx to .venv ..."; $(PY) -m pip install -qq -c constraints.txt -e '.[docs]'; }
	@start=$$(date +%s); $(PY) -m sphinx -E -W --keep-going -q -c docs . build/docs && \
	  echo "build/docs/index.html after $$(($$(date +%s) - start)) s"

test: $(READY)  ## form, export, README, types, notebooks, tests, outputs
	@$(PY) tests/steps.py test

quick: $(READY)  ## the part of test that takes seconds: form, export, README
	@$(PY) tests/steps.py quick

check: $(READY)  ## test, then the docs site and the lowest versions promised
	@$(PY) tests/steps.py check

bench: $(READY)  ## time ega beside other libraries; 10 minutes
	@$(PY) benchmarks/run.py

export: $(READY)  ## after an edit was run: notebooks -> ega/, cleaned, README.md
	@$(BIN)/ruff format --quiet . && $(BIN)/nbdev_export
	@OMP_NUM_THREADS=1 $(PY) -m nbconvert --log-level ERROR --to notebook --execute --inplace \
	  --ExecutePreprocessor.extra_arguments=--log-level=ERROR nbs/index.ipynb
	@$(BIN)/nbdev_clean && $(PY) docs/readme.py

lab: $(READY) $(NOTICES)  ## open the first notebook in JupyterLab
	@$(PY) -m jupyterlab --allow-root --LabApp.default_url=/lab/tree/nbs/index.ipynb

hooks: $(READY)  ## in this clone only: check before a commit, merge by cell
	@git config merge.nbdev-merge.name "merge notebooks cell by cell"
	@git config merge.nbdev-merge.driver "$(BIN)/nbdev_merge %O %A %B %P"
	@git config core.hooksPath .githooks
	@echo "Notebooks merge by cell; make quick runs before a commit (git commit --no-verify skips it)."

clean:  ## remove caches; runs in build/ and .venv stay
	@rm -rf _nbval _proc docs/api .pytest_cache .hypothesis *.egg-info nbs/.ipynb_checkpoints
	@find ega nbs tests docs paper -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp holds the folder it was made in: a moved or copied tree would still import the old one.
ifneq ("$(shell cat $(READY) 2>/dev/null)","$(CURDIR)")
$(READY): always
endif
$(READY): pyproject.toml constraints.txt
	@set -e; start=$$(date +%s); \
	for p in "$(PYTHON)" python3.11 python3.12 python3.13 python3; do \
	  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break || p=; \
	done; \
	if [ -z "$$p" ]; then \
	  echo "The pinned versions need Python 3.11 or newer; found: $$(python3 --version 2>&1 || true)" >&2; \
	  echo "Install one, or name it: make $(firstword $(MAKECMDGOALS)) PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	echo "Installing into .venv with $$("$$p" --version), 2 to 3 minutes ..."; \
	[ "$$(cat $(READY) 2>/dev/null)" = "$(CURDIR)" ] || "$$p" -m venv --clear .venv; \
	$(PY) -m pip install -qq -c constraints.txt -e '.[dev]'; \
	printf '%s' "$(CURDIR)" > $(READY); \
	echo "Ready after $$(($$(date +%s) - start)) s."

# JupyterLab asks about news in a pop-up; this is the setting its "No" button writes, kept inside .venv.
$(NOTICES): $(READY)
	@mkdir -p $(@D)
	@echo '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}' > $@
