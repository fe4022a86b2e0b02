# The two commands to know are `make demo` and `make test`. Each installs what it needs and what is
# missing (scripts/setup says what), and nothing else.

SHELL := /bin/bash
# A shell that was opened before rustup was installed does not know its folder yet.
export PATH := $(or $(CARGO_HOME),$(HOME)/.cargo)/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup build demo page serve lint test test-page bench-web peers

help:
	@echo 'make demo     quantize the embedded demo model at 4, 3 and 2 bits and compare'
	@echo '              (options: make demo ARGS="--device gpu")'
	@echo 'make page     the page, as dist/: any static host can serve it, under any path'
	@echo 'make serve    build the page and serve it at http://127.0.0.1:8080'
	@echo 'make test     formatting, lints (native and wasm32) and all tests, the page in a browser too'
	@echo 'make bench-web products by 4-bit weights beside onnxruntime-web in one browser page'
	@echo 'make peers    what Transformers, GPTQModel and llm-compressor make of the files, and we of theirs'
	@echo '              (options: make peers MODEL=DIR PYTHON=... PARTS=schemes, or PARTS=quality ARGS="--seeds 0,1,2")'
	@echo 'make build    the program, as target/release/halftone'
	@echo 'make lint     formatting and lints only'
	@echo 'make setup    install everything that the commands above need'

setup:
	@scripts/setup build lint adapter page browser

build:
	@scripts/setup build
	cargo build --release

demo:
	@scripts/setup build
	cargo run --release -- demo $(ARGS)

# Trunk downloads nothing, so the crates must be there before.
page:
	@scripts/setup build lint page
	cargo fetch --locked
	trunk build --release

serve: page
	trunk serve --release

lint:
	@scripts/setup build lint
	cargo fmt --check
	cargo clippy --all-targets -- -D warnings
	cargo clippy --lib --bins --target wasm32-unknown-unknown -- -D warnings

# Without HALFTONE_REQUIRE_ADAPTER tests that find no adapter pass without testing anything.
test: lint
	@scripts/setup adapter
	@if scripts/setup has-adapter; then \
		export HALFTONE_REQUIRE_ADAPTER=1; \
	else \
		echo 'no software adapter: the GPU tests are skipped'; \
	fi; \
	echo cargo test; \
	cargo test
	@$(MAKE) --no-print-directory test-page

test-page: page
	@scripts/setup browser
	@if scripts/setup has-browser; then \
		echo npm test --prefix tests/page; \
		npm test --silent --prefix tests/page; \
	else \
		echo 'no Chromium or Node: the page is not tested'; \
	fi

# Options: make bench-web ARGS="--shapes 576x576 --rounds 10".
bench-web:
	@scripts/setup build lint page browser
	npm ci --silent --prefix tests/page
	npm ci --silent --prefix tests/onnxruntime
	cargo build --release --locked --target wasm32-unknown-unknown --features bench-web --bin ours
	wasm-bindgen --target web --out-dir target/onnxruntime \
		$${CARGO_TARGET_DIR:-target}/wasm32-unknown-unknown/release/ours.wasm
	npm run --silent bench --prefix tests/onnxruntime -- $(ARGS)

# Without PYTHON, one that has what tests/peers/requirements.txt lists, an environment of its own is made,
# of some 6 GB. MODEL is a Hugging Face directory in 16 bits. The part quality, what each
# program loses on the same tokens, takes minutes for each row and is done only when PARTS names it; stopped, it goes
# on where it was. ARGS="--help" lists its options.
MODEL ?= web/demo/model
PARTS ?= schemes,families,theirs,broken
PEERS := target/peers
PEERS_NEED := tests/peers/requirements.txt tests/peers/requirements-alone.txt
PYTHON ?= $(PEERS)/venv/bin/python

peers:
	@scripts/setup build
	cargo build --release
	@mkdir -p $(PEERS)
	@if [ "$(PYTHON)" = "$(PEERS)/venv/bin/python" ] && ! cat $(PEERS_NEED) | cmp -s - $(PEERS)/installed.txt; then \
		python3 -c 'import venv, ensurepip' 2>/dev/null || { echo 'peers: python3 with venv is missing'; exit 1; }; \
		echo 'peers: installing $(PEERS_NEED) into $(PEERS)/venv'; \
		python3 -m venv $(PEERS)/venv \
			&& $(PYTHON) -m pip install --quiet -r $(word 1,$(PEERS_NEED)) \
			&& $(PYTHON) -m pip install --quiet --no-deps -r $(word 2,$(PEERS_NEED)) \
			&& cat $(PEERS_NEED) > $(PEERS)/installed.txt; \
	fi
	$(PYTHON) tests/peers/run.py --model "$(MODEL)" --work $(PEERS)/results --parts $(PARTS) $(ARGS)
