package source

import (
	"fmt"
	"reflect"
	"slices"
)

// FlashShape holds the tile sizes of the flash kernels for head dims up to QK, of queries and keys, and V, of values.
type FlashShape struct {
	Float32 bool // for float32; else for bfloat16 and float16
	QK, V   int
	// Split warps, if not 0, share rows of the forward pass and of dQ: their registers hold a part of the columns each.
	Split int
	// Forward pass: a block has Rows queries and Warps warps, and takes Step keys at once.
	Rows, Step, Warps int
	// Backward pass: a block has Keys keys and BackwardWarps warps. It visits blocks of Queries queries, in Stages
	// buffers. The products divide their rows among different numbers of warps: SWarps along the queries of S, KeyWarps
	// along the keys of dK and dV, DQWarps along the queries of dQ.
	Queries, Keys, Stages     int
	BackwardWarps             int
	SWarps, KeyWarps, DQWarps int
	// Kernel for dQ in a fixed order: a block has OrderedRows queries and OrderedWarps warps, and takes OrderedStep
	// keys at once.
	OrderedRows, OrderedStep, OrderedWarps int
}

// FlashTiles is the largest number of tiles that are passed as arguments. Longer lists are in device memory.
const FlashTiles = 12

// SmallShared is the shared memory of a block, in bytes, on sm_86, sm_89 and sm_120, the smallest of all supported
// GPUs.
const SmallShared = 99 << 10

// FlashShapes lists the compiled shapes, for each kind of float in ascending order of head dims. If there are two for
// the same head dims, the second takes at most SmallShared, for GPUs with too little shared memory for the first. Other
// head dims are padded with zeros in shared memory.
var FlashShapes = slices.Concat(flashHalf, flashSingle)

// FlashMaxDim is the largest head dim of all shapes.
const FlashMaxDim = 512

// FlashShapeFor returns the first shape for these head dims, in float32 or 16 bits, whose blocks fit in shared bytes of
// shared memory. ok is false if there is none. needs returns the demand of a shape, such as FlashShape.ForwardShared.
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

// DQ returns the program that computes dQ in a fixed order.
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

// program returns a program of the shape. cut distinguishes its name from other shapes for the same head dims.
func (s FlashShape) program(file string, cut string, more ...define) Program {
	name := file
	if s.Float32 {
		name, more = file+"_fp32", append(more, define{"FLOAT32", 1})
	}
	all := append([]define{{"HEAD_QK", s.QK}, {"HEAD_V", s.V}, {"INLINE_TILES", FlashTiles}, {"SPLIT", max(1, s.Split)}},
		more...)
	return Program{Name: fmt.Sprintf("%s_%d_%d_%s", name, s.QK, s.V, cut), File: file + ".cu", Defines: defines(all...)}
}

func (s FlashShape) size() int {
	if s.Float32 {
		return 4
	}
	return 2
}

// passed returns the shared memory that passes rows by step scores from one product to the next. In 16 bits, scores
// stay in registers.
func (s FlashShape) passed(rows, step int) int {
	if s.Float32 {
		return max(1, s.Split) * rows * step * s.size()
	}
	return 0
}

// ForwardShared returns the shared memory of a block of the forward pass, in bytes: Q, K, V and P.
func (s FlashShape) ForwardShared() int {
	return s.size()*(s.Rows*s.QK+s.Step*(s.QK+s.V)) + s.passed(s.Rows, s.Step)
}

// BackwardShared returns the shared memory of a block of the backward pass: K, V, P and dS, and Q, dO, LSE and delta of
// each stage.
func (s FlashShape) BackwardShared() int {
	return s.size()*(s.Keys*(s.QK+s.V)+2*s.Queries*s.Keys) + s.Stages*s.Queries*(s.size()*(s.QK+s.V)+2*4)
}

// DQShared returns the shared memory of a block of DQ: Q, dO, K, V and dS.
func (s FlashShape) DQShared() int {
	return s.size()*(s.OrderedRows+s.OrderedStep)*(s.QK+s.V) + s.passed(s.OrderedRows, s.OrderedStep)
}

// ReferenceSlots lists the compiled head dims of the reference kernel, divided by 32.
var ReferenceSlots = []int{1, 4, 8, 16}

// Reference returns the program of the reference for head dims up to 32 times slots.
func Reference(slots int) Program {
	return Program{Name: fmt.Sprintf("reference_%d", 32*slots), File: "reference.cu",
		Defines: []string{fmt.Sprintf("SLOTS=%d", slots)}}
}

// flash holds cprun's own attention kernels, except those for Hopper.
var flash = flashPrograms()

func flashPrograms() []Program {
	list := []Program{{Name: "attention_common", File: "attention_common.cu"},
		{Name: "attention_sink", File: "attention_sink.cu"}}
	for _, s := range FlashShapes {
		for _, p := range []Program{s.Forward(), s.Backward(), s.DQ()} {
			same := func(q Program) bool { return reflect.DeepEqual(p, q) } // two shapes may share some of the passes
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

// flashHalf lists the shapes for bfloat16 and float16.
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
	{QK: 512, V: 512, Split: 2, Rows: 64, Step: 32, Warps: 8, Queries: 32, Keys: 32, Stages: 1, BackwardWarps: 8,
		SWarps: 2, KeyWarps: 2, DQWarps: 2, OrderedRows: 64, OrderedStep: 16, OrderedWarps: 8},
	{QK: 512, V: 512, Split: 2, Rows: 32, Step: 32, Warps: 4, Queries: 16, Keys: 32, Stages: 1, BackwardWarps: 8,
		SWarps: 1, KeyWarps: 2, DQWarps: 1, OrderedRows: 32, OrderedStep: 16, OrderedWarps: 4},
}

// flashSingle lists the shapes for float32. Elements take twice the memory. Threads load their factors from shared
// memory, and larger blocks need fewer loads. So blocks are as large as shared memory allows, with one stage. There are
// no shapes for head dim 96, nor for a head dim of v below that of k, since such models train in 16 bits.
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
	{Float32: true, QK: 512, V: 512, Split: 2, Rows: 32, Step: 16, Warps: 8, Queries: 16, Keys: 16, Stages: 1,
		BackwardWarps: 8, SWarps: 2, KeyWarps: 1, DQWarps: 2, OrderedRows: 16, OrderedStep: 16, OrderedWarps: 4},
	{Float32: true, QK: 512, V: 512, Split: 4, Rows: 8, Step: 16, Warps: 4, Queries: 8, Keys: 16, Stages: 1,
		BackwardWarps: 8, SWarps: 1, KeyWarps: 1, DQWarps: 1, OrderedRows: 8, OrderedStep: 16, OrderedWarps: 4},
}
