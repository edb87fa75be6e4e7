package qkv

// Format is the order of the axes of q, k and v in memory.
type Format uint8

// The formats. THD packs documents one behind another, without padding.
const (
	BSHD Format = iota
	SBHD
	THD
)

func (f Format) String() string { return [...]string{"bshd", "sbhd", "thd"}[f] }

// Packing says how q, k and v share memory.
type Packing uint8

// The packings, h query heads, g KV heads, d head dim. The names follow the axes that a
// packed tensor has behind batch and seq.
const (
	Separate  Packing = iota // three tensors: hd_hd_hd
	QKV3HD                   // [3, h, d]: 3hd
	QKVH3D                   // [h, 3, d]: h3d
	KV2HD                    // q apart, [2, g, d]: hd_2hd
	KVH2D                    // q apart, [g, 2, d]: hd_h2d
	QKVHeads                 // [h + 2g, d], q heads first, then k, then v: (h+2g)d
	QKVGroups                // [g, h/g + 2, d], each group's q heads, its k, its v: g(h/g+2)d
)

func (p Packing) String() string {
	return [...]string{"hd_hd_hd", "3hd", "h3d", "hd_2hd", "hd_h2d", "(h+2g)d", "g(h/g+2)d"}[p]
}
