package comm

import "github.com/cprun/cprun/tensor"

// What tests need to have small worlds do as large ones.

// NewLocalFew makes local groups whose collectives use few neighbours above pairs ranks.
func NewLocalFew(n, pairs int, compute []tensor.Stream, opts Options) []*Group {
	return newLocal(n, pairs, compute, opts)
}

// Few returns m with connections to neighbours alone at the start, and collectives over few
// neighbours, in groups of more than pairs ranks.
func (m Mesh) Few(pairs int) Mesh {
	m.pairs = pairs
	return m
}
