# cprun: `make run` trains the example, `make test` runs every test of the CPU build.
GO     ?= go
NPROC  ?= 4
CONFIG ?= examples/opticks.yaml
ARGS   ?=

export CGO_ENABLED ?= 0

# Build tags besides those that a target is about, as in TAGS=netgo.
TAGS ?=

.PHONY: all help build run test test-full test-portable vet-darwin mutate test-ring test-crash test-nfs test-hostile test-slurm test-cluster test-network simulate-cluster check-kubernetes test-report examples race fuzz lint staticcheck asm bench cuda vet-cuda test-kernels test-gpu gpu-pack install dist check-dist clean

all: build

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r t d; do printf '%-17s %s\n' "$$t" "$$d"; done

# What compiles and tests is short, and pays a fifth of its time for taking memory back that it does not need. A process of
# cprun that a test starts has Go's own measure, as users have it.
test test-full test-portable vet-darwin mutate examples race fuzz staticcheck asm cuda vet-cuda test-kernels: export GOGC ?= 400

build: ## build bin/cprun for CPUs
	$(GO) build -o bin/cprun ./cmd/cprun

# Trains, and shows what the model writes behind the prompt.
PROMPT ?= The Light
run: build ## train the example and let the model write
	bin/cprun --nproc $(NPROC) $(ARGS) $(CONFIG)
	@run=$$(scripts/run-dir $(CONFIG) $(ARGS)) && { test -z "$$run" || bin/cprun generate "$$run" --echo --prompt '$(PROMPT)'; }

# What takes longest comes first, since what comes last runs beside nothing, and twice as many packages run as there are
# cores, since many wait for processes and clocks, as tests within a package do.
BESIDE  = -p $$((2 * $$(nproc))) -parallel $$((2 * $$(nproc)))
LONGEST = ./internal/run/train ./cmd/cprun ./comm ./ring

# Every test, with repetitions of the same work left to `make test-full`: -short tells what they are. go vet has looked at all
# packages before, with every check, those without tests among them; go test -vet=all would vet the standard library anew.
test: ## run every test of the CPU build, the short forms
	$(GO) vet ./...
	$(GO) test -short -vet=off $(BESIDE) $(LONGEST) ./...

# The same tests with all repetitions: later steps of loss curves, more numbers of ranks, masks and random cases, large
# collectives of every type and operation, all faults and inputs of a kind where one or a tenth stand for them. Minutes.
test-full: ## run the same tests with all repetitions
	$(GO) test -vet=off -timeout 30m $(BESIDE) $(LONGEST) ./...

# Runs on Linux the code of other systems: sockets in place of shared memory, workers without a parent death signal,
# kernels without assembly. The tag portable chooses it.
PORTABLE = TestTrainWritesTheRunDirectory|TestKilled|TestRingEqualsOneDevice|TestUnix
test-portable: ## run key tests with the forms for other systems than Linux
	$(GO) test -short -vet=off -tags portable,$(TAGS) $(BESIDE) ./comm/internal/... ./internal/launch ./internal/base/files ./kernels/cpu
	$(GO) test -short -vet=off -tags portable,$(TAGS) $(BESIDE) -run '^($(PORTABLE))' ./cmd/cprun ./comm ./ring

# Compiles and vets all packages and tests for macOS.
DARWIN ?= arm64 amd64
vet-darwin: ## compile and vet everything for macOS
	for arch in $(DARWIN); do GOOS=darwin GOARCH=$$arch $(GO) vet -gcflags='all=-N -l -dwarf=false' -tags=$(TAGS) ./... || exit 1; done

# Changes PACKAGES in N places, one at a time, and names the changes that their tests pass: scripts/mutate. Minutes.
PACKAGES ?= ./partition
N        ?= 25
mutate: ## report changes of PACKAGES that their tests pass
	$(GO) run ./scripts/mutate -n $(N) -seed $(SEED) $(PACKAGES)

# Programs of other modules that use the packages of this one.
examples: ## run the example of the library
	$(GO) vet -C examples/library .
	$(GO) run -C examples/library .

# The race detector needs cgo and a C compiler. It runs the packages in which something is concurrent (scripts/race-packages), but
# for tests that start nothing themselves or repeat the run of another (scripts/race-without). -short leaves out what it does in
# `make test`. It vets nothing, which `make test` has done. `make race RACE=` leaves out no repetitions, and WITHOUT= no tests of
# these packages. Every process that ends under the detector sleeps, for a second if not told otherwise, and the tests start
# hundreds of them, one after the other.
RACE    ?= -short
WITHOUT ?= -skip "^($$(sed -n 's|^[a-z][^ ]* ||p' scripts/race-without | tr ' \n' '||')_)$$"
race: ## run the concurrent packages under the race detector
	CGO_ENABLED=1 GORACE="atexit_sleep_ms=10 $(GORACE)" $(GO) test -race -vet=off $(RACE) -timeout 30m $(BESIDE) $(WITHOUT) $(LONGEST) $$(scripts/race-packages)

# Faults at random moments in whole runs: kills, stops, disks that fail, damaged checkpoints.
TRIALS ?= 220
SEED   ?= 1
test-crash: ## inject faults at random moments into whole runs
	$(GO) test -count 1 -v -timeout 60m -run TestCrash ./cmd/cprun -crash.trials=$(TRIALS) -crash.seed=$(SEED)

# Ten times the random cases of package ring, and every algorithm, mask, layout, number of ranks and of heads with every other.
test-ring: ## run ten times the random cases of package ring
	$(GO) test -count 1 -timeout 60m ./ring -ring.full

# Saves and restores on a file system that does what network file systems do, for some minutes.
NFS_TRIALS ?= 3000
test-nfs: ## save and restore on a simulated network file system
	$(GO) test -count 1 -timeout 60m -run TestNetworkFileSystem ./internal/model/checkpoint -nfs.trials=$(NFS_TRIALS) -nfs.seed=$(SEED)

# Two hosts and a network between them that is cut, one-way, lossy, slow: network namespaces, for which a
# user needs the right to make user namespaces and to open /dev/net/tun. Three minutes.
NETWORK ?= -test.run Network -test.v
test-network: ## run ranks over a bad network (user namespaces)
	$(GO) test -c -tags netns -o bin/network.test ./comm
	unshare --user --map-root-user --net bin/network.test -test.timeout 15m $(NETWORK)

# All inputs that somebody made to harm; `make test` tries a share of each kind. Minutes.
test-hostile: ## try all inputs made to harm
	@log=$$(mktemp); $(GO) test -v -run TestHostile -timeout 30m ./internal/base/hostile -share 1 >"$$log" 2>&1; s=$$?; \
	grep -v -e '^ *=== ' -e '--- PASS' "$$log"; rm -f "$$log"; exit $$s

# Faults of nodes and networks in a run on four hosts: namespaces of this machine, which takes root.
FAULTS ?= 40
test-cluster: ## inject faults of nodes and networks (root)
	$(GO) vet -tags cluster,$(TAGS) ./cmd/cprun ./internal/launch/lan
	$(GO) test -count 1 -tags cluster,$(TAGS) -vet off -v -timeout 60m -run 'TestCluster|TestNodes' ./cmd/cprun -cluster.faults=$(FAULTS) -cluster.seed=$(SEED)
	$(GO) test -count 1 -tags cluster,$(TAGS) -vet off ./internal/launch/lan

# The batch scripts, steps and signals of a real Slurm of two nodes, in namespaces on this machine. Wants root.
test-slurm: ## test the batch scripts on a real Slurm (root)
	scripts/test-slurm $(CASES)

# The pages of `cprun report` in a headless Chromium: drawn, by keyboard, on a phone, in gray, and compared with
# the screenshots in scripts/tools/browser/testdata, which SHOTS=-update stores anew. Wants Chromium (Debian: chromium).
SHOTS ?=
test-report: build ## compare the pages of cprun report with screenshots (Chromium)
	mkdir -p build/report
	bin/cprun report internal/lab/report/testdata/experiment --out build/report/experiment.html
	bin/cprun report internal/lab/report/testdata/hostile --out build/report/hostile.html
	bin/cprun report internal/lab/report/testdata/runs/ring-packed internal/lab/report/testdata/runs/allgather --out build/report/runs.html
	$(GO) test -C scripts/tools -count 1 ./browser -pages $(CURDIR)/build/report -shots $(CURDIR)/build/report/shots $(SHOTS)

# The Job for Kubernetes against the published schemas. Wants Python and the network.
check-kubernetes: ## check the Kubernetes Job against the published schemas
	scripts/kubernetes/check

# The agents of a job of many nodes in one process, on a network that loses packets and hosts. It
# prints the rows of docs/benchmarks/202611_cluster.md. Then jobs with faults at random, without a network.
AGENTS ?= 1024
JOBS   ?= 40000
simulate-cluster: ## simulate the agents of a job of many nodes
	$(GO) test -count 1 -v -timeout 3h -run 'TestSimulation$$' ./internal/launch/cluster/gossip -gossip.agents $(AGENTS)
	$(GO) test -count 1 -v -timeout 3h -run 'TestSimulation$$' ./internal/launch/cluster -cluster.agents $(AGENTS)
	$(GO) test -count 1 -timeout 3h -run TestRandomFaults ./internal/launch/cluster -seeds $(JOBS)

FUZZTIME ?= 30s
fuzz: ## run every fuzzer for FUZZTIME
	scripts/fuzz.sh $(FUZZTIME)

lint: staticcheck ## run go vet, gofmt and staticcheck
	$(GO) vet ./...
	test -z "$$($$($(GO) env GOROOT)/bin/gofmt -l .)"

# What only one of the two builds uses is used: staticcheck looks at both together.
staticcheck: ## run staticcheck on both builds
	$(GO) build -C scripts/tools -o $(CURDIR)/bin/staticcheck honnef.co/go/tools/cmd/staticcheck
	$(CUDA) printf 'plain: CGO_ENABLED=0 -tags=$(TAGS)\ncuda: CGO_ENABLED=1 -tags=cuda,$(TAGS)\n' | bin/staticcheck -matrix ./...

# Writes the assembly of the CPU kernels from kernels/cpu/internal/simd/gen, which is a module of its own.
asm: ## write the assembly of the CPU kernels
	cd kernels/cpu/internal/simd/gen && $(GO) run .
	scripts/asm-sums >kernels/cpu/internal/simd/gen/written.txt

# Go benchmarks, then, where PYTHON has PyTorch, transformers and numpy, the CPU path beside OpenBLAS and PyTorch: ratios of runs in
# turns. ROUNDS=5 for figures that are kept.
PYTHON ?= python3
ROUNDS ?= 1
bench: ## run the benchmarks, beside PyTorch if PYTHON has it
	$(GO) test -run '^$$' -bench . ./partition ./ring ./internal/foresee/plan ./kernels/cpu ./comm ./attention/...
	@if $(PYTHON) -c 'import numpy, torch, transformers' 2>/dev/null; then $(PYTHON) scripts/peer/cpu.py --rounds $(ROUNDS); \
	else echo "no comparison with peers: PYTHON=$(PYTHON) lacks numpy, torch or transformers (scripts/peer/README.md)"; fi

# With the tag cuda. scripts/cuda-env finds a toolkit, or has one's headers fetched.
CUDA = eval "$$(scripts/cuda-env)" &&

cuda: ## build bin/cprun for GPUs
	$(CUDA) $(GO) build -tags cuda,$(TAGS) -o bin/cprun ./cmd/cprun

# The tests with the tag cuda that need no GPU: runs the flash kernels as C++ on the CPU, compiles every
# kernel for every architecture and looks at what the compiler says of it, and loads made up drivers. With SHORT=-short,
# as in CI, each program is compiled for one architecture, in turns, but a sixteenth of those alone whose source, options and
# compiler have passed (kernels/gpu/internal/source/testdata/compiled.txt), and the host runs a third of the cases in the types beside the
# first. What go test would vet, vet-cuda does.
SHORT ?=
test-kernels: ## compile and test the CUDA kernels without a GPU
	$(CUDA) $(GO) test -tags cuda,$(TAGS) -vet off $(SHORT) -timeout 30m ./kernels/gpu/internal/call ./kernels/gpu/internal/source ./internal/base/cuda/nvrtc ./internal/base/cuda/driver

# Where no file has the tag, go vet sees what it has seen without; that all compile with it, tests too, staticcheck says.
vet-cuda: ## run go vet on the CUDA build
	$(CUDA) $(GO) vet -tags cuda,$(TAGS) $$(scripts/cuda-packages)

# Every test of the packages that use GPUs, on a machine with GPUs and Go, and once more under
# compute-sanitizer where it is installed. Without Go there: scripts/gpu-pack.
OUT ?= build/gpu
test-gpu: ## run every GPU test (GPUs)
	scripts/gpu-pack .carry
	OUT=$(OUT) .carry/run.sh --sanitize

gpu-pack: ## pack the GPU tests for machines without Go
	scripts/gpu-pack .carry

# Installs the binary in bin/, that of `make build` or `make cuda`, with docs and examples.
PREFIX  ?= /usr/local
DESTDIR ?=
install: ## install bin/cprun under PREFIX
	test -x bin/cprun || $(MAKE) build
	install -D -m 755 bin/cprun "$(DESTDIR)$(PREFIX)/bin/cprun"
	scripts/stage bin/cprun "$(DESTDIR)$(PREFIX)/share/doc/cprun"

# One archive with the CUDA build, which runs without GPUs too, the same bytes each time.
dist: ## make the release archive
	scripts/dist dist

# Packs twice, here and in a copy elsewhere: the archives must be the same bytes. It takes minutes.
check-dist: ## check that the archive is reproducible
	scripts/check-dist

clean: ## remove bin and dist
	rm -rf bin dist
