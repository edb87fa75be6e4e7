package call

import (
	"fmt"
	"slices"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Reference is a block of a pass for the kernels of reference.cu.
type Reference struct {
	Tensors
	Softmax attention.Softmax
	Tiles   []partition.Tile
	Columns []int // as in attention.Block
}

// ReferenceLaunch is the launch of a kernel of reference.cu, with a warp for each row of a head.
type ReferenceLaunch struct {
	Program, Kernel string
	Grid            [3]int
	Block           [2]int
	Params          source.ReferenceParams
	// Lists holds the words of tiles, rows and columns, in this order. The caller copies them to the device; see At.
	Lists []uint32
	rows  int // index of the first row among the words
}

// referenceWarps counts the rows of a block.
const referenceWarps = 4

// At sets the address of the lists.
func (l *ReferenceLaunch) At(address uint64) {
	l.Params.Tiles = address
	l.Params.Rows = address + uint64(4*l.rows)
	l.Params.Columns = l.Params.Rows + uint64(4*l.Params.SeqQ)
	if l.rows == len(l.Lists) { // no positions
		l.Params.Rows, l.Params.Columns = 0, 0
	}
}

// Program returns the program for the call's head dims.
func (r *Reference) Program(what string) (string, error) {
	widest := max(r.Q.Len(tensor.Dim), r.V.Len(tensor.Dim))
	i := slices.IndexFunc(source.ReferenceSlots, func(n int) bool { return widest <= 32*n })
	if i < 0 {
		return "", fmt.Errorf("%s with a head dim of %d: up to %d are compiled", what, widest,
			32*source.ReferenceSlots[len(source.ReferenceSlots)-1])
	}
	return source.Reference(source.ReferenceSlots[i]).Name, nil
}

// Forward returns the launches of a block of a forward pass, one or none.
func (r *Reference) Forward(program string) []ReferenceLaunch {
	return r.launches(program, r.launch("reference_forward", r.Q))
}

// Backward returns the launches of a block of a backward pass, in order.
func (r *Reference) Backward(program string) []ReferenceLaunch {
	list := []ReferenceLaunch{r.launch("reference_queries", r.Q), r.launch("reference_keys", r.K)}
	if s := r.Softmax.Scores; s != nil && !s.DBias.IsZero() {
		bias := r.launch("reference_bias", r.Q)
		bias.Grid[1], bias.Grid[2] = s.DBias.Len(tensor.Heads), s.DBias.Len(tensor.Batch)
		list = append(list, bias)
	}
	return r.launches(program, list...)
}

// launches sets the program of the launches and drops those without rows or tiles.
func (r *Reference) launches(program string, list ...ReferenceLaunch) []ReferenceLaunch {
	if len(r.Tiles) == 0 {
		return nil
	}
	for i := range list {
		list[i].Program = program
	}
	return slices.DeleteFunc(list, func(l ReferenceLaunch) bool { return slices.Contains(l.Grid[:], 0) })
}

// launch returns the launch of a kernel with a warp for each row and head of rows.
func (r *Reference) launch(name string, rows View) ReferenceLaunch {
	l := ReferenceLaunch{
		Kernel: name + "_" + flashTypes[r.Q.DType()], Block: [2]int{32, referenceWarps},
		Grid: [3]int{(rows.Len(tensor.Seq) + referenceWarps - 1) / referenceWarps, rows.Len(tensor.Heads),
			rows.Len(tensor.Batch)},
		Params: source.ReferenceParams{
			Q: Strided(r.Q), K: Strided(r.K), V: Strided(r.V), Dout: Strided(r.DO), O: Strided(r.O),
			LSE:   Strided(r.LSE),
			Delta: Strided(r.Delta), DQ: Strided(r.DQ), DK: Strided(r.DK), DV: Strided(r.DV),
			TileCount: int32(len(r.Tiles)), SeqQ: Length(r.Q, tensor.Seq), SeqK: Length(r.K, tensor.Seq),
			Heads: Length(r.Q, tensor.Heads), KVHeads: Length(r.K, tensor.Heads),
			Dim: Length(r.Q, tensor.Dim), DimV: Length(r.V, tensor.Dim), Batch: Length(r.Q, tensor.Batch),
			Scale: r.Softmax.Scale, Softcap: r.Softmax.Softcap,
		},
		Lists: Words(bareTiles(r.Tiles)),
	}
	l.rows = len(l.Lists)
	r.scores(&l)
	return l
}

// scores sets the arguments for the bias and the kept scores.
func (r *Reference) scores(l *ReferenceLaunch) {
	s := r.Softmax.Scores
	if s == nil {
		return
	}
	p := &l.Params
	p.Bias, p.Dbias, p.Largest, p.Slopes = broadcast(s.Bias), broadcast(s.DBias), Strided(s.Max), s.Slopes.Addr()
	if !s.Bias.IsZero() {
		p.BiasBatch, p.BiasHeads = Length(s.Bias, tensor.Batch), Length(s.Bias, tensor.Heads)
	}
	if !s.Positions() {
		return
	}
	rows := s.Rows
	if len(rows) == 0 { // a bias needs only columns
		rows = make([]int, r.Q.Len(tensor.Seq))
	}
	for _, list := range [][]int{rows, r.Columns[:r.K.Len(tensor.Seq)]} {
		for _, x := range list {
			l.Lists = append(l.Lists, uint32(int32(x)))
		}
	}
}

// broadcast returns a tensor with stride 0 for axes of length 1, which all batches or heads share.
func broadcast(v View) source.Strided {
	s := Strided(v)
	if !v.IsZero() && v.Len(tensor.Batch) == 1 {
		s.Batch = 0
	}
	if !v.IsZero() && v.Len(tensor.Heads) == 1 {
		s.Head = 0
	}
	return s
}

// bareTiles returns the tiles in reference.cu's form: query range, key range, band.
func bareTiles(tiles []partition.Tile) []source.ReferenceTile {
	list := make([]source.ReferenceTile, 0, len(tiles))
	for _, t := range tiles {
		list = append(list, source.ReferenceTile{
			QLo: int32(t.Q.Lo), QHi: int32(t.Q.Hi), KLo: int32(t.K.Lo), KHi: int32(t.K.Hi), Lo: Bound(t.Band.Lo),
			Hi: Bound(t.Band.Hi),
		})
	}
	return list
}
