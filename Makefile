# cprun: `make run` trains the example, `make test` runs every test of the CPU build.
GO     ?= go
NPROC  ?= 4
CONFIG ?= examples/opticks.yaml
ARGS   ?=

export CGO_ENABLED ?= 0

.PHONY: all build run test race fuzz lint bench clean

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

clean:
	rm -rf bin
