package backends

import (
	_ "embed"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/cprun/cprun/tensor"
)

// ratesText is what scripts/gpu-rates writes on a machine with GPUs: rows, and remarks that begin with # and name the
// GPU, the versions, the commit and the command.
//
//go:embed rates.txt
var ratesText string

// rateTable reads ratesText once. A damaged table is a fault of the build, which the tests find.
var rateTable = sync.OnceValue(func() []rate {
	rates, err := readRates(ratesText)
	if err != nil {
		panic("rates.txt, " + err.Error())
	}
	return rates
})

const rateFields = "arch dtype mask head_dim deterministic backend forward both"

// rateTypes are the element types that are measured. fp16 has the rates of bf16: the instructions take as long.
var rateTypes = map[string]tensor.DType{"bf16": tensor.BF16, "fp32": tensor.F32}

// readRates reads a table of rates. Its errors name the line.
func readRates(text string) (rates []rate, err error) {
	n := 0
	for line := range strings.Lines(text) {
		n++
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		var r rate
		var dtype, deterministic, backend string
		_, err := fmt.Sscan(line, &r.arch, &dtype, &r.mask, &r.headDim, &deterministic, &backend, &r.forward, &r.both)
		r.dtype, r.deterministic = rateTypes[dtype], deterministic == "yes"
		r.backend, _ = ParseBackend(backend)
		if err != nil || r.arch <= 0 || r.dtype == tensor.Invalid || !slices.Contains(rateMasks, r.mask) ||
			r.headDim <= 0 ||
			deterministic != "yes" && deterministic != "no" || r.backend == Auto || !rateOK(r.forward) ||
			!rateOK(r.both) {
			return nil, fmt.Errorf("line %d: %q: want %s", n, line, rateFields)
		}
		if slices.ContainsFunc(rates, func(o rate) bool { return o.rateKey == r.rateKey && o.backend == r.backend }) {
			return nil, fmt.Errorf("line %d: measured in a line above", n)
		}
		rates = append(rates, r)
	}
	return rates, nil
}

func rateOK(x float64) bool { return x > 0 && !math.IsInf(x, 0) }
