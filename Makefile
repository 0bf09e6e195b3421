# `make` alone, or `make help`, lists the goals. Every goal sets up what it needs, or says what is missing.

CARGO  ?= cargo
PREFIX ?= /usr/local
TARGET := $(or $(CARGO_TARGET_DIR),target)

.DEFAULT_GOAL := help
.PHONY: help demo build test test-unit test-programs test-rdma lint fmt header bench docs install uninstall clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null || grep '##' $(MAKEFILE_LIST)

demo: build ## a memory server, a program four times larger than its local memory, the same one all local, side by side
	@python3 examples/demo/run.py

build: ## the release binaries, in target/release
	@scripts/setup.sh build
	@$(CARGO) build --workspace --release --quiet

test: ## everything: formatting, lints, tests, real programs, failures (about 15 minutes on 2 cores, the first time)
	@scripts/setup.sh test
	@python3 scripts/test.py

test-unit: ## the Rust tests alone
	@scripts/setup.sh test
	@python3 scripts/test.py build unit

test-programs: ## the real programs at full size (needs about 8 GB of memory)
	@scripts/setup.sh test
	@$(CARGO) build --workspace --release --quiet
	@python3 tests/programs/run.py

test-rdma: ## frames over RDMA without a card: soft-RoCE in an emulated machine (on Debian; about 5 minutes, the first time more)
	@scripts/setup.sh test-rdma
	@scripts/test-rdma.sh

lint: ## formatting, links and figures in the documents, clippy with warnings as errors
	@scripts/setup.sh test
	@python3 scripts/test.py fmt links figures clippy

fmt: ## format the code
	@$(CARGO) fmt --all

header: ## write crates/capi/include/rampool.h again from the Rust source
	@RAMPOOL_WRITE_HEADER=1 $(CARGO) test --quiet -p rampool-capi --test header

bench: build ## every figure of docs/performance.md, measured again
	@scripts/setup.sh bench
	@RAMPOOL_BIN=$(TARGET)/release/rampool scripts/bench-all.sh

docs: ## the API documentation, and the book where mdbook is installed
	@scripts/setup.sh build
	@$(CARGO) doc -p rampool -p rampool-proto -p rampool-sys --no-deps --quiet
	@echo "API: $(TARGET)/doc/rampool/index.html"
	@if command -v mdbook >/dev/null; then mdbook build && echo "book: target/book/index.html"; \
	else echo "book: read docs/ as it is, or: cargo install mdbook && make docs"; fi

# Under sudo there is often no cargo: then what was built is installed.
install: $(if $(shell command -v $(CARGO)),build) ## into PREFIX (default /usr/local), below DESTDIR
	@DESTDIR="$(DESTDIR)" PREFIX="$(PREFIX)" TARGET="$(TARGET)" scripts/install.sh

uninstall: ## what `make install` installed
	@DESTDIR="$(DESTDIR)" PREFIX="$(PREFIX)" scripts/install.sh --remove

clean: ## remove what was built
	@$(CARGO) clean --quiet
	@rm -rf .venv
