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

// A rate is the measured speed of a backend for one kind of attention.
type rate struct {
	rateKey
	backend       Backend
	forward, both float64 // TFLOP/s a GPU: forward pass, and forward and backward
}

// A rateKey identifies a kind of attention. Only rates with equal keys are compared.
type rateKey struct {
	arch          int // as in Params
	dtype         tensor.DType
	mask          rateMask
	headDim       int // of q, k and v
	deterministic bool
}

type rateMask string

// These masks are measured. A window ends at the query's own key. Over ranks it is a band beside the diagonal, which is
// another call.
const (
	rateFull            rateMask = "full"
	rateCausal          rateMask = "causal"
	rateWindow          rateMask = "window"
	rateWindowOverRanks rateMask = "window_over_ranks"
)

var rateMasks = []rateMask{rateFull, rateCausal, rateWindow, rateWindowOverRanks}

func (m rateMask) text() string {
	if m == rateFull {
		return "no mask"
	}
	return strings.ReplaceAll(string(m), "_", " ")
}

// measured holds the rates for the key of one p, by backend.
type measured struct {
	key     rateKey
	forward bool // only the forward pass
	rates   map[Backend]float64
}

// measuredFor looks up p's key in a table, with the head dim closest to p's: the smallest that is not below it, else
// the largest. It returns no rates for unmeasured kinds.
func measuredFor(p Params, table []rate) measured {
	m := measured{forward: !p.Training, rates: map[Backend]float64{}}
	var ok bool
	if m.key, ok = keyOf(p); !ok {
		return m
	}
	best := 0
	for _, r := range table {
		key := m.key
		key.headDim = r.headDim
		if r.rateKey == key && (best == 0 || closer(p.HeadDim, r.headDim, best)) {
			best = r.headDim
		}
	}
	m.key.headDim = best
	for _, r := range table {
		if r.rateKey != m.key {
			continue
		}
		if m.rates[r.backend] = r.both; m.forward {
			m.rates[r.backend] = r.forward
		}
	}
	return m
}

// closer reports whether head dim a represents dim better than b does: the smallest one that is not below dim, since
// kernels round up, else the largest.
func closer(dim, a, b int) bool {
	if a >= dim && b >= dim {
		return a < b
	}
	return a > b
}

// keyOf returns the key of p. ok is false if no rate applies to p.
func keyOf(p Params) (k rateKey, ok bool) {
	k = rateKey{arch: p.Arch, dtype: p.DType, headDim: p.HeadDim, deterministic: p.Deterministic}
	if k.dtype == tensor.F16 {
		k.dtype = tensor.BF16
	}
	plain := !p.Documents && !p.Softcap && !p.Sink && !p.Bias &&
		p.HeadDim == p.HeadDimV && p.SeqQ == p.SeqKV
	ranks, _ := p.rankGroups()
	switch {
	case !p.Causal && p.WindowLeft < 0 && p.WindowRight < 0:
		k.mask = rateFull
	case !p.Causal: // a band, or a window on one side
		return k, false
	case p.WindowLeft < 0:
		k.mask = rateCausal
	case ranks == 1:
		k.mask = rateWindow
	default:
		k.mask = rateWindowOverRanks
	}
	return k, plain
}

// rateTolerance is the relative difference below which two rates count as equal. Two runs of the table differ by as
// much for one kernel of cuDNN.
const rateTolerance = 0.05

// sort returns order with the measured backends sorted by rate. They exchange places among themselves; the others keep
// theirs, and nearly equal rates change nothing.
func (m *measured) sort(order []Backend) []Backend {
	var fast []Backend
	for _, b := range order {
		if m.rates[b] > 0 {
			fast = append(fast, b)
		}
	}
	for i := range fast {
		for ; i > 0 && m.rates[fast[i]] > m.rates[fast[i-1]]*(1+rateTolerance); i-- {
			fast[i], fast[i-1] = fast[i-1], fast[i]
		}
	}
	out := slices.Clone(order)
	for i, b := range out {
		if m.rates[b] > 0 {
			out[i], fast = fast[0], fast[1:]
		}
	}
	return out
}

// comparison describes the rates of b and of the others; "" if no other backend is compared with b.
func (m *measured) comparison(b Backend, order []Backend) string {
	if len(m.rates) < 2 || m.rates[b] == 0 {
		return ""
	}
	s := fmt.Sprintf("measured %.0f TFLOP/s at head dim %d, %s", m.rates[b], m.key.headDim, m.key.mask.text())
	if m.key.deterministic {
		s += ", deterministic"
	}
	if m.forward {
		s += ", forward"
	}
	for _, o := range order {
		if o != b && m.rates[o] > 0 {
			s += fmt.Sprintf("; %s %.0f", o, m.rates[o])
		}
	}
	return s
}

// ratesText is the output of scripts/gpu-rates on a machine with GPUs: rows, and remarks that begin with # and name the
// GPU, the versions, the commit and the command.
//
//go:embed rates.txt
var ratesText string

// rateTable parses ratesText once. Tests check that it is valid.
var rateTable = sync.OnceValue(func() []rate {
	rates, err := readRates(ratesText)
	if err != nil {
		panic("rates.txt, " + err.Error())
	}
	return rates
})

const rateFields = "arch dtype mask head_dim deterministic backend forward both"

// rateTypes lists the measured element types. fp16 uses the rates of bf16: the instructions take equally long.
var rateTypes = map[string]tensor.DType{"bf16": tensor.BF16, "fp32": tensor.F32}

// readRates parses a table of rates. Its errors name the line.
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
