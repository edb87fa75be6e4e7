package backends

// Workspace returns the most bytes of device memory that the chosen backend takes beside its inputs and outputs, over
// all hops and both passes of one layer: none for our kernels, which accumulate in the caller's buffers.
func (c *Choice) Workspace() int64 {
	if c.Backend != Fused {
		return 0
	}
	most := 0.0 // absurd lengths are large numbers, not wrong ones
	for i := range c.Hops {
		most = max(most, c.Hops[i].fusedWorkspace())
	}
	return int64(most)
}

// fusedWorkspace is what cudnn-frontend asks for in the backward pass, as kernels/gpu reserves it: dQ in
// float32, the row sums of dO*O, for grouped heads of documents dK and dV of every query head, and where
// the deterministic algorithm of Hopper is the old one, the matrix dP, in blocks of 128 at most.
func (c *Call) fusedWorkspace() float64 {
	if !c.Training {
		return 0
	}
	rowsQ := float64(c.Batch) * float64(c.Heads) * float64(c.SeqQ)
	rowsK := float64(c.Batch) * float64(c.Heads) * float64(c.SeqKV)
	n := 4*rowsQ*float64(c.HeadDim) + 4*rowsQ
	if c.Deterministic && KeepsMatrix(c.Arch, c.CUDNN) {
		n += dpBytes(c, 128)
	}
	if c.Documents && c.KVHeads != c.Heads {
		n += 4 * rowsK * float64(c.HeadDim+c.HeadDimV)
	}
	return n
}
