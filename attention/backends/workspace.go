package backends

// Workspace returns the most bytes of device memory that the chosen backend takes beside its
// inputs and outputs, over all hops and both passes of one layer.
func (c *Choice) Workspace() int64 {
	most := 0.0
	for i := range c.Hops {
		most = max(most, c.Hops[i].workspace(c.Backend))
	}
	return int64(most)
}

// workspace is in floating point so that absurd lengths are large numbers, not wrong ones.
func (c *Call) workspace(b Backend) float64 {
	switch b {
	case Fused:
		return c.fusedWorkspace()
	case Unfused:
		scores := scoreBytes(c)
		if c.Training { // probabilities are kept, and their gradient stands beside them
			scores *= 2
		}
		return scores
	}
	return 0 // our kernels accumulate in the caller's buffers
}

// fusedWorkspace is what cudnn-frontend asks for in the backward pass, as internal/gpu reserves it: dQ in
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
