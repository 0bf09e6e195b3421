# `make` alone, or `make help`, lists the targets. Every target sets up what it needs, or says what is
# missing.

CARGO  ?= cargo
PREFIX ?= /usr/local
TARGET := $(or $(CARGO_TARGET_DIR),target)

.DEFAULT_GOAL := help
.PHONY: help demo build wheel deb image check test test-unit test-python test-files test-programs test-rdma test-block soak lint fmt header bench papers docs install uninstall clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null || grep '##' $(MAKEFILE_LIST)

demo: build ## run a program with a quarter of its memory local and the rest on two memory servers, kill one, compare the answers
	@python3 examples/demo/run.py

build: ## build the release binaries in target/release
	@scripts/setup.sh build
	@$(CARGO) build --workspace --release --quiet

wheel: ## build the Python package with the command and the agents, in target/wheels
	@scripts/setup.sh wheel
	@scripts/wheel.sh

deb: build ## build Debian packages of the command, the server, the C library and its headers, in target/deb
	@TARGET=$(TARGET) scripts/deb.sh

image: build ## build an image for containers with nothing but rampool in it, target/rampool-image.tar
	@TARGET=$(TARGET) python3 scripts/image.py

test: ## run everything: formatting, lints, tests, real programs, failures (about 25 minutes on 2 cores, the first time)
	@scripts/setup.sh test
	@python3 scripts/test.py

check: ## check formatting, links, counts, figures, lints and the pure crates' tests (about 2 minutes after a build)
	@scripts/setup.sh test
	@python3 scripts/test.py fmt links scripts counts figures clippy pure

test-unit: ## run the Rust tests only
	@scripts/setup.sh test
	@python3 scripts/test.py build unit

test-python: wheel ## run the Python package's tests, types and examples, with Dask, DuckDB and a Jupyter kernel (about 5 minutes)
	@scripts/setup.sh test-python
	@python3 tests/python/run.py

test-files: ## test files in the pool at full size, with Ray and Spark, which are large (about 5 minutes)
	@scripts/setup.sh test-files
	@$(CARGO) build --package rampool-cli --release --quiet
	@python3 tests/files/run.py

test-programs: ## run the world's programs at 50 % and 25 % of their memory, then ours at full size (needs about 8 GB; ONLY=NAME: one of the world's)
	@scripts/setup.sh test
	@$(CARGO) build --workspace --release --quiet
	@python3 bench/world.py $(if $(ONLY),--only "$(ONLY)")
	@$(if $(ONLY),,python3 tests/programs/run.py)

test-rdma: ## test RDMA without a card: soft-RoCE in an emulated machine (on Debian; about 5 minutes, longer the first time)
	@scripts/setup.sh test-rdma
	@scripts/test-rdma.sh

soak: ## run hostile tenants, programs that check every byte under memory pressure, and those whose servers fail: SECONDS (default 3600) for each of the last two
	@scripts/setup.sh soak
	@$(CARGO) build --workspace --release --quiet
	@RAMPOOL_HOSTILE_S=$$(($${SECONDS:-3600} / 6)) $(CARGO) test --package rampool-server --release --quiet worst_order -- --nocapture
	@python3 scripts/soak.py
	@python3 tests/failures/run.py --only=-servers- --seconds $${SECONDS:-3600}

test-block: ## test a file system and swap on a block device from the pool, by the kernel's client in an emulated machine (on Debian; about 5 minutes)
	@scripts/setup.sh test-block
	@$(CARGO) build --package rampool-cli --release --quiet
	@scripts/test-block.sh

lint: ## check formatting, links, counts and figures, clippy with warnings as errors
	@scripts/setup.sh test
	@python3 scripts/test.py fmt links scripts counts figures clippy

fmt: ## format the code
	@$(CARGO) fmt --all

header: ## generate crates/capi/include/rampool.h from the Rust source
	@RAMPOOL_WRITE_HEADER=1 $(CARGO) test --quiet -p rampool-capi --test header

bench: build ## measure every figure of bench/figures.md again (about two hours on a quiet machine; PARTS="miss fit" or PARTS=--old: some of it)
	@scripts/setup.sh bench
	@scripts/bench-all.sh $(PARTS)

papers: build ## measure what the papers measured and write docs/papers.md (about 20 minutes, as root; QUICK=--quick: small sizes; PARTS="payload locks": some)
	@scripts/setup.sh bench
	@test -x .venv/bin/python || python3 -m venv .venv
	@.venv/bin/python -c 'import matplotlib' 2>/dev/null || .venv/bin/pip install --quiet --disable-pip-version-check 'numpy>=1.26,<3' 'matplotlib>=3.8,<4'
	@.venv/bin/python scripts/papers.py measure $(QUICK) $(PARTS)

docs: ## build the manual as a site in target/site, its links tested, and the API documentation in target/doc
	@scripts/setup.sh docs
	@.venv/bin/python scripts/site.py
	@$(CARGO) doc --workspace --exclude rampool-fuzz --no-deps --quiet
	@echo "API: $(TARGET)/doc/rampool/index.html"

# Under sudo cargo is often missing: then the existing build is installed.
install: $(if $(shell command -v $(CARGO)),build) ## install into PREFIX (default /usr/local), below DESTDIR
	@DESTDIR="$(DESTDIR)" PREFIX="$(PREFIX)" TARGET="$(TARGET)" scripts/install.sh

uninstall: ## remove what `make install` installed
	@DESTDIR="$(DESTDIR)" PREFIX="$(PREFIX)" scripts/install.sh --remove

clean: ## remove everything that was built
	@$(CARGO) clean --quiet
	@rm -rf .venv .venv-torch crates/python/rampool.data
