package source

import (
	"fmt"
	"reflect"
	"slices"
)

// FlashShape is how the flash kernels are cut for head dims up to QK, of queries and keys, and V.
// Warps are of 32 threads.
type FlashShape struct {
	QK, V int
	// The forward pass: blocks of FlashQueries queries, and of Warps, take Step keys at once.
	Step, Warps int
	// The backward pass: blocks of Keys keys, and of BackwardWarps, walk over blocks of Queries
	// queries, which Stages buffers hold. What the warps divide among them differs from product to
	// product; these are how many are stacked on the queries of S, the keys of dK and dV, the
	// queries of dQ.
	Queries, Keys, Stages     int
	BackwardWarps             int
	SWarps, KeyWarps, DQWarps int
}

// What the shapes have in common.
const (
	FlashQueries   = 128 // of a block of the forward pass
	FlashDQQueries = 64  // of a block of the kernel for dQ in a certain order
	FlashDQWarps   = 4
	FlashTiles     = 12 // that are passed as arguments; more lie in memory
)

// SmallShared is the shared memory of a block, in bytes, on sm_86, sm_89 and sm_120, the least of
// all GPUs that the flash kernels are for.
const SmallShared = 99 << 10

// FlashShapes are the shapes that are compiled, the smallest head dims first. Where there are two
// for the same, the second is for GPUs that have no room for the first, and takes no more than
// SmallShared. Other head dims are padded with zeros, in shared memory alone.
var FlashShapes = []FlashShape{
	{QK: 32, V: 32, Step: 64, Warps: 4, Queries: 64, Keys: 128, Stages: 2, BackwardWarps: 8, SWarps: 2, KeyWarps: 4, DQWarps: 4},
	{QK: 64, V: 64, Step: 64, Warps: 4, Queries: 64, Keys: 128, Stages: 2, BackwardWarps: 8, SWarps: 2, KeyWarps: 4, DQWarps: 4},
	{QK: 96, V: 96, Step: 64, Warps: 4, Queries: 64, Keys: 128, Stages: 2, BackwardWarps: 8, SWarps: 2, KeyWarps: 4, DQWarps: 4},
	{QK: 96, V: 96, Step: 64, Warps: 4, Queries: 64, Keys: 64, Stages: 2, BackwardWarps: 8, SWarps: 4, KeyWarps: 4, DQWarps: 4},
	{QK: 128, V: 128, Step: 64, Warps: 4, Queries: 64, Keys: 128, Stages: 2, BackwardWarps: 8, SWarps: 2, KeyWarps: 4, DQWarps: 2},
	{QK: 128, V: 128, Step: 64, Warps: 4, Queries: 32, Keys: 128, Stages: 1, BackwardWarps: 8, SWarps: 2, KeyWarps: 4, DQWarps: 2},
	{QK: 192, V: 128, Step: 64, Warps: 4, Queries: 64, Keys: 64, Stages: 2, BackwardWarps: 8, SWarps: 4, KeyWarps: 2, DQWarps: 2},
	{QK: 192, V: 128, Step: 64, Warps: 4, Queries: 64, Keys: 64, Stages: 1, BackwardWarps: 8, SWarps: 4, KeyWarps: 2, DQWarps: 2},
	{QK: 192, V: 192, Step: 64, Warps: 8, Queries: 64, Keys: 64, Stages: 2, BackwardWarps: 8, SWarps: 4, KeyWarps: 2, DQWarps: 2},
	{QK: 192, V: 192, Step: 64, Warps: 8, Queries: 32, Keys: 64, Stages: 1, BackwardWarps: 8, SWarps: 2, KeyWarps: 2, DQWarps: 2},
	{QK: 256, V: 256, Step: 64, Warps: 8, Queries: 64, Keys: 64, Stages: 1, BackwardWarps: 8, SWarps: 4, KeyWarps: 2, DQWarps: 2},
	{QK: 256, V: 256, Step: 32, Warps: 8, Queries: 32, Keys: 32, Stages: 1, BackwardWarps: 4, SWarps: 2, KeyWarps: 1, DQWarps: 1},
}

// FlashMaxDim is the largest head dim that there are shapes for.
const FlashMaxDim = 256

// FlashShapeFor is the first shape for these head dims of which a pass needs no more than shared
// bytes of shared memory a block; ok is false where there is none. needs is what a pass needs, such
// as FlashShape.ForwardShared.
func FlashShapeFor(qk, v, shared int, needs func(FlashShape) int) (s FlashShape, ok bool) {
	for _, s := range FlashShapes {
		if qk <= s.QK && v <= s.V && needs(s) <= shared {
			return s, true
		}
	}
	return FlashShape{}, false
}

// Forward is the program of the forward pass.
func (s FlashShape) Forward() Program {
	return s.program("flash_forward", fmt.Sprintf("%dx%d", FlashQueries, s.Step), define{"BM", FlashQueries}, define{"BN", s.Step}, define{"WARPS", s.Warps})
}

// Backward is the program of the backward pass.
func (s FlashShape) Backward() Program {
	return s.program("flash_backward", fmt.Sprintf("%dx%dx%d", s.Queries, s.Keys, s.Stages), define{"BM", s.Queries}, define{"BN", s.Keys}, define{"STAGES", s.Stages},
		define{"WARPS", s.BackwardWarps}, define{"S_WARPS", s.SWarps}, define{"K_WARPS", s.KeyWarps}, define{"Q_WARPS", s.DQWarps})
}

// DQ is the program of dQ in a certain order.
func (s FlashShape) DQ() Program {
	return s.program("flash_dq", fmt.Sprintf("%dx%d", FlashDQQueries, s.dqKeys()), define{"BM", FlashDQQueries}, define{"BN", s.dqKeys()}, define{"WARPS", FlashDQWarps})
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

// program is a file for the head dims; cut tells its name from those of other shapes for the same.
func (s FlashShape) program(file string, cut string, defines ...define) Program {
	p := Program{Name: fmt.Sprintf("%s_%d_%d_%s", file, s.QK, s.V, cut), File: file + ".cu"}
	for _, d := range append([]define{{"HEAD_QK", s.QK}, {"HEAD_V", s.V}, {"INLINE_TILES", FlashTiles}}, defines...) {
		p.Defines = append(p.Defines, fmt.Sprintf("%s=%d", d.name, d.value))
	}
	return p
}

// ForwardShared is the shared memory of a block of the forward pass, in bytes: Q, K and V.
func (s FlashShape) ForwardShared() int {
	return 2 * (FlashQueries*s.QK + s.Step*(s.QK+s.V))
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
		for _, p := range []Program{s.Forward(), s.Backward(), s.DQ()} {
			same := func(q Program) bool { return reflect.DeepEqual(p, q) } // two shapes may differ in one pass alone
			if !slices.ContainsFunc(list, same) {
				list = append(list, p)
			}
		}
	}
	for _, n := range ReferenceSlots {
		list = append(list, Reference(n))
	}
	return list
}
