package state

import "github.com/cprun/cprun/internal/model"

// Stages is the number of memories in which gradients wait for their reduction.
const Stages = 4

// StageOf returns the memory that a bucket's gradients are staged in. Layers take turns with two,
// so that one is reduced while the next is computed. The embedding and the head share a third,
// since the one comes last and the other first. The vectors are in use all along.
func StageOf(flat *model.FlatLayout, bucket int) int {
	switch bucket {
	case model.Embedding, flat.Head():
		return 2
	case flat.Vectors():
		return 3
	}
	return bucket % 2
}

// stages allocates the memories, and returns the window of each bucket.
func stages(flat *model.FlatLayout, vector func(n int) View) []View {
	var sizes [Stages]int64
	for b, bucket := range flat.Buckets {
		i := StageOf(flat, b)
		sizes[i] = max(sizes[i], bucket.Size())
	}
	var memories [Stages]View
	for i, n := range sizes {
		memories[i] = vector(int(n))
	}
	var out []View
	for b, bucket := range flat.Buckets {
		out = append(out, Part(memories[StageOf(flat, b)], 0, int(bucket.Size())))
	}
	return out
}
