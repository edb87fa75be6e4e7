package source

import "fmt"

// GroupProduct is a product of rows sorted by expert; see hopper_group.cu.
type GroupProduct int

// The products of hopper_group.cu.
const (
	GroupForward GroupProduct = iota
	GroupDX
	GroupDW
	GroupGLU   // forward and silu(gate) * up
	GroupGLUDX // dx and the gradients of silu(gate) * up
)

func (p GroupProduct) String() string { return [...]string{"forward", "dx", "dw", "glu", "glu_dx"}[p] }

// HopperGroupShape holds the tile sizes of a product: 128 rows by Width columns, with Stages steps of 64 in shared
// memory.
type HopperGroupShape struct{ Width, Stages int }

// HopperGroupShapes lists the compiled shapes. Each has as many stages as shared memory holds.
var HopperGroupShapes = []HopperGroupShape{{256, 4}, {192, 4}, {64, 8}}

// MaxGroupExperts bounds the experts, whose first places are in shared memory.
const MaxGroupExperts = 512

// Boxes of TMA, and the tiles of a block.
const (
	GroupRows = 128
	GroupStep = 64
)

// HopperGroupShapeFor returns the shape that takes the least time for an output's columns. By measurement, a tile takes
// that of its columns and of about 32 more, or 96 for DW. Products with gated activations are compiled for one shape.
func HopperGroupShapeFor(p GroupProduct, columns int) (best HopperGroupShape) {
	if p >= GroupGLU {
		return HopperGroupShapes[0]
	}
	more, least := 32, 0
	if p == GroupDW {
		more = 96
	}
	for _, s := range HopperGroupShapes {
		if n := (columns + s.Width - 1) / s.Width * (s.Width + more); best.Width == 0 || n < least {
			best, least = s, n
		}
	}
	return best
}

// Program returns the program of a product, scaled for operands in E4M3.
func (s HopperGroupShape) Program(p GroupProduct, scaled bool) Program {
	name, constant := option(scaled, "scaled", "SCALED")
	return Program{
		Name: fmt.Sprintf("hopper_group_%v%s_%d", p, name, s.Width), File: "hopper_group.cu", Archs: hopperArchs,
		Defines: defines(define{"PRODUCT", int(p)}, constant, define{"BN", s.Width}, define{"STAGES", s.Stages}),
	}
}

// Shared returns the shared memory of a block, in bytes: the stages, one or two panels of 16 rows for each of eight
// warps, four tiles, barriers and first places.
func (s HopperGroupShape) Shared(p GroupProduct, scaled bool, experts int) int {
	stages := s.Stages * (panels(GroupRows, GroupStep) + panels(s.Width, GroupStep) + 2*8)
	out := 8 * panels(16, 64)
	if p == GroupDW {
		out *= 2
	}
	tile := 32
	if scaled {
		tile += 4 * s.Width
	}
	return stages + out + 4*(tile+2*8) + 4*(experts+1)
}

// hopperGroup holds the products of experts' rows.
var hopperGroup = hopperGroupPrograms()

func hopperGroupPrograms() (list []Program) {
	for _, s := range HopperGroupShapes {
		for p := GroupForward; p <= GroupDW; p++ {
			list = append(list, s.Program(p, false))
		}
		list = append(list, s.Program(GroupForward, true))
	}
	for p := GroupGLU; p <= GroupGLUDX; p++ {
		list = append(list, HopperGroupShapes[0].Program(p, false), HopperGroupShapes[0].Program(p, true))
	}
	return list
}
