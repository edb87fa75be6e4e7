package hf

import (
	"cmp"
	"fmt"
	"iter"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/safetensors"
)

// A Block says where files have rows of a tensor.
type Block struct {
	Name   string // of the tensor in files; a %d is the number of the expert, if each has its own
	Shape  []int  // of that tensor
	Rows   int    // of this block; with experts, of each
	Before int    // elements before the block in that tensor, or in its part for the expert
	// Step and Across are the elements from a row to the next, and from a column; 0: rows are one after the other.
	Step, Across int
	Next         int // elements from an expert to the next, of which those of others are between; 0: they are together
}

// A piece is a range of a tensor's elements that is in one block.
type piece struct {
	Block
	of, in Tensor // in is that of the files
	start  int64  // the block's first element in it
	off, n int64  // the range in the block
	at     int64  // its first element in the tensor
}

// blocks returns where files have a tensor: one after the other, for each expert in turn.
func (t Tensor) blocks() []Block {
	if t.Blocks != nil {
		return t.Blocks
	}
	return []Block{{Name: t.Name, Shape: t.fileShape(), Rows: t.Shape[0]}}
}

// cols returns the number of elements in a row.
func (t Tensor) cols() int {
	if len(t.Shape) < 2 {
		return 1
	}
	return t.Shape[1]
}

// pieces yields the pieces with the elements from off to off+n, in order.
func (t Tensor) pieces(off, n int64) iter.Seq[piece] {
	return func(yield func(piece) bool) {
		experts := max(t.Experts, 1)
		each := int64(t.Size() / experts)
		for e := off / max(each, 1); e < int64(experts) && e*each < off+n; e++ {
			at := e * each
			for _, b := range t.blocks() {
				lo, hi := max(off, at), min(off+n, at+int64(b.Rows*t.cols()))
				if lo < hi {
					p := piece{Block: b, of: t, in: Tensor{Name: b.Name, Shape: b.Shape, Role: t.Role, Kind: t.Kind, Layer: t.Layer},
						start: int64(b.Before), off: lo - at, n: hi - lo, at: lo}
					if t.Experts > 0 && strings.Contains(b.Name, "%d") {
						p.in.Name = fmt.Sprintf(b.Name, e)
					} else {
						p.start += e * int64(cmp.Or(b.Next, p.in.Size()/experts))
					}
					if !yield(p) {
						return
					}
				}
				at += int64(b.Rows * t.cols())
			}
		}
	}
}

// inFiles lists the blocks of a tensor, each as a piece.
func (t Tensor) inFiles() []piece { return slices.Collect(t.pieces(0, int64(t.Size()))) }

// read fills dst with the elements of a piece.
func (w *Weights) read(p piece, dst []float32) error {
	name := w.find(p.in.Name)
	if w.isFP4(p) {
		return w.readFP4(p, dst)
	}
	if _, err := w.check(p.in); err != nil {
		return err
	}
	f, stored := w.where[name], w.stored(name)
	if p.Step == 0 {
		return f.ReadFloat32(stored, dst, p.start+p.off)
	}
	cols, step := int64(p.of.cols()), int64(p.Step)
	if p.Next > 0 {
		all, err := w.scattered(p.in, f, stored)
		if err != nil {
			return err
		}
		for i := range p.n {
			dst[i] = all[p.start+(p.off+i)/cols*step+(p.off+i)%cols*int64(p.Across)]
		}
		return nil
	}
	all := make([]float32, (p.n/cols+1)*step+1)
	for c := range cols {
		lo, hi := (p.off-c+cols-1)/cols, (p.off+p.n-c+cols-1)/cols // the rows of this column
		if lo == hi {
			continue
		}
		column := all[:(hi-lo-1)*step+1]
		if err := f.ReadFloat32(stored, column, p.start+lo*step+c*int64(p.Across)); err != nil {
			return err
		}
		for r := lo; r < hi; r++ {
			dst[r*cols+c-p.off] = column[(r-lo)*step]
		}
	}
	return nil
}

// A scattered tensor has elements of every expert everywhere.
type scattered struct {
	name string
	data []float32
}

// scattered reads all of a tensor, which pieces after each other share.
func (w *Weights) scattered(t Tensor, f *safetensors.File, stored string) ([]float32, error) {
	w.mixing.Lock()
	defer w.mixing.Unlock()
	if w.mixed.name != stored {
		data := make([]float32, t.Size())
		if err := f.ReadFloat32(stored, data, 0); err != nil {
			return nil, err
		}
		w.mixed = scattered{stored, data}
	}
	return w.mixed.data, nil
}
