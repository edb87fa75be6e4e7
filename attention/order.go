package attention

// Order is the preference among the backends on a range of architectures, fastest first.
type Order struct {
	Since, Until int // architectures [Since, Until), as in Params.Arch
	Backends     []Backend
	Source       string
}

// Orders is the table of preferences. Unfused writes a score matrix of the square of the
// length, so it comes last of what runs on a GPU. The reference is a definition: on a GPU it
// runs where it is named and is never an answer to auto, which would hide that nothing fits.
var Orders = []Order{
	{0, 1, []Backend{Flash, BackendReference, Unfused, Fused},
		"CPU: the tiled kernels are the only fast ones; the reference is what they are tested against"},
	{1, 90, []Backend{Flash, Fused, Unfused},
		"U103, U104: on sm80, sm86 and sm89 fused attention is no faster than flash"},
	{90, 1 << 30, []Backend{Fused, Flash, Unfused},
		"U103, H03: fused attention is faster on Hopper and later; measured 593 TFLOP/s forward with cuDNN 9.19 and 350 with FlashAttention-2 on H200"},
}

func orderOf(arch int) Order {
	for _, o := range Orders {
		if o.Since <= arch && arch < o.Until {
			return o
		}
	}
	return Orders[0]
}
