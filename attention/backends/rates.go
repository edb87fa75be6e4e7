package backends

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cprun/cprun/tensor"
)

// Rate is how fast a backend was measured to be on a kind of attention.
type Rate struct {
	RateKey
	Backend       Backend
	Forward, Both float64 // TFLOP/s a GPU: of the forward pass, and of forward and backward
	Source        *RateSource
}

// RateKey is a kind of attention that is measured. Rates of different backends are compared only where
// their keys are equal.
type RateKey struct {
	Arch          int // as in Params
	DType         tensor.DType
	Mask          RateMask
	HeadDim       int // of q, k and v
	Deterministic bool
}

// RateSource is where rates come from.
type RateSource struct {
	GPU           string
	CUDNN, CUDA   string // versions
	Commit        string // of cprun
	Date, Command string
}

func (s *RateSource) String() string {
	return fmt.Sprintf("%s, cuDNN %s, CUDA %s, commit %s, %s: %s", s.GPU, s.CUDNN, s.CUDA, s.Commit, s.Date, s.Command)
}

// RateMask is a mask by the name that the table of rates has for it.
type RateMask string

// The masks that are measured. A window ends at the query's own key. Over ranks it is a band beside the
// diagonal, which is another call.
const (
	RateFull            RateMask = "full"
	RateCausal          RateMask = "causal"
	RateWindow          RateMask = "window"
	RateWindowOverRanks RateMask = "window_over_ranks"
)

var rateMasks = []RateMask{RateFull, RateCausal, RateWindow, RateWindowOverRanks}

func (m RateMask) known() bool { return slices.Contains(rateMasks, m) }

// Text returns the mask as a sentence has it.
func (m RateMask) Text() string {
	if m == RateFull {
		return "no mask"
	}
	return strings.ReplaceAll(string(m), "_", " ")
}

// Rates returns the measured rates, in the order of the table.
func Rates() []Rate { return slices.Clone(rateTable()) }

// measured is the rates at the key of one p, of each backend that has one.
type measured struct {
	key     RateKey
	forward bool // compare the forward pass alone
	rates   map[Backend]float64
}

// measuredFor finds what of a table says how fast p is: its key, but with the head dim that the table
// has, the smallest that is not below p's, or the largest. It finds nothing for what is not measured.
func measuredFor(p Params, table []Rate) measured {
	m := measured{forward: !p.Training, rates: map[Backend]float64{}}
	var ok bool
	if m.key, ok = rateKey(p); !ok {
		return m
	}
	best := 0
	for _, r := range table {
		if r.RateKey == withDim(m.key, r.HeadDim) && (best == 0 || closer(p.HeadDim, r.HeadDim, best)) {
			best = r.HeadDim
		}
	}
	m.key.HeadDim = best
	for _, r := range table {
		if r.RateKey != m.key {
			continue
		}
		if m.rates[r.Backend] = r.Both; m.forward {
			m.rates[r.Backend] = r.Forward
		}
	}
	return m
}

func withDim(k RateKey, dim int) RateKey {
	k.HeadDim = dim
	return k
}

// closer reports whether head dim a says more about dim than b does: the smallest that is not below it
// is what kernels round up to, and above all of them the largest is next to it.
func closer(dim, a, b int) bool {
	if a >= dim && b >= dim {
		return a < b
	}
	return a > b
}

// rateKey is the key of p; false for what no row can be about, whatever it measures.
func rateKey(p Params) (k RateKey, ok bool) {
	k = RateKey{Arch: p.Arch, DType: p.DType, HeadDim: p.HeadDim, Deterministic: p.Deterministic}
	if k.DType == tensor.F16 {
		k.DType = tensor.BF16
	}
	plain := !p.Documents && !p.Softcap && !p.Dropout && p.Softmax == Vanilla && p.Bias == NoBias && p.FP8 == NoFP8 &&
		p.HeadDim == p.HeadDimV && p.SeqQ == p.SeqKV
	ranks, _ := p.sharing()
	switch {
	case !p.Causal && p.WindowLeft < 0 && p.WindowRight < 0:
		k.Mask = RateFull
	case !p.Causal: // a band, or a window on one side
		return k, false
	case p.WindowLeft < 0:
		k.Mask = RateCausal
	case ranks == 1:
		k.Mask = RateWindow
	default:
		k.Mask = RateWindowOverRanks
	}
	return k, plain
}

// compares reports whether there are rates of more than one backend.
func (m *measured) compares() bool { return len(m.rates) > 1 }

// alike is the part of a rate by which two runs of the table differ for one and the same kernel of cuDNN: rates no further apart do not
// compare.
const alike = 0.05

// sort is an order of backends with those that are measured fastest first. They share the places that
// they had; the rest stay where they are, and rates that are alike leave the order as it is.
func (m *measured) sort(order []Backend) []Backend {
	var fast []Backend
	for _, b := range order {
		if m.rates[b] > 0 {
			fast = append(fast, b)
		}
	}
	for i := range fast {
		for ; i > 0 && m.rates[fast[i]] > m.rates[fast[i-1]]*(1+alike); i-- {
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

// about says the rates of b and of the others, "" where nothing is compared with b.
func (m *measured) about(b Backend, order []Backend) string {
	if !m.compares() || m.rates[b] == 0 {
		return ""
	}
	s := fmt.Sprintf("measured %.0f TFLOP/s at head dim %d, %s", m.rates[b], m.key.HeadDim, m.key.Mask.Text())
	if m.key.Deterministic {
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
