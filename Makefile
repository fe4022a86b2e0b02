# The two commands to know are `make demo` and `make test`. Each installs what it needs and what is
# missing (scripts/setup says what), and nothing else.

SHELL := /bin/bash
# A shell that was opened before rustup was installed does not know its folder yet.
export PATH := $(or $(CARGO_HOME),$(HOME)/.cargo)/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup build demo lint test

help:
	@echo 'make demo     quantize the embedded demo model at 4, 3 and 2 bits and compare'
	@echo '              (options: make demo ARGS="--device gpu")'
	@echo 'make test     formatting, lints (native and wasm32) and all tests'
	@echo 'make build    the program, as target/release/halftone'
	@echo 'make lint     formatting and lints only'
	@echo 'make setup    install everything that the commands above need'

setup:
	@scripts/setup build lint adapter

build:
	@scripts/setup build
	cargo build --release

demo:
	@scripts/setup build
	cargo run --release -- demo $(ARGS)

lint:
	@scripts/setup build lint
	cargo fmt --check
	cargo clippy --all-targets -- -D warnings
	cargo clippy --lib --target wasm32-unknown-unknown -- -D warnings

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
