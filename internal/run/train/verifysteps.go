package train

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"slices"

	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// Stepped is a step of a verification.
type Stepped struct {
	Blank    bool          `json:"blank"` // its batch has no targets
	Loss     metrics.Float `json:"loss"`
	Sum      metrics.Float `json:"sum"` // of the losses of all targets
	GradNorm metrics.Float `json:"grad_norm"`
	Stale    int           `json:"stale"` // elements of rank 0's weights that differ from its optimizer's
}

// VerifiedSteps is the number of optimizer steps of a verification.
const VerifiedSteps = 2

// VerifiedLR holds their learning rates.
var VerifiedLR = [VerifiedSteps]float64{0.05, 0.1}

// Hyper returns the optimizer of a verification. The gradient is always clipped, so its scale is known, and eps is much
// larger than most of its elements. So a wrong scale of the gradient changes the step. Rounding does not become a step
// of another sign, as it does with a small eps. Typical weights change by 1e-3.
func Hyper(cfg *config.Config) config.Optimizer {
	const norm, above = 1e-3, 100
	o := cfg.Optimizer
	o.GradClip, o.LR = norm, VerifiedLR[VerifiedSteps-1]
	o.Eps = above * norm / math.Sqrt(float64(model.Count(model.Layout(&cfg.Model.Config))))
	return o
}

// Names of the tensors in a VerifiedFile.
const (
	// BatchTensor has the tokens of the batch: a row of int32 for each, with VerifiedRow columns.
	BatchTensor = "batch"
	// TrainedTensor has rows of two int64: the place in the batches of all steps, and the sample trained there.
	TrainedTensor = "trained"
	// WeightsTensor has the SHA-256 of the weights that this rank reads, of each bucket.
	WeightsTensor = "weights"
	// GradientParts and ParameterParts begin the names of Part.
	GradientParts  = "gradient"
	ParameterParts = "parameter"
	// KeyTensors begins the names of rotated keys.
	KeyTensors = "key"
)

// VerifiedRow counts the columns of BatchTensor: place in the batches of all steps, position in the sample, id, target,
// position in the document, number of the document.
const VerifiedRow = 6

// VerifiedFile returns the path of a rank's results after some steps.
func VerifiedFile(dir string, rank, steps int) string {
	return filepath.Join(dir, fmt.Sprintf("rank-%04d-%d.safetensors", rank, steps))
}

// Part names the elements of a parameter's gradient or values from lo.
func Part(kind, parameter string, lo int64) string {
	return fmt.Sprintf("%s/%s//%d", kind, parameter, lo)
}

// verifySteps runs the steps, and writes the files of this rank, the first one with some entries.
func (t *Trainer) verifySteps(ctx context.Context, dir string, first []safetensors.Entry, routes *replay,
	v *Verified) error {
	down, err := newStage(t.dev, int(t.share.Flat.Size()), false)
	if err != nil {
		return err
	}
	masters := func() []safetensors.Entry { return t.parts(ctx, t.stage, ParameterParts, t.share.Masters, 1) }
	write := func(steps int, entries ...[]safetensors.Entry) error {
		path := VerifiedFile(dir, t.mesh.world.Rank(), steps)
		return safetensors.WriteFile(path, nil, slices.Concat(entries...))
	}
	if err := t.flush(ctx); err != nil {
		return err
	}
	if err := write(0, first, masters()); err != nil {
		return err
	}
	t.schedule = func(step int) float64 { return VerifiedLR[min(step, VerifiedSteps-1)] }
	for k := range VerifiedSteps {
		s, batch, scale, err := t.verifyStep(ctx, k, routes)
		if err != nil {
			return err
		}
		grads, after := t.parts(ctx, down, GradientParts, t.share.Grads, scale), []safetensors.Entry(nil)
		if k == VerifiedSteps-1 {
			var weights safetensors.Entry
			if weights, s.Stale, err = t.weightsRead(ctx); err != nil {
				return err
			}
			after = append(masters(), weights)
		}
		v.Steps = append(v.Steps, s)
		if err := write(k+1, batch, grads, after); err != nil {
			return err
		}
	}
	return nil
}

// verifyStep runs a step until its gradients do not overflow in float16. It returns the entries of this rank's part of
// the batch, and the loss scale of the gradients.
func (t *Trainer) verifyStep(ctx context.Context, k int, routes *replay) (s Stepped, batch []safetensors.Entry,
	scale float64, err error) {
	step, consumed, tokens := t.step, t.consumed, t.tokens
	size, all := t.cfg.Train.MicroBatchSize, t.cfg.Train.GlobalBatchSize
	for {
		var rows []int32
		var trained []int64
		if routes != nil {
			routes.records = nil
		}
		i := 0 // samples of this rank so far
		t.train.seen = func(b *microBatch, samples []int64, spans []partition.Span, ids []int32) {
			at := partition.Positions(spans)
			if routes != nil {
				routes.begin(len(ids))
			}
			for j, sample := range samples {
				n := k*all + (i/size*t.mesh.dataSize+t.mesh.dataRank)*size + i%size
				rows, i = appendRows(rows, n, b, at, ids, j*len(at)), i+1
				if routes != nil {
					routes.add(n, j*len(at), at, b.tokens)
				}
				trained = append(trained, int64(n), sample)
			}
		}
		f, err := t.begin(ctx, false, false)
		if err != nil {
			return s, nil, 0, err
		}
		res, err := t.finish(ctx, f)
		if err != nil {
			return s, nil, 0, err
		}
		if !res.Skipped || f.scale <= leastScale {
			s = Stepped{Blank: res.Blank > 0, Loss: metrics.Float(res.Loss), GradNorm: metrics.Float(res.GradNorm),
				Sum: metrics.Float(tensor.Data[float64](f.out)[sumLoss])}
			batch = []safetensors.Entry{raw(BatchTensor, safetensors.I32, VerifiedRow, rows),
				raw(TrainedTensor, safetensors.I64, 2, trained)}
			if routes != nil {
				batch = append(batch, routes.take(t.cfg.Model.NumExpertsPerTok))
				if routes.err != nil {
					return s, nil, 0, routes.err
				}
			}
			return s, batch, cmp.Or(f.scale, 1), t.flush(ctx)
		}
		t.step, t.consumed, t.tokens = step, consumed, tokens
		t.scaler.states = []scaling{{Scale: f.scale / 2}}
	}
}

// appendRows appends the rows of sample n of the batches. Its tokens follow index first of ids.
func appendRows(rows []int32, n int, b *microBatch, at []int, ids []int32, first int) []int32 {
	end, doc, ends := 0, 0, []int(nil)
	for _, length := range b.docs {
		end += length
		ends = append(ends, end)
	}
	for row, position := range at {
		if position >= b.tokens { // after the documents
			continue
		}
		if len(ends) > 0 {
			doc, _ = slices.BinarySearch(ends, position+1)
		}
		j := first + row
		rows = append(rows, int32(n), int32(position), ids[j], b.targets[j], int32(b.positions[j]), int32(doc))
	}
	return rows
}

// raw returns an entry with rows of integers.
func raw[T int32 | int64](name string, dtype safetensors.DType, columns int, data []T) safetensors.Entry {
	return safetensors.Entry{Name: name, DType: dtype, Shape: []int{len(data) / columns, columns},
		Data: func(w io.Writer) error { return binary.Write(w, binary.LittleEndian, data) }}
}

// parts returns the entries of this rank's parts of all parameters in a flat buffer, divided by scale.
func (t *Trainer) parts(ctx context.Context, from *stage, kind string, flat View, scale float64) (
	entries []safetensors.Entry) {
	s := t.share.State
	for i, p := range s.Flat.Params {
		bucket := s.Flat.Of(i)
		share := s.Share(bucket)
		lo, hi := max(share.Lo, p.Offset), min(share.Hi, p.Offset+int64(p.Size()))
		if lo >= hi {
			continue
		}
		own := state.Part(s.Own(flat, bucket), int(lo-share.Lo), int(hi-share.Lo))
		name, shape := Part(kind, p.Name, lo-p.Offset), []int{own.Size()}
		entries = append(entries, safetensors.Entry{Name: name, DType: safetensors.F32, Shape: shape,
			Data: func(w io.Writer) error {
				return pieces(own, func(lo int, part View) error {
					piece := make([]float32, part.Size())
					if err := from.read(ctx, piece, part); err != nil {
						return err
					}
					for i := range piece {
						piece[i] /= float32(scale)
					}
					return safetensors.Floats(name, safetensors.F32, shape, piece).Data(w)
				})
			}})
	}
	return entries
}

// verifyPiece is the number of elements of a vector in memory at once.
const verifyPiece = 4 << 20

func pieces(v View, f func(lo int, part View) error) (err error) {
	for lo := 0; lo < v.Size() && err == nil; lo += verifyPiece {
		err = f(lo, state.Part(v, lo, min(v.Size(), lo+verifyPiece)))
	}
	return err
}

// weightsRead returns the checksums of the weights that the next pass of this rank would read, and counts the elements
// of its own part that differ from the optimizer's.
func (t *Trainer) weightsRead(ctx context.Context) (sums safetensors.Entry, stale int, err error) {
	h, s, all := &rowHashes{}, t.share.State, []byte(nil)
	for _, b := range order(s.Flat) { // not the matrices in E4M3
		if s.Flat.Buckets[b].Size() == 0 {
			continue
		}
		if err := t.share.use(b, model.NoBucket); err != nil {
			return sums, 0, err
		}
		read, sum, lo := t.read(b), sha256.New(), s.Share(b).Lo-s.Flat.Buckets[b].Lo
		err := pieces(read, func(_ int, part View) error {
			got, err := h.read(ctx, t.dev, part)
			if err == nil {
				sum.Write(got[0])
			}
			return err
		})
		if err != nil {
			return sums, 0, err
		}
		all = sum.Sum(all)
		err = pieces(s.Own(s.Masters, b), func(at int, part View) error {
			want := make([]float32, part.Size())
			if err := t.stage.read(ctx, want, part); err != nil {
				return err
			}
			from, rounded := int(lo)+at, &bytes.Buffer{}
			got, err := h.read(ctx, t.dev, state.Part(read, from, from+len(want)))
			if err == nil {
				err = safetensors.Floats("", fileTypes[read.DType()], nil, want).Data(rounded)
			}
			if err == nil {
				stale += differing(got[0], rounded.Bytes())
			}
			return err
		})
		if err != nil {
			return sums, 0, err
		}
	}
	return stored(WeightsTensor, safetensors.U8, len(all), all), stale, t.flush(ctx)
}

// read returns the weights of a bucket that passes read.
func (t *Trainer) read(bucket int) View {
	p, s := t.share.Params(), t.share.State
	switch {
	case bucket == s.Flat.Vectors() && !p.Vectors.IsZero():
		return p.Vectors
	case bucket == s.Flat.Vectors():
		return s.Whole(p.Weights, bucket)
	case p.BucketCompute != nil:
		return p.BucketCompute[bucket]
	}
	return s.Whole(s.Read(bucket), bucket)
}

// fileTypes has the types of weights in files.
var fileTypes = map[tensor.DType]safetensors.DType{tensor.F32: safetensors.F32, tensor.F16: safetensors.F16,
	tensor.BF16: safetensors.BF16}

// stored returns an entry of bytes.
func stored(name string, dtype safetensors.DType, elements int, b []byte) safetensors.Entry {
	return safetensors.Entry{Name: name, DType: dtype, Shape: []int{elements},
		Data: func(w io.Writer) error { _, err := w.Write(b); return err }}
}

// differing counts words of two bytes that differ.
func differing(a, b []byte) (n int) {
	for i := 0; i < len(a); i += 2 {
		if !bytes.Equal(a[i:i+2], b[i:i+2]) {
			n++
		}
	}
	return n
}

// A uniform is samples whose tokens are all equal. Then the hidden states of a layer at the first tokens of documents
// are equal, and their keys differ only by their rotation.
type uniform struct{ samples }

// Load replaces all tokens by the first.
func (u uniform) Load(sample int64, spans []partition.Span, ids, targets []int32, positions []int) error {
	err := u.samples.Load(sample, spans, ids, targets, positions)
	for i := range ids {
		ids[i] = ids[0]
	}
	return err
}

// mostTurned bounds the position of a rotated key: float32 angles are exact enough below it.
const mostTurned = 4096

// rotated returns keys of each layer, of the first head, at position 0 and at another position of uniform tokens, named
// KeyTensors/layer/position.
func (t *Trainer) rotated(ctx context.Context, sample int64) (entries []safetensors.Entry, err error) {
	loader, h, rows := t.train.loader, &rowHashes{}, map[int]int{}
	t.train.loader = uniform{loader}
	defer func() { t.train.loader, t.att.keys = loader, nil }()
	t.att.keys = func(layer int, k View) error {
		k = k.Slice(tensor.Batch, 0, 1).Slice(tensor.Heads, 0, 1)
		for position, row := range rows {
			got, err := h.read(ctx, t.dev, k.Slice(tensor.Seq, row, row+1))
			if err != nil {
				return err
			}
			name := fmt.Sprintf("%s/%d/%d", KeyTensors, layer, position)
			entries = append(entries, stored(name, fileTypes[k.DType()], k.Len(tensor.Dim), bytes.Clone(got[0])))
		}
		return nil
	}
	_, err = t.forward(ctx, t.train, all([]int64{sample}), state.Part(t.sums, sumLoss, sumLoss+1), func(b *microBatch) {
		last := 0
		for row, p := range b.positions {
			if rows[p] = row; p > last && p < mostTurned {
				last = p
			}
		}
		rows = map[int]int{0: rows[0], last: rows[last]}
		lo, hi := min(rows[0], rows[last]), max(rows[0], rows[last]) // both begin a document, with their positions
		b.docs = []int{lo, hi - lo, b.seqLen - hi}
	})
	return entries, err
}
