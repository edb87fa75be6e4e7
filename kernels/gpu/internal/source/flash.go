package source

import (
	"fmt"
	"reflect"
	"slices"
)

// FlashShape is how the flash kernels are cut for head dims up to QK, of queries and keys, and V.
// Warps are of 32 threads.
type FlashShape struct {
	Float32 bool // for float32; else for bfloat16 and float16
	QK, V   int
	// The forward pass: blocks of Rows queries, and of Warps, take Step keys at once.
	Rows, Step, Warps int
	// The backward pass: blocks of Keys keys, and of BackwardWarps, walk over blocks of Queries
	// queries, which Stages buffers hold. What the warps divide among them differs from product to
	// product; these are how many are stacked on the queries of S, the keys of dK and dV, the
	// queries of dQ.
	Queries, Keys, Stages     int
	BackwardWarps             int
	SWarps, KeyWarps, DQWarps int
	// The kernel for dQ in a fixed order: blocks of OrderedRows queries, and of OrderedWarps, take
	// OrderedStep keys at once.
	OrderedRows, OrderedStep, OrderedWarps int
}

// FlashTiles is how many tiles are passed as arguments; more lie in memory.
const FlashTiles = 12

// SmallShared is the shared memory of a block, in bytes, on sm_86, sm_89 and sm_120, the least of
// all GPUs that the flash kernels are for.
const SmallShared = 99 << 10

// FlashShapes are the shapes that are compiled, for each kind of float the smallest head dims first.
// If there are two for the same, the second is for GPUs that have no room for the first, and takes
// no more than SmallShared. Other head dims are padded with zeros, in shared memory alone.
var FlashShapes = slices.Concat(flashHalf, flashSingle)

// FlashMaxDim is the largest head dim that there are shapes for.
const FlashMaxDim = 256

// FlashShapeFor returns the first shape for these head dims, in float32 or in 16 bits, that fits in shared bytes of
// shared memory a block; ok is false if there is none. needs returns a shape's demand, such as
// FlashShape.ForwardShared.
func FlashShapeFor(float32 bool, qk, v, shared int, needs func(FlashShape) int) (s FlashShape, ok bool) {
	for _, s := range FlashShapes {
		if s.Float32 == float32 && qk <= s.QK && v <= s.V && needs(s) <= shared {
			return s, true
		}
	}
	return FlashShape{}, false
}

// Forward returns the program of the forward pass.
func (s FlashShape) Forward() Program {
	return s.program("flash_forward", fmt.Sprintf("%dx%d", s.Rows, s.Step), define{"BM", s.Rows}, define{"BN", s.Step},
		define{"WARPS", s.Warps})
}

// Backward returns the program of the backward pass.
func (s FlashShape) Backward() Program {
	return s.program("flash_backward", fmt.Sprintf("%dx%dx%d", s.Queries, s.Keys, s.Stages), define{"BM", s.Queries},
		define{"BN", s.Keys}, define{"STAGES", s.Stages},
		define{"WARPS", s.BackwardWarps}, define{"S_WARPS", s.SWarps}, define{"K_WARPS", s.KeyWarps}, define{"Q_WARPS",
			s.DQWarps})
}

// DQ returns the program that adds up dQ in a fixed order.
func (s FlashShape) DQ() Program {
	return s.program("flash_dq", fmt.Sprintf("%dx%d", s.OrderedRows, s.OrderedStep), define{"BM", s.OrderedRows},
		define{"BN", s.OrderedStep}, define{"WARPS", s.OrderedWarps})
}

type define struct {
	name  string
	value int
}

func defines(list ...define) (text []string) {
	for _, d := range list {
		text = append(text, fmt.Sprintf("%s=%d", d.name, d.value))
	}
	return text
}

// program returns a file for the head dims; cut separates its name from other shapes' for the same.
func (s FlashShape) program(file string, cut string, more ...define) Program {
	name := file
	if s.Float32 {
		name, more = file+"_fp32", append(more, define{"FLOAT32", 1})
	}
	all := append([]define{{"HEAD_QK", s.QK}, {"HEAD_V", s.V}, {"INLINE_TILES", FlashTiles}}, more...)
	return Program{Name: fmt.Sprintf("%s_%d_%d_%s", name, s.QK, s.V, cut), File: file + ".cu", Defines: defines(all...)}
}

func (s FlashShape) size() int {
	if s.Float32 {
		return 4
	}
	return 2
}

// passed returns the shared memory that a warp's rows by step scores take on their way from a product to
// the next: none in 16 bits, where they stay in registers.
func (s FlashShape) passed(rows, step int) int {
	if s.Float32 {
		return rows * step * s.size()
	}
	return 0
}

// ForwardShared returns the shared memory of a block of the forward pass, in bytes: Q, K, V and P.
func (s FlashShape) ForwardShared() int {
	return s.size()*(s.Rows*s.QK+s.Step*(s.QK+s.V)) + s.passed(s.Rows, s.Step)
}

// BackwardShared returns that of the backward pass: K, V, P and dS, and Q, dO, LSE and delta of each
// stage.
func (s FlashShape) BackwardShared() int {
	return s.size()*(s.Keys*(s.QK+s.V)+2*s.Queries*s.Keys) + s.Stages*s.Queries*(s.size()*(s.QK+s.V)+2*4)
}

// DQShared returns that of DQ: Q, dO, K, V and dS.
func (s FlashShape) DQShared() int {
	return s.size()*(s.OrderedRows+s.OrderedStep)*(s.QK+s.V) + s.passed(s.OrderedRows, s.OrderedStep)
}

// ReferenceSlots are the head dims, over 32, that the reference kernel is compiled for.
var ReferenceSlots = []int{1, 4, 8}

// Reference returns the program of the reference for head dims up to 32 times slots.
func Reference(slots int) Program {
	return Program{Name: fmt.Sprintf("reference_%d", 32*slots), File: "reference.cu",
		Defines: []string{fmt.Sprintf("SLOTS=%d", slots)}}
}

// flash is the attention of our own.
var flash = flashPrograms()

func flashPrograms() []Program {
	list := []Program{{Name: "attention_common", File: "attention_common.cu"},
		{Name: "attention_sink", File: "attention_sink.cu"}}
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

// flashHalf are the shapes for bfloat16 and float16.
var flashHalf = []FlashShape{
	{QK: 32, V: 32, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 128, Stages: 2, BackwardWarps: 8, SWarps: 2,
		KeyWarps: 4, DQWarps: 4, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 64, V: 64, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 128, Stages: 2, BackwardWarps: 8, SWarps: 2,
		KeyWarps: 4, DQWarps: 4, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 96, V: 96, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 128, Stages: 2, BackwardWarps: 8, SWarps: 2,
		KeyWarps: 4, DQWarps: 4, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 96, V: 96, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 64, Stages: 2, BackwardWarps: 8, SWarps: 4,
		KeyWarps: 4, DQWarps: 4, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 128, V: 128, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 128, Stages: 2, BackwardWarps: 8, SWarps: 2,
		KeyWarps: 4, DQWarps: 2, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 128, V: 128, Rows: 128, Step: 64, Warps: 4, Queries: 32, Keys: 128, Stages: 1, BackwardWarps: 8, SWarps: 2,
		KeyWarps: 4, DQWarps: 2, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 192, V: 128, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 64, Stages: 2, BackwardWarps: 8, SWarps: 4,
		KeyWarps: 2, DQWarps: 2, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 192, V: 128, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 64, Stages: 1, BackwardWarps: 8, SWarps: 4,
		KeyWarps: 2, DQWarps: 2, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 192, V: 192, Rows: 128, Step: 64, Warps: 8, Queries: 64, Keys: 64, Stages: 2, BackwardWarps: 8, SWarps: 4,
		KeyWarps: 2, DQWarps: 2, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 192, V: 192, Rows: 128, Step: 64, Warps: 8, Queries: 32, Keys: 64, Stages: 1, BackwardWarps: 8, SWarps: 2,
		KeyWarps: 2, DQWarps: 2, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{QK: 256, V: 256, Rows: 128, Step: 64, Warps: 8, Queries: 64, Keys: 64, Stages: 1, BackwardWarps: 8, SWarps: 4,
		KeyWarps: 2, DQWarps: 2, OrderedRows: 64, OrderedStep: 32, OrderedWarps: 4},
	{QK: 256, V: 256, Rows: 128, Step: 32, Warps: 8, Queries: 32, Keys: 32, Stages: 1, BackwardWarps: 4, SWarps: 2,
		KeyWarps: 1, DQWarps: 1, OrderedRows: 64, OrderedStep: 32, OrderedWarps: 4},
}

// flashSingle are the shapes for float32. Elements take twice the room, and every thread multiplies values that it
// loads from shared memory, fewer the more of a product it has in registers: so blocks are as large as the room allows,
// with one stage. Head dims up to 96, and head dims of v below those of k, have no shapes: such models train in 16
// bits.
var flashSingle = []FlashShape{
	{Float32: true, QK: 32, V: 32, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 64, Stages: 1, BackwardWarps: 4,
		SWarps: 4, KeyWarps: 4, DQWarps: 4, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{Float32: true, QK: 64, V: 64, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 128, Stages: 1, BackwardWarps: 8,
		SWarps: 4, KeyWarps: 4, DQWarps: 4, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{Float32: true, QK: 64, V: 64, Rows: 128, Step: 64, Warps: 4, Queries: 64, Keys: 64, Stages: 1, BackwardWarps: 8,
		SWarps: 4, KeyWarps: 4, DQWarps: 4, OrderedRows: 64, OrderedStep: 64, OrderedWarps: 4},
	{Float32: true, QK: 128, V: 128, Rows: 128, Step: 64, Warps: 8, Queries: 64, Keys: 64, Stages: 1, BackwardWarps: 8,
		SWarps: 4, KeyWarps: 2, DQWarps: 2, OrderedRows: 64, OrderedStep: 32, OrderedWarps: 4},
	{Float32: true, QK: 128, V: 128, Rows: 64, Step: 32, Warps: 4, Queries: 32, Keys: 32, Stages: 1, BackwardWarps: 4,
		SWarps: 2, KeyWarps: 2, DQWarps: 2, OrderedRows: 32, OrderedStep: 32, OrderedWarps: 4},
	{Float32: true, QK: 192, V: 192, Rows: 128, Step: 32, Warps: 8, Queries: 32, Keys: 64, Stages: 1, BackwardWarps: 8,
		SWarps: 2, KeyWarps: 4, DQWarps: 4, OrderedRows: 64, OrderedStep: 32, OrderedWarps: 4},
	{Float32: true, QK: 192, V: 192, Rows: 32, Step: 32, Warps: 4, Queries: 16, Keys: 32, Stages: 1, BackwardWarps: 4,
		SWarps: 2, KeyWarps: 2, DQWarps: 2, OrderedRows: 16, OrderedStep: 32, OrderedWarps: 2},
	{Float32: true, QK: 256, V: 256, Rows: 64, Step: 32, Warps: 4, Queries: 32, Keys: 32, Stages: 1, BackwardWarps: 8,
		SWarps: 4, KeyWarps: 2, DQWarps: 2, OrderedRows: 32, OrderedStep: 32, OrderedWarps: 4},
	{Float32: true, QK: 256, V: 256, Rows: 16, Step: 32, Warps: 2, Queries: 16, Keys: 16, Stages: 1, BackwardWarps: 2,
		SWarps: 2, KeyWarps: 1, DQWarps: 2, OrderedRows: 16, OrderedStep: 32, OrderedWarps: 2},
}
