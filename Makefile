# The project's commands. Each target installs what it needs on a Debian 12 with Rust.

.DEFAULT_GOAL := build
.PHONY: build image setup test test-rbd check site demo demo-migrate demo-upgrade fuzz bench bench-poll fio dist deb install \
	uninstall install-driver

# For `make install`; packagers set DESTDIR.
PREFIX ?= /usr/local
# For `make fuzz`: number of inputs for each target.
FUZZ_RUNS ?= 2000000

# Builds the program.
build:
	tools/setup build
	cargo build --locked --release -p kickless

# Builds the OCI image of the program, target/container/kickless.tar.
image: build
	tools/container

# Installs the packages that building and testing need.
setup:
	tools/setup

# Runs all tests: formatting, lints, unit, property and model tests, end-to-end tests with guests, fuzz
# targets.
test:
	tools/test

# Tests disks of a Ceph cluster, which it sets up and removes again. Installs Ceph (about 200 MB).
test-rbd:
	tools/setup
	tools/ceph

# Checks formatting, lints, docs, dependencies and licences. Runs no test.
check:
	cargo --locked xtask check

# Builds the pages of docs/ as a site, target/site/index.html, and checks its links.
site:
	tools/setup build
	tools/site

# Runs a guest in QEMU that uses a disk of kickless.
demo:
	guest/demo

# Moves a working guest between two QEMUs, each with a kickless. MOVES=20 moves it 20 times.
demo-migrate:
	guest/demo-migrate $(MOVES)

# Upgrades kickless under a guest that reads its disk and pings the host. UPGRADES=20 upgrades it 20 times.
demo-upgrade:
	guest/demo-upgrade $(UPGRADES)

# Runs each fuzz target with FUZZ_RUNS inputs.
fuzz:
	tools/setup
	tools/fuzz $(FUZZ_RUNS)

# Compares speed and memory with other programs: one report, and text for each part. With TARGETS="NAME=SOCKET
# ...", the report includes those back-ends.
bench: build
	tools/setup
	tools/bench $(TARGETS)
	cargo bench --locked -p kickless-tests
	cargo bench --locked -p kickless-dirty-log --bench dirty_log

# Prints the gain and the cost of polling as tables. `tools/bench-poll --pictures` draws the pictures.
bench-poll: build
	tools/setup
	tools/bench-poll

# Builds target/fio/kickless.so, fio's engine for any vhost-user-blk back-end.
fio:
	tools/setup
	fio/prepare

# Makes the files of a release in target/dist, twice, and compares them.
dist:
	tools/dist

# Makes Debian packages in target/deb. ARCH=arm64 builds for that architecture.
deb:
	tools/setup build
	tools/deb

# Installs the program with all that belongs to it, and the driver for programs in C. dist/install has the list of files, and
# the other variables of packagers.
install: build install-driver
	DESTDIR=$(DESTDIR) PREFIX=$(PREFIX) dist/install $${CARGO_TARGET_DIR:-target}/release/kickless

# Removes what `make install` installed from the same tree, with the same variables.
uninstall:
	tree=$$(mktemp -d) && trap "rm -rf $$tree" EXIT && $(MAKE) --no-print-directory install DESTDIR=$$tree && \
	DESTDIR=$(DESTDIR) dist/uninstall $$tree

# Installs only the driver: library, header and pkg-config file. Its tests set DRIVER_PROFILE=dev.
DRIVER_PROFILE ?= release
DRIVER_VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
install-driver:
	tools/setup build
	cargo build --locked --profile $(DRIVER_PROFILE) -p kickless-driver-c
	built=$${CARGO_TARGET_DIR:-target}/$(DRIVER_PROFILE:dev=debug) lib=$(DESTDIR)$(PREFIX)/lib && \
	soname=$$(readelf -d $$built/libkickless_driver.so | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p') && \
	install -D -m 755 $$built/libkickless_driver.so $$lib/libkickless_driver.so.$(DRIVER_VERSION) && \
	ln -sf libkickless_driver.so.$(DRIVER_VERSION) $$lib/$$soname && \
	ln -sf $$soname $$lib/libkickless_driver.so && \
	install -m 644 $$built/libkickless_driver.a $$lib/libkickless_driver.a && \
	install -D -m 644 $$built/include/kickless_driver.h $(DESTDIR)$(PREFIX)/include/kickless_driver.h && \
	install -d $$lib/pkgconfig
	sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(DRIVER_VERSION)|' crates/driver-c/kickless-driver.pc.in \
		>$(DESTDIR)$(PREFIX)/lib/pkgconfig/kickless-driver.pc
