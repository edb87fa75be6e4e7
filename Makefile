# cprun: `make run` trains the example, `make test` runs every test of the CPU build.
GO     ?= go
NPROC  ?= 4
CONFIG ?= examples/opticks.yaml
ARGS   ?=

export CGO_ENABLED ?= 0

# Additional build tags, as in TAGS=netgo.
TAGS ?=
STAMP = -buildvcs=false -ldflags "-X main.version=$$(scripts/version)"

.PHONY: all help build run test test-full test-portable vet-darwin mutate test-ring test-crash test-nfs test-hostile test-verify test-slurm test-cluster test-network simulate-cluster check-kubernetes test-report examples race fuzz lint staticcheck asm bench cuda vet-cuda test-kernels test-gpu gpu-pack install dist check-dist clean

all: build

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r t d; do printf '%-17s %s\n' "$$t" "$$d"; done

# Compilers and tests run for a short time; with Go's default GOGC they spend a fifth of it in garbage collection. Tests
# of memory start cprun with the default, as users have it.
test test-full test-portable vet-darwin mutate examples race fuzz staticcheck asm cuda vet-cuda test-kernels: export GOGC ?= 800

build: ## build bin/cprun for CPUs
	$(GO) build $(STAMP) -o bin/cprun ./cmd/cprun

# Trains the example, then prints the model's text after the prompt.
PROMPT ?= The Light
run: build ## train the example and generate text
	bin/cprun --nproc $(NPROC) $(ARGS) $(CONFIG)
	@run=$$(scripts/run-dir $(CONFIG) $(ARGS)) && { test -z "$$run" || bin/cprun generate "$$run" --echo --prompt '$(PROMPT)'; }

# The longest packages start first, so that none runs alone at the end. Many tests wait for processes and clocks, so three
# packages run for two cores, and two tests for each core in each. More only take each other's caches.
PARALLEL  = -p $$((3 * $$(nproc) / 2)) -parallel $$((2 * $$(nproc)))
LONGEST = ./internal/run/train ./cmd/cprun ./comm ./ring

# Runs every test; -short leaves repetitions of the same work to `make test-full`. go vet runs first, over all packages;
# go test -vet=all would vet the standard library too. Tests need no debug information (-w). SLOWEST names a file for the
# ten slowest tests.
test: ## run every test of the CPU build, in its short form
	$(GO) vet ./...
	$(GO) $(if $(SLOWEST),run ./scripts/gotest $(SLOWEST),test) -short -vet=off -ldflags=-w $(PARALLEL) $(LONGEST) ./...

# Runs the same tests with all repetitions: later steps of loss curves, more ranks, masks and random cases, large
# collectives of every type and operation, and all faults and inputs of a kind instead of a sample. Takes minutes.
test-full: ## run the same tests with all repetitions
	$(GO) test -vet=off -ldflags=-w -timeout 30m $(PARALLEL) $(LONGEST) ./...

# Runs the code of other systems on Linux, by the tag portable: sockets in place of shared memory, workers without a
# parent death signal, kernels without assembly.
PORTABLE = TestTrainWritesTheRunDirectory|TestKilled|TestRingEqualsOneDevice|TestUnix
test-portable: ## run key tests with the code for other systems
	$(GO) test -short -vet=off -tags portable,$(TAGS) $(PARALLEL) ./comm/internal/... ./internal/launch ./internal/base/files ./kernels/cpu
	$(GO) test -short -vet=off -tags portable,$(TAGS) $(PARALLEL) -run '^($(PORTABLE))' ./cmd/cprun ./comm ./ring

# Compiles and vets all packages and tests for macOS.
DARWIN ?= arm64 amd64
vet-darwin: ## compile and vet everything for macOS
	for arch in $(DARWIN); do GOOS=darwin GOARCH=$$arch $(GO) vet -gcflags='all=-N -l -dwarf=false' -tags=$(TAGS) ./... || exit 1; done

# Changes PACKAGES in N places, one at a time, and lists the changes that no test notices (scripts/mutate). Takes minutes.
PACKAGES ?= ./partition
N        ?= 25
mutate: ## list changes of PACKAGES that no test notices
	$(GO) run ./scripts/mutate -n $(N) -seed $(SEED) $(PACKAGES)

# Runs programs of another module that import the public packages.
examples: ## run the example of the library
	$(GO) vet -C examples/library .
	$(GO) run -C examples/library .

# The race detector needs cgo and a C compiler. It runs the packages with concurrent code (scripts/race-packages), except
# tests that start no goroutine or repeat the run of another (scripts/race-without). -short has the meaning of `make test`,
# which also runs vet. `make race RACE=` runs all repetitions, and WITHOUT= runs all tests of these packages. A process
# under the detector sleeps for one second before it exits, and the tests start hundreds: atexit_sleep_ms shortens it.
# RACED names the packages.
RACE    ?= -short
RACED   ?= $(LONGEST) $$(scripts/race-packages)
WITHOUT ?= -skip "^($$(sed -n 's|^[a-z][^ ]* ||p' scripts/race-without | tr ' \n' '||')_)$$"
race: ## run the concurrent packages under the race detector
	CGO_ENABLED=1 GORACE="atexit_sleep_ms=10 $(GORACE)" $(GO) test -race -vet=off $(RACE) -timeout 30m $(PARALLEL) $(WITHOUT) $(RACED)

# Injects faults at random moments into whole runs: kills, stops, failing disks, damaged checkpoints.
TRIALS ?= 220
SEED   ?= 1
test-crash: ## inject faults at random moments into whole runs
	$(GO) test -count 1 -v -timeout 60m -run TestCrash ./cmd/cprun -crash.trials=$(TRIALS) -crash.seed=$(SEED)

# Runs ten times the random cases of package ring, and every combination of algorithm, mask, layout, ranks and heads.
test-ring: ## run ten times the random cases of package ring
	$(GO) test -count 1 -timeout 60m ./ring -ring.full

# Saves, restores and claims decisions on a simulated network file system, for some minutes.
NFS_TRIALS ?= 3000
test-nfs: ## save, restore and claim on a simulated network file system
	$(GO) test -count 1 -timeout 60m -run 'NetworkFileSystem' ./internal/model/checkpoint -nfs.trials=$(NFS_TRIALS) -nfs.seed=$(SEED) -claim.trials=10000

# Connects two network namespaces by a network that is cut, one-way, lossy or slow. The user needs the right to make user
# namespaces and to open /dev/net/tun. Takes three minutes.
NETWORK ?= -test.run Network -test.v
test-network: ## run ranks over a bad network (user namespaces)
	$(GO) test -c -tags netns -o bin/network.test ./comm
	unshare --user --map-root-user --net bin/network.test -test.timeout 15m $(NETWORK)

# Builds cprun with each of the defects in cmd/cprun/verify_test.go, one line each. cprun verify must find it. Takes four
# minutes of CPU time.
test-verify: ## plant defects that cprun verify must find
	$(GO) test -count 1 -vet=off -timeout 60m -v -run TestVerifyFindsDefects ./cmd/cprun -verify.all

# Tries every malicious input; `make test` tries a share of each kind. Takes minutes.
test-hostile: ## try all malicious inputs
	@log=$$(mktemp); $(GO) test -v -run TestHostile -timeout 30m ./internal/base/hostile -share 1 >"$$log" 2>&1; s=$$?; \
	grep -v -e '^ *=== ' -e '--- PASS' "$$log"; rm -f "$$log"; exit $$s

# Injects faults of nodes and networks into a run on four hosts (network namespaces). Needs root.
FAULTS ?= 40
test-cluster: ## inject faults of nodes and networks (root)
	$(GO) vet -tags cluster,$(TAGS) ./cmd/cprun
	$(GO) test -count 1 -tags cluster,$(TAGS) -vet off -v -timeout 60m -run 'TestCluster|TestNodes|TestLAN' ./cmd/cprun -cluster.faults=$(FAULTS) -cluster.seed=$(SEED)

# Tests batch scripts, steps and signals on a real Slurm of two nodes, in namespaces on this machine. Needs root.
test-slurm: ## test the batch scripts on a real Slurm (root)
	scripts/test-slurm $(CASES)

# Opens the pages of `cprun report` in a headless Chromium (Debian: chromium): on a desktop and a phone, by keyboard, in
# gray. Compares screenshots with those in scripts/tools/browser/testdata; SHOTS=-update replaces them.
SHOTS ?=
test-report: build ## compare the pages of cprun report with screenshots (Chromium)
	mkdir -p build/report
	bin/cprun report internal/lab/report/testdata/experiment --out build/report/experiment.html
	bin/cprun report internal/lab/report/testdata/hostile --out build/report/hostile.html
	bin/cprun report internal/lab/report/testdata/runs/ring-packed internal/lab/report/testdata/runs/allgather --out build/report/runs.html
	$(GO) test -C scripts/tools -count 1 ./browser -pages $(CURDIR)/build/report -shots $(CURDIR)/build/report/shots $(SHOTS)

# Checks the Kubernetes Job against the published schemas. Needs Python and the network.
check-kubernetes: ## check the Kubernetes Job against the published schemas
	scripts/kubernetes/check

# Simulates the agents of a job of many nodes in one process, on a network that loses packets and hosts, and prints the
# figures of docs/benchmarks/202611_cluster.md. Then simulates jobs with random faults, without a network.
AGENTS ?= 1024
JOBS   ?= 40000
simulate-cluster: ## simulate the agents of a job of many nodes
	$(GO) test -count 1 -v -timeout 3h -run 'TestSimulation$$' ./internal/launch/cluster/gossip -gossip.agents $(AGENTS)
	$(GO) test -count 1 -v -timeout 3h -run TestJobs ./internal/launch/cluster/gossip -cluster.agents $(AGENTS)
	$(GO) test -count 1 -timeout 3h -run TestRandomFaults ./internal/launch/cluster -seeds $(JOBS)
	$(GO) test -count 1 -timeout 3h -v -run TestAllInterleavings ./internal/launch/cluster -model.depth 8

FUZZTIME ?= 30s
fuzz: ## run every fuzzer for FUZZTIME
	scripts/fuzz.sh $(FUZZTIME)

lint: staticcheck ## run go vet, gofmt and staticcheck
	$(GO) vet ./...
	test -z "$$($$($(GO) env GOROOT)/bin/gofmt -l .)"

# Checks both builds together, since some code is used by only one of them.
staticcheck: ## run staticcheck on both builds
	$(GO) build -C scripts/tools -o $(CURDIR)/bin/staticcheck honnef.co/go/tools/cmd/staticcheck
	$(CUDA) printf 'plain: CGO_ENABLED=0 -tags=$(TAGS)\ncuda: CGO_ENABLED=1 -tags=cuda,$(TAGS)\n' | bin/staticcheck -matrix ./...

# Generates the assembly of the CPU kernels. The generator, kernels/cpu/internal/simd/gen, is a separate module.
asm: ## write the assembly of the CPU kernels
	cd kernels/cpu/internal/simd/gen && $(GO) run .
	scripts/asm-sums >kernels/cpu/internal/simd/gen/written.txt

# Runs the Go benchmarks. If PYTHON has PyTorch, transformers and numpy, also compares the CPU path with OpenBLAS and
# PyTorch: ratios of runs in turns. Published figures use ROUNDS=5.
PYTHON ?= python3
ROUNDS ?= 1
bench: ## run the benchmarks, and compare with PyTorch if PYTHON has it
	$(GO) test -run '^$$' -bench . ./partition ./ring ./internal/foresee/plan ./kernels/cpu ./comm ./attention/...
	@if $(PYTHON) -c 'import numpy, torch, transformers' 2>/dev/null; then $(PYTHON) scripts/peer/cpu.py --rounds $(ROUNDS); \
	else echo "no comparison with peers: PYTHON=$(PYTHON) lacks numpy, torch or transformers (scripts/peer/README.md)"; fi

# scripts/cuda-env finds a CUDA toolkit, or fetches its headers.
CUDA = eval "$$(scripts/cuda-env)" &&

cuda: ## build bin/cprun for GPUs
	$(CUDA) $(GO) build $(STAMP) -tags cuda,$(TAGS) -o bin/cprun ./cmd/cprun

# Runs the tests with the tag cuda that need no GPU. They run the flash kernels as C++ on the CPU, compile every kernel for
# every architecture, check registers and spills, and load fake drivers. SHORT=-short, as in CI, compiles each program for
# one architecture, by turns, and only a sixteenth of the programs with unchanged source, options and compiler
# (kernels/gpu/internal/source/testdata/compiled.txt). It also runs a third of the host's cases in the second and third
# type. vet-cuda does the vetting.
SHORT ?=
EMULATED ?= ./kernels/gpu/internal/call
test-kernels: ## compile and test the CUDA kernels without a GPU
	$(CUDA) $(GO) test -tags cuda,$(TAGS) -vet off $(SHORT) -timeout 30m $(EMULATED) ./kernels/gpu/internal/source ./internal/base/cuda/nvrtc ./internal/base/cuda/driver
	$(if $(EMULATED),scripts/kernel-sums >kernels/gpu/internal/call/passed.txt)

# Vets only packages with files under the tag; staticcheck compiles all packages with it.
vet-cuda: ## run go vet on the CUDA build
	$(CUDA) $(GO) vet -tags cuda,$(TAGS) $$(scripts/cuda-packages)

# Runs every test of the packages that use GPUs, then a selection under compute-sanitizer, if installed. For a GPU machine
# without Go, see scripts/gpu-pack.
OUT ?= build/gpu
test-gpu: ## run every GPU test (GPUs)
	scripts/gpu-pack .carry
	OUT=$(OUT) .carry/run.sh --sanitize

gpu-pack: ## pack the GPU tests for machines without Go
	scripts/gpu-pack .carry

# Installs bin/cprun of `make build` or `make cuda`, with docs and examples.
PREFIX  ?= /usr/local
DESTDIR ?=
install: ## install bin/cprun under PREFIX
	test -x bin/cprun || $(MAKE) build
	install -D -m 755 bin/cprun "$(DESTDIR)$(PREFIX)/bin/cprun"
	scripts/stage bin/cprun "$(DESTDIR)$(PREFIX)/share/doc/cprun"

# Makes a reproducible archive of the CUDA build, which also runs without GPUs, and a wheel of each build.
dist: ## make the release archive and the wheels
	scripts/dist dist

# Packs here and in a copy elsewhere, and compares the bytes. Takes minutes.
check-dist: ## check that archive and wheels are reproducible
	scripts/check-dist

clean: ## remove bin and dist
	rm -rf bin dist
