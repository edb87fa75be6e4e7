package source

// DeltaShape chooses the kernels of the gated delta rule for q and k of Dim columns, in float32 or 16 bits. Hopper is
// only for 16 bits.
type DeltaShape struct {
	Float32, Hopper bool
	Dim             int
}

// DeltaMaxDim bounds dim, DeltaColumns is the columns of a block's part of a state, or twice as many, and DeltaThreads
// the threads of a block.
const (
	DeltaMaxDim  = 256
	DeltaColumns = 32
	DeltaThreads = 256
)

// Program returns the program of the shape.
func (s DeltaShape) Program() Program {
	const why = "the sums of five products fill the registers"
	_, slice := s.sizes()
	p := Program{Name: "delta", File: "delta.cu", Defines: defines(define{"SLICE", slice},
		define{"INLINE_TILES", FlashTiles}, define{"BM", 64}, define{"SPLIT", 1}),
		Entries: []Entry{{"delta_grads_bf16", 128, why}, {"delta_grads_fp16", 128, why}}}
	switch {
	case s.Float32:
		p.Name, p.Defines = "delta_fp32", append(p.Defines, "FLOAT32=1")
		p.Entries = []Entry{{"delta_grads_fp32", 384, why}}
	case s.Hopper:
		p.Name, p.Archs, p.Defines = "delta_hopper", hopperArchs, append(p.Defines, "HOPPER=1")
	}
	return p
}

// sizes returns the size of an element and the columns of v that delta_grads takes at once.
func (s DeltaShape) sizes() (size, slice int) {
	if s.Float32 {
		return 4, 32
	}
	return 2, 64
}

// Rows returns the rows of a state in the kernels of chains.
func (s DeltaShape) Rows() int {
	if s.Dim <= 128 {
		return 128
	}
	return DeltaMaxDim
}

// PrepareShared returns the shared memory of delta_prepare, in bytes: parts of q and k or two squares, P, and factors.
func (s DeltaShape) PrepareShared() int {
	size, _ := s.sizes()
	return max(2*64*128*size, 2*64*68*4) + 64*64*size + 2*DeltaFactors
}

// Columns returns the columns of the blocks of delta_forward and delta_reverse: half as many blocks if a GPU cannot run
// the given number at once.
func (s DeltaShape) Columns(blocks, sms, shared int) int {
	buffers, bytes := s.Chain(shared, 2*DeltaColumns)
	if s.Float32 || s.Rows() > 128 || blocks <= sms || buffers < 2 || bytes > shared {
		return DeltaColumns
	}
	return 2 * DeltaColumns
}

// Chain returns the number of buffers of delta_forward and delta_reverse, given the shared memory of a GPU's blocks in
// bytes, and their shared memory: k, q, T, P, v and factors of each buffer, a part of the state, and three results of
// 64 rows. In 16 bits, there are two states and four results.
func (s DeltaShape) Chain(shared, columns int) (buffers, bytes int) {
	size, _ := s.sizes()
	part := 64 * columns * size
	each, own := 2*64*s.Rows()*size+2*64*64*size+part+2048, s.Rows()*columns*4+3*part
	if !s.Float32 {
		own += part
	}
	buffers = max(1, min(3, (shared-own)/each))
	return buffers, buffers*each + own
}

// Grads returns the same for delta_grads: parts of k and q, sums, and five operands of each buffer. With two buffers,
// two results have memory of their own.
func (s DeltaShape) Grads(shared int) (buffers, bytes int) {
	size, slice := s.sizes()
	each, own, results := (3*64+2*128)*slice*size, 2*64*128*size+7168, 2*64*64*size
	if own+2*each+results <= shared {
		return 2, own + 2*each + results
	}
	return 1, own + each
}

// delta holds the gated delta rule.
var delta = []Program{DeltaShape{}.Program(), DeltaShape{Float32: true}.Program(), DeltaShape{Hopper: true}.Program()}
