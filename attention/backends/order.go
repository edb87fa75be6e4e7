package backends

import "slices"

// Order is the preference among the backends on a range of architectures, fastest first: what holds
// where the table of rates does not compare them.
type Order struct {
	Since, Until int // architectures [Since, Until), as in Params.Arch
	Backends     []Backend
	// Cheap is the rules whose remedies were measured to leave a backend faster than the next one
	// without any. With others it comes behind those that need none, whatever its rate, unless all
	// that they cost is an affordable part of the memory.
	Cheap  []string
	Source string
}

// Orders is the table of preferences. Unfused writes a score matrix of the square of the length, so
// it comes last of what runs on a GPU. On a GPU the reference runs only if named: it is slow, and
// as an answer to auto it would hide that nothing else can run.
var Orders = []Order{
	{0, 1, []Backend{Flash, Reference, Unfused, Fused}, nil,
		"CPU: the tiled kernels are the only fast ones; the reference is what they are tested against"},
	{1, 90, []Backend{Flash, Fused, Unfused}, nil,
		"U103, U104: on sm80, sm86 and sm89 fused attention is no faster than flash"},
	{90, 1 << 30, []Backend{Fused, Flash, Unfused}, []string{"fused-one-rectangle"},
		"U103, H03: fused attention is faster on Hopper and later than kernels of sm80: measured 593 TFLOP/s forward with cuDNN 9.19 and 350 with FlashAttention-2 on H200. " +
			"With our kernels for Hopper the rates say which"},
}

func orderOf(arch int) Order {
	for _, o := range Orders {
		if o.Since <= arch && arch < o.Until {
			return o
		}
	}
	return Orders[0]
}

// affordable is the part of a device's memory that a workspace of the square of the length may take
// before a backend that needs it comes behind those that need none. Measured on H200 at 16K tokens, where it is an
// eighth of the memory, deterministic fused attention is 1.2 to 2.2 times as fast as flash.
const affordable = 1. / 8

// plain reports whether a backend runs as it is, or with what costs little.
func (o *Order) plain(v verdict) bool {
	for _, a := range v.applied {
		if !slices.Contains(o.Cheap, a.Rule) && !a.affordable() {
			return false
		}
	}
	return true
}

// affordable reports whether what is applied is memory alone, and little of what the device has.
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
