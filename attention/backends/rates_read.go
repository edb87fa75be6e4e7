package backends

import (
	_ "embed"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
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

// readRates reads a table of rates. Its errors name the line and the field.
func readRates(text string) ([]rate, error) {
	var rates []rate
	n := 0
	for line := range strings.Lines(text) {
		n++
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		r, err := readRate(line)
		if slices.ContainsFunc(rates, func(o rate) bool { return o.rateKey == r.rateKey && o.backend == r.backend }) {
			err = errors.Join(err, errors.New("measured in a line above"))
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		rates = append(rates, r)
	}
	return rates, nil
}

func readRate(line string) (r rate, err error) {
	f := strings.Fields(line)
	if want := len(strings.Fields(rateFields)); len(f) != want {
		return r, fmt.Errorf("%d fields, want %d: %s", len(f), want, rateFields)
	}
	var backend error
	r.mask, r.deterministic, r.dtype = rateMask(f[2]), f[4] == "yes", rateTypes[f[1]]
	r.backend, backend = ParseBackend(f[5])
	if r.dtype == tensor.Invalid {
		err = fmt.Errorf("dtype %q: want bf16 or fp32", f[1])
	}
	if !slices.Contains(rateMasks, r.mask) {
		err = errors.Join(err, fmt.Errorf("mask %q: want %s", f[2], rateMasks))
	}
	if f[4] != "yes" && f[4] != "no" {
		err = errors.Join(err, fmt.Errorf("deterministic %q: want yes or no", f[4]))
	}
	if backend != nil || r.backend == Auto {
		err = errors.Join(err, fmt.Errorf("backend %q: want flash, fused or reference", f[5]))
	}
	return r, errors.Join(err, positive(&r.arch, "arch", f[0]), positive(&r.headDim, "head_dim", f[3]),
		rateOf(&r.forward, "forward", f[6]), rateOf(&r.both, "both", f[7]))
}

func positive(at *int, field, text string) (err error) {
	if *at, err = strconv.Atoi(text); err != nil || *at <= 0 {
		return fmt.Errorf("%s %q: want a positive integer", field, text)
	}
	return nil
}

func rateOf(at *float64, field, text string) (err error) {
	if *at, err = strconv.ParseFloat(text, 64); err != nil || !(*at > 0) || math.IsInf(*at, 0) {
		return fmt.Errorf("%s %q: want TFLOP/s, above 0", field, text)
	}
	return nil
}
