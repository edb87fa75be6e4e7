package backends

import (
	_ "embed"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cprun/cprun/tensor"
)

// ratesText is what scripts/gpu-rates wrote on a machine with GPUs.
//
//go:embed rates.txt
var ratesText string

// rateTable reads ratesText once. A damaged table is a fault of the build, which the tests find.
var rateTable = sync.OnceValue(func() []Rate {
	rates, err := readRates(ratesText)
	if err != nil {
		panic("attention/backends/rates.txt, " + err.Error())
	}
	return rates
})

// The lines of a table of rates. Each row is of the last source above it, so that the tables of several
// machines can stand one behind the other. Other lines that begin with # are remarks.
const (
	sourceMark   = "# source: "
	sourceFields = "GPU; cuDNN VERSION; CUDA VERSION; commit HASH; YYYY-MM-DD; COMMAND"
	rateFields   = "arch dtype mask head_dim deterministic backend forward both"
)

// rateTypes are the element types that are measured. fp16 has the rates of bf16: the instructions take
// as long.
var rateTypes = map[string]tensor.DType{"bf16": tensor.BF16, "fp32": tensor.F32}

// readRates reads a table of rates. Its errors name the line and the field.
func readRates(text string) ([]Rate, error) {
	var rates []Rate
	var source *RateSource
	type place struct {
		RateKey
		Backend
	}
	seen := map[place]int{}
	n := 0
	for line := range strings.Lines(text) {
		n++
		line = strings.TrimSpace(line)
		var err error
		var r Rate
		switch {
		case strings.HasPrefix(line, sourceMark):
			source, err = readSource(line)
		case line == "" || line[0] == '#':
		case source == nil:
			err = fmt.Errorf("no line %q above it", sourceMark+sourceFields)
		default:
			if r, err = readRate(line); err == nil && seen[place{r.RateKey, r.Backend}] > 0 {
				err = fmt.Errorf("measured in line %d already", seen[place{r.RateKey, r.Backend}])
			}
			seen[place{r.RateKey, r.Backend}] = n
			r.Source = source
			rates = append(rates, r)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
	}
	return rates, nil
}

func readSource(line string) (*RateSource, error) {
	f := strings.Split(strings.TrimPrefix(line, sourceMark), "; ")
	if len(f) != strings.Count(sourceFields, ";")+1 {
		return nil, fmt.Errorf("source: %d fields, want %s", len(f), sourceFields)
	}
	s := &RateSource{GPU: f[0], Date: f[4], Command: f[5]}
	for _, named := range []struct {
		at         *string
		name, text string
	}{{&s.CUDNN, "cuDNN", f[1]}, {&s.CUDA, "CUDA", f[2]}, {&s.Commit, "commit", f[3]}} {
		value, ok := strings.CutPrefix(named.text, named.name+" ")
		if !ok || value == "" {
			return nil, fmt.Errorf("source: %q: want %s and its value", named.text, named.name)
		}
		*named.at = value
	}
	if _, err := time.Parse(time.DateOnly, s.Date); err != nil {
		return nil, fmt.Errorf("source: date %q: want YYYY-MM-DD", s.Date)
	}
	if s.GPU == "" || s.Command == "" {
		return nil, fmt.Errorf("source: want %s, none of them empty", sourceFields)
	}
	return s, nil
}

func readRate(line string) (r Rate, err error) {
	f := strings.Fields(line)
	if want := len(strings.Fields(rateFields)); len(f) != want {
		return r, fmt.Errorf("%d fields, want %d: %s", len(f), want, rateFields)
	}
	var backend error
	r.Mask, r.Deterministic, r.DType = RateMask(f[2]), f[4] == "yes", rateTypes[f[1]]
	r.Backend, backend = ParseBackend(f[5])
	if r.DType == tensor.Invalid {
		err = fmt.Errorf("dtype %q: want bf16 or fp32", f[1])
	}
	if !r.Mask.known() {
		err = errors.Join(err, fmt.Errorf("mask %q: want %s", f[2], rateMasks))
	}
	if f[4] != "yes" && f[4] != "no" {
		err = errors.Join(err, fmt.Errorf("deterministic %q: want yes or no", f[4]))
	}
	if backend != nil || r.Backend == Auto {
		err = errors.Join(err, fmt.Errorf("backend %q: want flash, fused, unfused or reference", f[5]))
	}
	return r, errors.Join(err, positive(&r.Arch, "arch", f[0]), positive(&r.HeadDim, "head_dim", f[3]),
		rateOf(&r.Forward, "forward", f[6]), rateOf(&r.Both, "both", f[7]))
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
