package model

import "github.com/cprun/cprun/internal/model/hf"

// Bucket is elements [Lo, Hi) of the flat buffers: parameters that are needed at the same time of a
// pass, and gathered and reduced in one piece. Bucket 0 is the embedding, 1 to L
// are the matrices of the layers, L+1 is the head, empty where it is tied to the embedding,
// and L+2 is all vectors, which are the only parameters without weight decay.
type Bucket struct{ Lo, Hi int64 }

// Size returns the elements of the bucket.
func (b Bucket) Size() int64 { return b.Hi - b.Lo }

// FlatLayout is where every parameter lies in the flat buffers.
type FlatLayout struct {
	Params  []Param
	Buckets []Bucket
	owner   []int // the bucket of each parameter
	unit    int64 // divides the sizes of buckets
}

// NewLayout returns the layout for that many ranks: every bucket can be cut into as many equal
// parts, each a multiple of Align.
func NewLayout(cfg *hf.Config, ranks int) *FlatLayout {
	l := &FlatLayout{unit: Align * int64(max(ranks, 1))}
	std := cfg.InitializerRange
	if std == 0 {
		std = 0.02
	}
	for _, t := range cfg.Tensors() {
		for bucket := bucketOf(t, cfg.NumHiddenLayers); len(l.Buckets) < bucket; {
			l.close()
		}
		p := Param{Tensor: t}
		if p.Decay = len(t.Shape) == 2; p.Decay {
			p.Std = std
		}
		l.add(p)
	}
	l.close()
	return l
}

// bucketOf returns the bucket of a tensor in a model with that number of layers.
func bucketOf(t hf.Tensor, layers int) int {
	switch {
	case len(t.Shape) == 1:
		return layers + 2
	case t.Role == hf.Head:
		return layers + 1
	}
	return t.Layer + 1 // 0 for the embedding
}

func (l *FlatLayout) add(p Param) {
	p.Offset = l.Size()
	if n := len(l.Params); n > 0 && l.owner[n-1] == len(l.Buckets) {
		last := l.Params[n-1]
		p.Offset = roundUp(last.Offset+int64(last.Size()), Align)
	}
	l.Params = append(l.Params, p)
	l.owner = append(l.owner, len(l.Buckets))
}

// close ends a bucket.
func (l *FlatLayout) close() {
	b := Bucket{Lo: l.Size(), Hi: l.Size()}
	if n := len(l.Params); l.owner[n-1] == len(l.Buckets) {
		last := l.Params[n-1]
		b.Hi = b.Lo + roundUp(last.Offset+int64(last.Size())-b.Lo, l.unit)
	}
	l.Buckets = append(l.Buckets, b)
}

// Size returns the elements of a flat buffer.
func (l *FlatLayout) Size() int64 {
	if len(l.Buckets) == 0 {
		return 0
	}
	return l.Buckets[len(l.Buckets)-1].Hi
}

// Of returns the bucket of the i-th parameter.
func (l *FlatLayout) Of(i int) int { return l.owner[i] }

// Head returns the number of the head's bucket.
func (l *FlatLayout) Head() int { return len(l.Buckets) - 2 }

// Vectors returns the number of the bucket of all vectors.
func (l *FlatLayout) Vectors() int { return len(l.Buckets) - 1 }

// Embedding is the number of the embedding's bucket.
const Embedding = 0

// Layer returns the number of a layer's bucket.
func Layer(i int) int { return i + 1 }

// Hooks tell of the passes' way through the buckets, so that weights can arrive, and gradients
// leave, while a pass goes on. They queue work and wait for nothing; a nil one is not called.
type Hooks struct {
	// Use is called before the first operation of a forward pass that reads a bucket. A backward
	// pass reads the weights of its forward pass.
	Use func(bucket int) error
	// Begin is called before the first operation of a backward pass that adds to the gradients
	// of a bucket, and Done after the last.
	Begin, Done func(bucket int) error
	// Keep is called with the activations that a layer's backward pass will read, and Bring before it reads them. Keep
	// may copy them elsewhere; Bring then sets each view to memory that holds them again.
	Keep, Bring func(layer int, saved []*View) error
}

func call(hook func(int) error, bucket int) error {
	if hook == nil {
		return nil
	}
	return hook(bucket)
}
