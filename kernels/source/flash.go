package source

import "fmt"

// FlashShape is how the flash kernels are cut for head dims up to QK, of queries and keys, and V.
// Blocks are of so many queries or keys; Warps are of 32 threads.
type FlashShape struct {
	QK, V int
	Warps int // of a block of the forward pass
	// The backward pass: blocks of Keys keys walk over blocks of Queries queries, which Stages
	// buffers hold. What the warps divide among them differs from product to product; these
	// are how many are stacked on the queries of S, the keys of dK and dV, the queries of dQ.
	Queries, Keys, Stages     int
	SWarps, KeyWarps, DQWarps int
}

// What the shapes have in common.
const (
	FlashQueries       = 128 // of a block of the forward pass
	FlashKeys          = 64  // that it takes at once
	FlashBackwardWarps = 8
	FlashDQQueries     = 64 // of a block of the kernel for dQ in a certain order
	FlashDQWarps       = 4
	FlashTiles         = 12 // that are passed as arguments; more lie in memory
)

// FlashShapes are the shapes that are compiled, the smallest first. Other head dims are padded
// with zeros, in shared memory alone.
var FlashShapes = []FlashShape{
	{QK: 32, V: 32, Warps: 4, Queries: 64, Keys: 128, Stages: 2, SWarps: 2, KeyWarps: 4, DQWarps: 4},
	{QK: 64, V: 64, Warps: 4, Queries: 64, Keys: 128, Stages: 2, SWarps: 2, KeyWarps: 4, DQWarps: 4},
	{QK: 96, V: 96, Warps: 4, Queries: 64, Keys: 128, Stages: 2, SWarps: 2, KeyWarps: 4, DQWarps: 4},
	{QK: 128, V: 128, Warps: 4, Queries: 64, Keys: 128, Stages: 2, SWarps: 2, KeyWarps: 4, DQWarps: 2},
	{QK: 192, V: 128, Warps: 4, Queries: 64, Keys: 64, Stages: 2, SWarps: 4, KeyWarps: 2, DQWarps: 2},
	{QK: 192, V: 192, Warps: 8, Queries: 64, Keys: 64, Stages: 2, SWarps: 4, KeyWarps: 2, DQWarps: 2},
	{QK: 256, V: 256, Warps: 8, Queries: 64, Keys: 64, Stages: 1, SWarps: 4, KeyWarps: 2, DQWarps: 2},
}

// FlashShapeFor is the smallest shape for these head dims; ok is false where they are too large.
func FlashShapeFor(qk, v int) (s FlashShape, ok bool) {
	for _, s := range FlashShapes {
		if qk <= s.QK && v <= s.V {
			return s, true
		}
	}
	return FlashShape{}, false
}

// Forward is the program of the forward pass.
func (s FlashShape) Forward() Program {
	return s.program("flash_forward", define{"BM", FlashQueries}, define{"BN", FlashKeys}, define{"WARPS", s.Warps})
}

// Backward is the program of the backward pass.
func (s FlashShape) Backward() Program {
	return s.program("flash_backward", define{"BM", s.Queries}, define{"BN", s.Keys}, define{"STAGES", s.Stages}, define{"WARPS", FlashBackwardWarps},
		define{"S_WARPS", s.SWarps}, define{"K_WARPS", s.KeyWarps}, define{"Q_WARPS", s.DQWarps})
}

// DQ is the program of dQ in a certain order.
func (s FlashShape) DQ() Program {
	return s.program("flash_dq", define{"BM", FlashDQQueries}, define{"BN", s.dqKeys()}, define{"WARPS", FlashDQWarps})
}

// dqKeys is how many keys DQ takes at once: fewer where registers would not do.
func (s FlashShape) dqKeys() int {
	if s.QK > 192 {
		return 32
	}
	return 64
}

type define struct {
	name  string
	value int
}

func (s FlashShape) program(file string, defines ...define) Program {
	p := Program{Name: fmt.Sprintf("%s_%d_%d", file, s.QK, s.V), File: file + ".cu"}
	for _, d := range append([]define{{"HEAD_QK", s.QK}, {"HEAD_V", s.V}, {"INLINE_TILES", FlashTiles}}, defines...) {
		p.Defines = append(p.Defines, fmt.Sprintf("%s=%d", d.name, d.value))
	}
	return p
}

// ForwardShared is the shared memory of a block of the forward pass, in bytes: Q, K and V.
func (s FlashShape) ForwardShared() int {
	return 2 * (FlashQueries*s.QK + FlashKeys*(s.QK+s.V))
}

// BackwardShared is that of the backward pass: K, V, P and dS, and Q, dO, LSE and delta of each
// stage.
func (s FlashShape) BackwardShared() int {
	return 2*(s.Keys*(s.QK+s.V)+2*s.Queries*s.Keys) + s.Stages*s.Queries*(2*(s.QK+s.V)+2*4)
}

// DQShared is that of DQ: Q, dO, K and V.
func (s FlashShape) DQShared() int {
	return 2 * (FlashDQQueries + s.dqKeys()) * (s.QK + s.V)
}

// ReferenceSlots are the head dims, over 32, that the reference kernel is compiled for.
var ReferenceSlots = []int{1, 4, 8}

// Reference is the program of the reference for head dims up to 32 times slots.
func Reference(slots int) Program {
	return Program{Name: fmt.Sprintf("reference_%d", 32*slots), File: "reference.cu", Defines: []string{fmt.Sprintf("SLOTS=%d", slots)}}
}

// flash is the attention of our own.
var flash = flashPrograms()

func flashPrograms() []Program {
	list := []Program{{Name: "attention_common", File: "attention_common.cu"}}
	for _, s := range FlashShapes {
		list = append(list, s.Forward(), s.Backward(), s.DQ())
	}
	for _, n := range ReferenceSlots {
		list = append(list, Reference(n))
	}
	return list
}
