package backends

import "github.com/cprun/cprun/attention/qkv"

// WithLayout returns p with the layout of its tensors as Detect found it. A declared layout that
// Verify has accepted counts as Exact.
func (p Params) WithLayout(l qkv.Layout, fit qkv.Fit) Params {
	p.Format, p.Packing = l.Q, l.Packing
	p.MixedFormats, p.Contiguous = l.Q != l.KV, fit == qkv.Exact
	return p
}
