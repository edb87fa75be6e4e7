package backends

import "slices"

// An order ranks the backends of a range of architectures, fastest first. It decides unless the table of rates
// compares them.
type order struct {
	since    int // the first architecture, as in Params.Arch; the range ends at the next order
	backends []Backend
	// cheap lists rules with a remedy that was measured to leave the backend faster than the next one. A backend with
	// another remedy ranks after backends without, unless the remedy costs only an affordable part of the memory.
	cheap []string
}

// orders lists the preferences. On sm80, sm86 and sm89 cuDNN is no faster than flash. On Hopper our kernels are faster
// than cuDNN 9.19: 561 and 577 TFLOP/s forward and backward at 16K and 32K tokens of an H100, cuDNN 537 and 555; of
// packed documents on H200 441/304 forward/backward at 8K tokens a GPU and 552/416 at 32K, cuDNN 403/295 and 546/406.
// On later GPUs flash runs kernels of sm80, and cuDNN is faster (593 TFLOP/s forward on H200, FlashAttention-2 350).
// On a GPU the reference runs only if named: it is slow, and as an answer to auto it would hide that nothing else can
// run.
var orders = []order{
	{0, []Backend{Flash, Reference}, nil},
	{1, []Backend{Flash, Fused}, []string{"fused-one-rectangle"}},
	{91, []Backend{Fused, Flash}, []string{"fused-one-rectangle"}},
}

func orderOf(arch int) (o order) {
	for _, row := range orders {
		if row.since <= arch {
			o = row
		}
	}
	return o
}

// affordable is the share of a device's memory up to which a workspace of the square of the length leaves a backend
// its rank. Measured on H200 at 16K tokens (an eighth of the memory), deterministic fused attention is 1.2 to 2.2
// times as fast as flash.
const affordable = 1. / 8

// plain reports whether a backend runs without a remedy, or with cheap ones.
func (o *order) plain(v verdict) bool {
	for _, a := range v.applied {
		if !slices.Contains(o.cheap, a.Rule) && !a.affordable() {
			return false
		}
	}
	return true
}

// affordable reports whether the remedy costs memory alone, and a small share of the device's.
func (a *Applied) affordable() bool {
	if a.Kind != GrantWorkspace || len(a.Calls) == 0 {
		return false
	}
	for i := range a.Calls {
		if c := &a.Calls[i]; dpWorkspace(c) > affordable*float64(c.Memory) {
			return false
		}
	}
	return true
}
