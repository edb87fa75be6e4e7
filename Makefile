# cprun: `make run` trains the example, `make test` runs every test of the CPU build.
GO     ?= go
NPROC  ?= 4
CONFIG ?= examples/opticks.yaml
ARGS   ?=

export CGO_ENABLED ?= 0

.PHONY: all build run test race fuzz lint bench cuda vet-cuda test-kernels test-gpu gpu-pack clean

all: build

build:
	$(GO) build -o bin/cprun ./cmd/cprun

run: build
	bin/cprun --nproc $(NPROC) $(ARGS) $(CONFIG)

test:
	$(GO) vet ./...
	$(GO) test ./...

# The race detector needs cgo and a C compiler. Under it, on two busy cores, the slowest package
# comes close to the ten minutes that go test allows by itself.
race:
	CGO_ENABLED=1 $(GO) test -race -timeout 30m ./...

FUZZTIME ?= 30s
fuzz:
	scripts/fuzz.sh $(FUZZTIME)

lint:
	$(GO) vet ./...
	test -z "$$($$($(GO) env GOROOT)/bin/gofmt -l .)"

bench:
	$(GO) test -run '^$$' -bench . ./partition ./kernels ./comm ./attention

# With the tag cuda. scripts/cuda-env finds a toolkit, or has one's headers and link stubs fetched.
CUDA = eval "$$(scripts/cuda-env)" &&

cuda:
	$(CUDA) $(GO) build -tags cuda -o bin/cprun ./cmd/cprun

# Compiles every kernel for every architecture and looks at what the compiler says of it; no GPU
# is needed.
test-kernels:
	$(CUDA) $(GO) test -tags cuda -timeout 30m ./kernels/source ./internal/cuda/nvrtc

vet-cuda:
	$(CUDA) $(GO) vet -tags cuda ./...

# Every test of the packages that use GPUs, on a machine with GPUs and Go, and once more under
# compute-sanitizer where it is installed. Without Go there: scripts/gpu-pack.
OUT ?= build/gpu
test-gpu:
	scripts/gpu-pack .carry
	OUT=$(OUT) .carry/run.sh --sanitize

gpu-pack:
	scripts/gpu-pack .carry

clean:
	rm -rf bin
