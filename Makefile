# Commands for developers. Every change must pass `make check test`, and in CI also the slow tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTO_VENV := .venv-protos
RAY_VENV := .venv-ray
YOLO_VENV := .venv-yolo
DOCS_VENV := .venv-docs
DIST_VENV := .venv-dist
UV_VENV := .venv-uv
# uv installs what pip installs, in a quarter of the time. Both leave it to Python to compile modules when it first imports
# them, which are few of those of torch and transformers.
PIP_FLAGS := -q --disable-pip-version-check --no-compile
UV_INSTALL := $(UV_VENV)/bin/uv pip install -q --python
unexport PYTHONDONTWRITEBYTECODE
PROTO_BIN := $(PROTO_VENV)/bin
TRITON_VENV := .venv-triton
TRITON_NEEDS := tests/e2e/requirements-triton.txt
STUBS := clients/python
SERVER_STUBS := service
PROTOS := $(wildcard protos/camserve/v1/*.proto)
OPEN_INFERENCE := camserve_server/api/oip/v2/inference.proto
BASE ?= origin/main

MINUTES ?= 10
N ?= 3
BUSY ?= 2
TORCH ?= gpu
DOCKER_FLAGS ?=

.PHONY: setup node browser demo test test-slow test-all test-flaky test-simulated test-memory test-processors test-ray test-yolo test-site soak fuzz dist release-files release-dry-run lock check bench bench-diff bench-pyramid bench-front bench-torchserve bench-triton bench-gpu architectures protos sync-client lint types mypy pyright contracts proto-check sync-check clean gallery pictures parity precision reference docs

setup: $(VENV)/.done  ## create the .venv with all dependencies

$(UV_VENV)/.done:
	$(PYTHON) -m venv $(UV_VENV)
	$(UV_VENV)/bin/python -m pip install $(PIP_FLAGS) uv==0.13.9
	touch $@

$(VENV)/.done: pyproject.toml constraints.txt | $(UV_VENV)/.done
	$(PYTHON) -m venv $(VENV)
	$(UV_INSTALL) $(VENV) -c constraints.txt -e ".[server,dev]"
	touch $@

$(PROTO_VENV)/.done: | $(UV_VENV)/.done
	$(PYTHON) -m venv $(PROTO_VENV)
	$(UV_INSTALL) $(PROTO_VENV) grpcio-tools==1.76.0 mypy-protobuf==5.1.0 protobuf==6.33.6
	touch $@

# tritonclient needs an older protobuf than ours, so it gets its own venv.
$(TRITON_VENV)/.done: $(TRITON_NEEDS) | $(UV_VENV)/.done
	$(PYTHON) -m venv $(TRITON_VENV)
	$(UV_INSTALL) $(TRITON_VENV) -r $(TRITON_NEEDS)
	touch $@

# Only the server has stubs of the Open Inference Protocol, and its service is registered by hand: see api/oip/. The
# generator is older than the runtime, so that the stubs work with all later runtimes. So it gets its own venv.
define generate
	$(PROTO_BIN)/python -m grpc_tools.protoc -Iprotos \
	  --plugin=protoc-gen-mypy=$(PROTO_BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=$(PROTO_BIN)/protoc-gen-mypy_grpc \
	  --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
	$(PROTO_BIN)/python -m grpc_tools.protoc -Icamserve_server/api/oip=protos/open_inference \
	  --plugin=protoc-gen-mypy=$(PROTO_BIN)/protoc-gen-mypy \
	  --python_out=$(2) --mypy_out=quiet:$(2) $(OPEN_INFERENCE)
endef

protos: $(PROTO_VENV)/.done  ## generate the stubs and the OpenAPI document from protos/
	$(call generate,$(STUBS),$(SERVER_STUBS))
	$(PROTO_BIN)/python tools/generate_openapi.py

sync-client: setup  ## generate the synchronous Python client, after a change to the asynchronous one
	$(BIN)/python tools/generate_sync.py

node: clients/node/node_modules  ## install the dependencies of the Node client, if npm is installed

clients/node/node_modules: clients/node/package-lock.json
	@if command -v npm >/dev/null; then npm ci --prefix clients/node --no-audit --no-fund --silent && touch $@; \
	else echo "npm is not installed: the Node client is not tested"; fi

browser: .browser/.done  ## install Chromium and axe-core, with which the page is tested, if they can be installed

.browser/.done:
	@mkdir -p .browser
	@command -v chromium >/dev/null || apt-get install -y -q chromium >/dev/null || \
	  echo "Chromium cannot be installed: the page is not tested"
	@if command -v npm >/dev/null; then npm install --prefix .browser --no-audit --no-fund --silent axe-core@4.14.1 && touch $@; \
	else echo "npm is not installed: the page's accessibility is not tested"; fi

demo: setup  ## start the server, explain a photo of a cat, write the overlay to out/
	$(BIN)/python examples/demo.py

RUN_TESTS = $(BIN)/python -m tools.run_tests $(if $(SEED),--seed $(SEED))
COVERAGE_PY = $(BIN)/python -m coverage

test: setup node  ## run all tests except the slow ones; SEED=N shuffles
	$(RUN_TESTS) fast

test-slow: setup node browser docs $(TRITON_VENV)/.done  ## run the slow tests: pages, packaging, compatibility, long searches
	$(RUN_TESTS) slow

test-all: setup node browser docs $(TRITON_VENV)/.done  ## run all tests; COVERAGE=1 checks that they cover enough
	$(if $(COVERAGE),$(COVERAGE_PY) erase)
	$(RUN_TESTS) all $(if $(COVERAGE),--coverage)
	$(if $(COVERAGE),$(COVERAGE_PY) combine -q && $(COVERAGE_PY) report)

test-flaky: setup node  ## run `make test` N=3 times, shuffled, beside BUSY=2 programs; CORES=1, SEED=N
	$(BIN)/python -m tools.find_flaky --runs $(N) --busy $(BUSY) $(if $(CORES),--cores $(CORES)) $(if $(SEED),--seed $(SEED))

test-simulated: setup  ## run the tests on a simulated GPU
	$(BIN)/python -m pytest tests/simulated

test-memory: setup  ## search for the load of one caller that needs the most memory: about fifteen minutes
	$(BIN)/python -m pytest -m "slow or search" tests/robustness/test_memory_search.py tests/robustness/test_memory_limit.py

test-processors: setup  ## run the parity and capture tests as on other processors; ALL=1 for all tests that compute
	PYTHON=$(BIN)/python tests/other_processors.sh $(if $(ALL),all)

$(RAY_VENV)/.done: pyproject.toml constraints.txt | $(UV_VENV)/.done
	$(PYTHON) -m venv $(RAY_VENV)
	$(UV_INSTALL) $(RAY_VENV) -c constraints.txt -e ".[server,ray,dev]"
	touch $@

test-ray: $(RAY_VENV)/.done  ## run the tests on a Ray cluster of this machine, in a venv of their own: some minutes
	$(RAY_VENV)/bin/python -m pytest tests/e2e/test_ray.py -s

# Ultralytics is AGPL-3.0: it is installed here alone, and is no dependency. It brings an OpenCV of its own, which has the
# same module as ours; the headless package of Ultralytics needs ours.
$(YOLO_VENV)/.done: pyproject.toml constraints.txt | $(UV_VENV)/.done
	$(PYTHON) -m venv $(YOLO_VENV)
	$(UV_INSTALL) $(YOLO_VENV) -c constraints.txt -e ".[server,dev]" "ultralytics-opencv-headless>=8.4"
	touch $@

test-yolo: $(YOLO_VENV)/.done  ## compare examples/yolo.py with Ultralytics, in a venv of its own: a minute or two
	$(YOLO_VENV)/bin/python -m pytest tests/yolo

# axe-core and Chromium are those of the page's tests.
test-site: docs setup browser  ## build the site, and test it in Chromium: search, accessibility, narrow screens
	$(BIN)/python -m pytest -m slow tests/site

soak: setup  ## load a server to saturation for MINUTES=10, and check its responses and resources
	cd tests && ../$(BIN)/python -m robustness.soak --minutes $(MINUTES)

fuzz: setup  ## send 5,000 mutants of images and of messages to a server; SEED=N changes which
	FUZZ_SEED=$(or $(SEED),0) $(BIN)/python -m pytest tests/robustness/test_fuzz.py

$(DIST_VENV)/.done: tools/dist.lock
	rm -rf $(DIST_VENV)
	$(PYTHON) -m venv $(DIST_VENV)
	$(DIST_VENV)/bin/python -m pip install $(PIP_FLAGS) --require-hashes -r tools/dist.lock
	touch $@

# The second build is of what is committed, in another folder and with other file permissions.
dist: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
dist: $(DIST_VENV)/.done  ## build the wheel and the source distribution into dist/, twice, and compare the bytes
	rm -rf dist .distcheck && mkdir .distcheck
	git archive HEAD | tar -x -C .distcheck
	$(DIST_VENV)/bin/python -m build --no-isolation --outdir dist .
	umask 077 && $(DIST_VENV)/bin/python -m build --no-isolation --outdir .distcheck/dist .distcheck
	cd dist && sha256sum *.whl *.tar.gz > SHA256SUMS
	cd .distcheck/dist && sha256sum --check --strict ../../dist/SHA256SUMS || \
	  { echo "two builds differ: commit or remove the files that 'git status' shows"; exit 1; }
	rm -rf .distcheck

VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
TAG ?= v$(VERSION)

# The notes are not among the checksums: they are the text of the release, and no file of it.
release-files: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
release-files: dist  ## make all files of a release in dist/, and check them: wheel, source distribution, SBOM, notes; TAG=v1.2.3
	$(DIST_VENV)/bin/python tools/release_notes.py "$(TAG)" > dist/NOTES.md
	$(DIST_VENV)/bin/python -W ignore -m cyclonedx_py requirements service/requirements.lock --pyproject pyproject.toml --output-reproducible | \
	  $(DIST_VENV)/bin/python tools/sbom.py > dist/camserve-$(VERSION).cdx.json
	cd dist && sha256sum *.whl *.tar.gz *.cdx.json > SHA256SUMS
	$(DIST_VENV)/bin/twine check --strict dist/*.whl dist/*.tar.gz
	$(PYTHON) -m venv --clear .distcheck
	.distcheck/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt dist/*.whl
	cd .distcheck && bin/camserve --version && bin/python -c "import importlib.util, sys; sys.exit(bool(importlib.util.find_spec('torch')))"
	rm -rf .distcheck

release-dry-run: release-files  ## everything that a release does, but publish nothing; with the image (TORCH=gpu) if Docker runs
	@if docker info >/dev/null 2>&1; then \
	  docker build $(DOCKER_FLAGS) -f service/Dockerfile --build-arg TORCH=$(TORCH) -t camserve:$(VERSION)-$(TORCH) . && \
	  docker run --rm camserve:$(VERSION)-$(TORCH) --version; \
	else echo "no container engine runs: the image is not built"; fi
	@ls -l dist

# For all systems and processors that have wheels. The versions are those of constraints.txt.
LOCK = $(DIST_VENV)/bin/uv pip compile -q --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" -c constraints.txt

lock: $(DIST_VENV)/.done  ## write the lock files, with the hashes of all files: of the image, of its build, and of .venv-dist
	$(LOCK) --extra server --extra otel -o service/requirements.lock pyproject.toml
	echo hatchling | $(LOCK) -o service/build.lock -
	$(LOCK) --group dist -o tools/dist.lock

check: lint types contracts proto-check sync-check  ## run all static checks

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell --skip docs/_build README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs protos service clients tests examples benchmarks tools conftest.py
	$(BIN)/hadolint service/Dockerfile
	$(BIN)/python tools/check_links.py

types: mypy pyright

mypy: setup
	$(BIN)/mypy

pyright: setup
	$(BIN)/pyright

contracts: setup
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/check_rooms.py
	$(BIN)/python tools/check_style.py

proto-check: setup $(PROTO_VENV)/.done
	$(BIN)/buf lint protos
	$(BIN)/buf format --diff --exit-code protos
	@if git rev-parse -q --verify $(BASE) >/dev/null && git cat-file -e $(BASE):protos/buf.yaml 2>/dev/null; then \
	  $(BIN)/buf breaking protos --against '.git#ref=$(BASE),subdir=protos'; \
	else echo "$(BASE) has no protos: nothing to compare with"; fi
	@rm -rf .protocheck && mkdir .protocheck
	$(call generate,.protocheck,.protocheck)
	@cd .protocheck && for f in camserve/v1/* camserve_server/api/oip/v2/*; do \
	  cmp $$f ../$(STUBS)/$$f 2>/dev/null || cmp $$f ../$(SERVER_STUBS)/$$f || \
	  { echo "the stubs do not match protos/: run 'make protos'"; exit 1; }; done
	@rm -rf .protocheck
	$(PROTO_BIN)/python tools/generate_openapi.py --check

sync-check: setup
	$(BIN)/python tools/generate_sync.py --check

# The site needs no torch: docs/conf.py replaces it. So its venv takes seconds to install.
$(DOCS_VENV)/.done: pyproject.toml constraints.txt docs/requirements.txt | $(UV_VENV)/.done
	$(PYTHON) -m venv $(DOCS_VENV)
	$(UV_INSTALL) $(DOCS_VENV) -c constraints.txt -r docs/requirements.txt -e .
	touch $@

docs: $(DOCS_VENV)/.done  ## build the site of the documentation into docs/_build/html, strictly: less than a minute
	$(DOCS_VENV)/bin/python -m sphinx -q -W --keep-going -n docs docs/_build/html

gallery: setup  ## write docs/methods.md and docs/gallery.md: some minutes
	$(BIN)/python docs/generate/gallery.py
	$(BIN)/python docs/generate/methods_page.py

pictures: setup browser  ## write the pictures of the documentation, except those of `make gallery`: some minutes
	for script in batching sanity pictures page_pictures tutorials; do \
	  PYTHONPATH=tests:. $(BIN)/python docs/generate/$$script.py || exit 1; done

parity: setup  ## compare every method with its oracles, and write docs/parity.md: some minutes
	PYTHONPATH=tests $(BIN)/python docs/generate/parity.py

precision: setup  ## compare half precision with float32 on photos, and write docs/precision.md: a minute
	PYTHONPATH=tests $(BIN)/python docs/generate/precision.py

reference: setup  ## write what is generated in docs/reference: seconds
	PYTHONPATH=docs/generate $(BIN)/python -m reference

architectures: setup  ## compare every architecture with autograd, and write docs/architectures.md: half an hour
	$(BIN)/python docs/generate/architectures.py

bench: setup  ## run the benchmarks: some minutes; FULL=1 runs all and writes benchmarks/RESULTS.md: half an hour
	$(BIN)/python -m benchmarks $(if $(FULL),--full --write,--quick)

bench-diff: setup  ## measure false alarms and missed changes of `camserve diff`, and write benchmarks/diff/RESULTS.md: ten minutes
	$(BIN)/python -m benchmarks.diff --runs 4 --write

bench-pyramid: setup  ## measure how well pyramids of detectors find objects, and write benchmarks/pyramid/RESULTS.md: ten minutes
	$(BIN)/python -m benchmarks.pyramid --write

bench-front: setup  ## measure what surrounds the model; AGAINST=PATH compares it with another checkout: some minutes
	$(BIN)/python -m benchmarks front $(if $(AGAINST),--against $(AGAINST))

bench-torchserve: setup  ## compare with TorchServe, in a venv of its own; needs Java; QUICK=1 runs half of it
	$(BIN)/python -m benchmarks.torchserve $(if $(QUICK),--quick)

bench-triton: setup  ## measure with NVIDIA's perf_analyzer (PERF_ANALYZER=command), and write docs/triton-and-kserve.md
	$(BIN)/python -m benchmarks.perf_analyzer --write $(if $(PERF_ANALYZER),--perf-analyzer "$(PERF_ANALYZER)")

bench-gpu: setup  ## run the benchmarks on a GPU, offline, and write benchmarks/GPU.md: some minutes
	$(BIN)/python -m benchmarks.gpu --out benchmarks/GPU.md

clean:
	rm -rf $(UV_VENV) $(VENV) $(PROTO_VENV) $(TRITON_VENV) $(RAY_VENV) $(YOLO_VENV) $(DOCS_VENV) $(DIST_VENV) docs/_build clients/node/node_modules out dist .coverage* .mypy_cache .ruff_cache .pytest_cache .protocheck .distcheck
