# What can be done here. Each target sets up what it needs on a Debian 12 with Rust.

.DEFAULT_GOAL := build
.PHONY: build setup test check demo fuzz bench install

# For `make install`; packagers set DESTDIR.
PREFIX ?= /usr/local
# For `make fuzz`: runs of each target.
FUZZ_RUNS ?= 2000000

build:
	cargo build --locked --release -p kickless

setup:
	tools/setup

# Everything: formatting, lints, unit, property and model tests, end-to-end tests with guests, fuzz targets.
test:
	tools/test

# What needs no test run: formatting, lints, docs, dependencies, licences.
check:
	cargo --locked xtask check

# A guest in QEMU uses a disk that we serve.
demo:
	guest/demo

fuzz:
	tools/setup
	tools/fuzz $(FUZZ_RUNS)

# The ratios of speed, side by side with others, and the memory figure.
bench: build
	tools/setup
	cargo bench --locked -p kickless-tests

install: build
	install -D -m 755 $${CARGO_TARGET_DIR:-target}/release/kickless $(DESTDIR)$(PREFIX)/bin/kickless
	install -d $(DESTDIR)$(PREFIX)/libexec $(DESTDIR)$(PREFIX)/share/qemu/vhost-user
	ln -sf ../bin/kickless $(DESTDIR)$(PREFIX)/libexec/kickless-blk
	sed 's|"/usr/|"$(PREFIX)/|' dist/50-kickless-blk.json >$(DESTDIR)$(PREFIX)/share/qemu/vhost-user/50-kickless-blk.json
