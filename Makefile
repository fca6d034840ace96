# zaya. `make help` lists what can be done here.
#
# ZAYA=path/to/zaya uses that executable instead of building one. CARGO_TARGET_DIR is honoured.

SHELL = /bin/sh
TARGET := $(or $(CARGO_TARGET_DIR),target)
BUILT := $(TARGET)/release/zaya
# Nothing is resolved anew: the crates are those of Cargo.lock, and so is the demo's text.
CARGO := cargo
LOCKED := --release --locked --target-dir "$(TARGET)"

# The executable that the targets below use.
PROGRAM := $(or $(ZAYA),$(BUILT))
# What is needed to have it.
ifdef ZAYA
READY := given
else
READY := build
endif

.PHONY: build given kernels kernel-table swgpu demo demo-data test test-all test-mpi test-kernels sweeps bench static lint lint-mpi clean help setup setup-mpi

build: setup ## Build the executable (target/release/zaya); the default
	$(CARGO) build $(LOCKED)

demo: $(READY) ## Train a small model on real text, kill it, resume it, evaluate it, let it write, export it: two to three minutes
	@scripts/demo-data.sh "$(PROGRAM)"
	@scripts/demo.sh "$(PROGRAM)"

demo-data: $(READY) ## Only the demo's data: tokenizer and token shards in demo/
	@scripts/demo-data.sh "$(PROGRAM)"

kernels: setup ## Compile the GPU kernels alone, and print what each takes: registers, LDS, occupancy, matrix instructions
	@kernels/build.sh

kernel-table: swgpu ## Count on the software GPU what each kernel asks of an MI300X, and write docs/KERNELS.md: minutes; computed, not measured
	@ARCHS=gfx942 CLANG=clang-19 kernels/build.sh kernels/build
	@kernels/table.py --swgpu "$(abspath $(TARGET))/release/libswgpu.so" --objects kernels/build --write

swgpu: setup ## Build the software GPU that stands in for ROCm's libraries in tests (target/release/libswgpu.so)
	$(CARGO) build $(LOCKED) -p swgpu
	@echo "use it: ZAYA_HIP_LIB=L ZAYA_HIPBLASLT_LIB=L ZAYA_RCCL_LIB=L zaya pretrain --backend hip ..., with L=$(abspath $(TARGET))/release/libswgpu.so"

test: setup $(filter given,$(READY)) ## Run the tests: exactly what CI runs
	$(CARGO) test $(LOCKED)
	$(CARGO) test $(LOCKED) -p hip-sys -p rccl-sys -p swgpu

test-all: test test-mpi test-kernels sweeps ## Run everything: the tests, those under MPI, those of the kernels' sources, and the long sweeps

test-kernels: setup ## Run the kernels' sources on fibers against formulas in double, with a detector of races and missing barriers
	@kernels/test/run.sh
	@kernels/table.py --check

sweeps: demo-data ## Run the long sweeps alone: the demo's loss in f32 against bf16
	@scripts/precision-curves.sh "$(PROGRAM)"

# The executable with MPI takes the place of the plain one for a moment: integration tests build it. So the plain one is put back, the
# one that `make test` has built: `cargo build` asks less of some crates than the tests do, and would compile them and zaya anew.
test-mpi: setup setup-mpi ## Run the tests of the MPI engine: four ranks under mpirun; installs an MPI library where there is none
	$(CARGO) test $(LOCKED) --features mpi --test mpi_ranks; status=$$?; \
	$(CARGO) test $(LOCKED) --no-run --test suite && exit $$status

bench: $(READY) ## Measure the machine, and zaya on it with a 15 M parameter model: achieved against limit, about a minute
	@"$(PROGRAM)" bench --recipe recipes/bench-cpu.toml

# A build of its own, in a folder of its own, so that it does not make the other one stale.
static: setup ## Build a fully static executable (target/static/...), CPU only
	@host=$$(rustc -vV | sed -n 's/^host: //p'); \
	RUSTFLAGS="$$RUSTFLAGS -C target-feature=+crt-static" \
	    $(CARGO) build --release --locked --target-dir "$(TARGET)/static" --target "$$host" && \
	program="$(TARGET)/static/$$host/release/zaya" && \
	if LC_ALL=C ldd "$$program" 2>&1 | grep -Eq 'statically linked|not a dynamic executable'; then \
	    "$$program" --version && echo "$$program: statically linked"; \
	else \
	    echo "error: $$program is not static:" >&2; ldd "$$program" >&2; exit 1; \
	fi

lint: setup ## Check format and clippy's opinion, warnings being errors
	$(CARGO) fmt --check
	$(CARGO) clippy $(LOCKED) --all-targets -- -D warnings
	$(CARGO) clippy $(LOCKED) --all-targets -p hip-sys -p rccl-sys -p swgpu -- -D warnings

lint-mpi: setup setup-mpi ## The same of a build with MPI
	$(CARGO) clippy $(LOCKED) --all-targets --features mpi -- -D warnings

clean: ## Delete what was built, the demo's folder and runs of the benchmark's recipe
	$(CARGO) clean --target-dir "$(TARGET)"
	rm -rf demo runs/bench

help: ## This list
	@sed -n 's/^\([a-z-]*\):.* ## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r name what; do \
	    printf '  make %-12s %s\n' "$$name" "$$what"; done

# What a build needs beside Rust: a C compiler, for three of the crates, and the linker.
setup:
	@scripts/setup.sh

setup-mpi:
	@scripts/setup-mpi.sh

given:
	@command -v "$(ZAYA)" >/dev/null || { echo "error: ZAYA=$(ZAYA) is no executable" >&2; exit 2; }
