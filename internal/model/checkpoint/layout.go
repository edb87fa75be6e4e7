package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/base/terminal"
)

// FieldParam is the field of the weights. Its tensors have the names of the parameters; tensors of other fields are
// named "<parameter>.<field>".
const FieldParam = "param"

// Param is a parameter with its Hugging Face Name. In the flat space it takes the elements from Offset to Offset plus
// the product of Shape, in row-major order.
type Param struct {
	Name   string
	Shape  []int
	Offset int64
}

// Range is the elements [Lo, Hi) of the flat space.
type Range struct{ Lo, Hi int64 }

// Len returns the number of elements.
func (r Range) Len() int64 { return r.Hi - r.Lo }

// overlap returns the common part of r and s. Its length is 0 or less if there is none.
func (r Range) overlap(s Range) Range { return Range{max(r.Lo, s.Lo), min(r.Hi, s.Hi)} }

// Field is one kind of state of a rank, such as the weights. Name is FieldParam or a name such as "exp_avg". Data has
// the elements of the rank's ranges in order.
type Field struct {
	Name string
	Data []float32
}

func (p Param) span() (Range, error) {
	n, err := elements(p.Shape)
	if err == nil && (p.Offset < 0 || p.Offset > math.MaxInt64-n) {
		err = fmt.Errorf("offset %d is outside the flat space", p.Offset)
	}
	if err != nil {
		return Range{}, fmt.Errorf("parameter %q: %w", p.Name, err)
	}
	return Range{p.Offset, p.Offset + n}, nil
}

// elements returns the product of a shape. It detects overflow of the elements and of their bytes, since shapes come
// from files.
func elements(shape []int) (int64, error) {
	n, err := safetensors.ByteSize(safetensors.F32, shape)
	return n / elementSize, err
}

func tensorName(param, field string) string {
	if field == FieldParam {
		return param
	}
	return param + "." + field
}

// checkLayout checks the arguments of Save: separate parameters, ordered ranges, and slices of one length.
func checkLayout(params []Param, own []Range, fields []Field) error {
	at, n := int64(0), int64(0)
	for _, r := range own {
		if r.Lo < at || r.Hi < r.Lo {
			return fmt.Errorf("range [%d, %d) of the flat space ends before it begins, or overlaps the one before",
				r.Lo, r.Hi)
		}
		at = r.Hi
		n += r.Len()
	}
	spans := make([]Range, len(params))
	order := make([]int, len(params))
	for i, p := range params {
		var err error
		if spans[i], err = p.span(); err != nil {
			return err
		}
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(spans[a].Lo, spans[b].Lo) })
	last := -1 // the parameter with the highest end so far
	for _, i := range order {
		if spans[i].Len() == 0 {
			continue
		}
		if last >= 0 && spans[i].Lo < spans[last].Hi {
			return fmt.Errorf("parameters %q and %q overlap in the flat space", params[last].Name, params[i].Name)
		}
		last = i
	}
	for _, f := range fields {
		if int64(len(f.Data)) != n {
			return fmt.Errorf("field %q has %d elements for ranges of %d", f.Name, len(f.Data), n)
		}
	}
	return nil
}

// shardOf returns the entries and the tensors of one rank's shard.
func shardOf(ctx context.Context, s *Snapshot) ([]Entry, []safetensors.Entry, error) {
	var entries []Entry
	var tensors []safetensors.Entry
	var piece []float32
	if s.Read != nil {
		piece = make([]float32, PieceSize)
	}
	for _, p := range s.Params {
		span, err := p.span()
		if err != nil {
			return nil, nil, err
		}
		parts, at := 0, int64(0) // at: start of the range in the data
		for _, r := range s.Ranges {
			part := span.overlap(r)
			if part.Len() > 0 {
				for i, f := range s.Fields {
					name := tensorName(p.Name, f.Name)
					entries = append(entries, Entry{Tensor: name, Offset: part.Lo - span.Lo, Length: part.Len()})
					tensors = append(tensors, s.tensor(ctx, name, i, Range{at + part.Lo - r.Lo, at + part.Hi - r.Lo}, piece))
				}
				parts++
			}
			at += r.Len()
		}
		if parts > 1 { // tensor names in a shard are unique
			return nil, nil, fmt.Errorf("parameter %q is cut into %d ranges of one rank", p.Name, parts)
		}
	}
	return entries, tensors, nil
}

// PieceSize is the largest number of elements that Snapshot.Read reads at once.
const PieceSize = 256 << 10

// tensor returns elements of a field for writing, through piece if the snapshot has no copy of them.
func (s *Snapshot) tensor(ctx context.Context, name string, field int, of Range, piece []float32) safetensors.Entry {
	shape := []int{int(of.Len())}
	if s.Read == nil {
		return safetensors.Floats(name, safetensors.F32, shape, s.Fields[field].Data[of.Lo:of.Hi])
	}
	return safetensors.Entry{Name: name, DType: safetensors.F32, Shape: shape, Data: func(w io.Writer) error {
		for lo := of.Lo; lo < of.Hi; lo += PieceSize {
			data := piece[:min(PieceSize, of.Hi-lo)]
			if err := s.Read(ctx, field, lo, data); err != nil {
				return err
			}
			if err := safetensors.Floats(name, safetensors.F32, nil, data).Data(w); err != nil {
				return err
			}
		}
		return nil
	}}
}

// Fits returns all differences between a checkpoint and a model, without reading a shard.
func (c *Checkpoint) Fits(params []Param) error {
	if err := compare(params, c.Manifest.Params); err != nil {
		return fmt.Errorf("%s: %w", c.Dir, err)
	}
	return nil
}

// compare lists all differences between the parameters of a model and a checkpoint.
func compare(model []Param, saved []ParamInfo) error {
	var faults terminal.Faults
	have := map[string]ParamInfo{}
	for _, s := range saved {
		have[s.Name] = s
	}
	for _, p := range model {
		s, ok := have[p.Name]
		switch {
		case !ok:
			faults.Addf("%s %v is missing in the checkpoint", p.Name, p.Shape)
		case !slices.Equal(s.Shape, p.Shape):
			faults.Addf("%s is %v in the checkpoint and %v in the model", p.Name, s.Shape, p.Shape)
		}
		delete(have, p.Name)
	}
	for _, s := range saved {
		if _, extra := have[s.Name]; extra {
			faults.Addf("%s %v is not in the model", terminal.Name(s.Name), s.Shape)
		}
	}
	err := faults.Err()
	if err == nil {
		return nil
	}
	return errors.New("the checkpoint is of another model; use the config it was saved with, or start anew in " +
		"another --run-dir:\n  " + strings.ReplaceAll(err.Error(), "\n", "\n  "))
}
