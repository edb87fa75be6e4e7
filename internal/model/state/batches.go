package state

import (
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/tensor"
)

// A Format describes a batch: ids and targets and, with dropout, numbers of the tokens, and with packed documents cos
// and sin of each token, in that order.
type Format struct {
	Pairs    int  // of all rotary tables: cos and sin of a token
	Packed   bool // samples are packed documents
	Numbered bool // dropout and the counts of experts need the numbers of the tokens
}

// FormatOf returns the format for a model.
func FormatOf(cfg *hf.Config, packed bool) Format {
	l := cfg.Tuning.LoRA
	numbered := l != nil && l.Dropout > 0 || cfg.HasExperts()
	return Format{Pairs: cfg.AllPairs(), Packed: packed, Numbered: numbered}
}

// lists returns the number of lists of a word for each token.
func (f Format) lists() int {
	if f.Numbered {
		return 3
	}
	return 2
}

const partAlign = 64 // words of four bytes: alignment of each part

// parts returns the words of a list, and of cos or sin.
func (f Format) parts(tokens int) (list, table int) {
	list = (tokens + partAlign - 1) / partAlign * partAlign
	if f.Packed {
		table = list * f.Pairs
	}
	return list, table
}

// Words returns the four-byte words of a batch of that many tokens.
func (f Format) Words(tokens int) int {
	list, table := f.parts(tokens)
	return f.lists()*list + 2*table
}

// Views returns the parts of a batch of count samples of n tokens, starting at mem; cos and sin only with packed
// documents.
func (f Format) Views(mem tensor.Memory, count, n int) model.Batch {
	list, table := f.parts(count * n)
	view := func(t tensor.DType, off, rows, dim int) View {
		return tensor.Dense(mem, t, int64(off), [4]int{rows, n, 1, dim})
	}
	out := model.Batch{IDs: view(tensor.I32, 0, count, 1), Targets: view(tensor.I32, list, count, 1)}
	if f.Numbered {
		out.Tokens = view(tensor.I32, 2*list, count, 1)
	}
	if at := f.lists() * list; f.Packed {
		out.Cos = view(tensor.F32, at, count, f.Pairs)
		out.Sin = view(tensor.F32, at+table, count, f.Pairs)
	}
	return out
}

// Batches is the memory of two batches, so that one is read and copied while the other is computed. Without packed
// documents it has one pair of tables, since all samples have the same positions.
type Batches struct {
	Format
	Blocks   [2]View // int32
	Cos, Sin View    // float32 vectors; zero with packed documents

	from Allocator
}

// NewBatches allocates the memory of batches of that many tokens.
func NewBatches(a Allocator, f Format, tokens int) (*Batches, error) {
	b := &Batches{Format: f, from: a}
	for i := range b.Blocks {
		if err := b.Grow(i, tokens); err != nil {
			return nil, err
		}
	}
	if f.Packed {
		return b, nil
	}
	return b, b.GrowTables(tokens)
}

// grown returns the size for a vector that is too short: n if it is new, else n and a half. GPU memory is never freed,
// so batches that grow slowly must not take a vector each time.
func grown(v View, n int) int {
	if v.IsZero() {
		return n
	}
	return n + n/2
}

// Grow allocates a block for that many tokens. The content of the block is lost.
func (b *Batches) Grow(block, tokens int) error {
	v := &b.Blocks[block]
	n := max(1, b.Words(tokens))
	if !v.IsZero() && v.Size() >= n {
		return nil
	}
	var err error
	*v, err = b.from.Vector(Inputs, tensor.I32, grown(*v, n))
	return err
}

// GrowTables allocates the tables for that many tokens. Their content is lost.
func (b *Batches) GrowTables(tokens int) error {
	n := tokens * b.Pairs
	for _, v := range []*View{&b.Cos, &b.Sin} {
		if !v.IsZero() && v.Size() >= n {
			continue
		}
		var err error
		if *v, err = b.from.Vector(Inputs, tensor.F32, grown(*v, n)); err != nil {
			return err
		}
	}
	return nil
}
