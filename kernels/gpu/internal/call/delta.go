package call

import (
	"fmt"
	"math"
	"slices"

	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/kernels/gpu/internal/source"
	"github.com/cprun/cprun/tensor"
)

// DeltaLaunch is the launch of a kernel of the gated delta rule.
type DeltaLaunch struct {
	Kernel string
	Grid   [3]int
	Shared int // bytes of a block
	Params source.DeltaParams
}

// Delta is a call of the kernels of the gated delta rule.
type Delta struct {
	delta.Args        // a result of Check
	Op         string // as for Check
	Hopper     bool   // the GPU has wgmma
	Shared     int    // bytes of shared memory that a block may have
	SMs        int    // of the GPU
	Most       int64  // bytes of workspace, unless a chunk of all heads needs more
	// Alloc returns the address of so many bytes of workspace.
	Alloc func(int64) (at uint64, err error)

	shape    source.DeltaShape
	name     string // of the type of q
	p        source.DeltaParams
	waves    []deltaWave
	states   uint64 // the address of a float32 state before each wave, and of a gradient
	launches []DeltaLaunch
}

// A deltaWave is the chunks that share the workspace: of some segments, or a part of one.
type deltaWave struct {
	number, first int // of the wave, and of its first segment
	segments      []source.DeltaSegment
	chunks        int
	begins, ends  bool // the wave has the first rows of its segments, and the last
}

// Program returns the program of the call. It returns an error if the kernels do not support the call.
func (c *Delta) Program() (string, error) {
	t, dim := c.Q.DType(), c.Q.Len(tensor.Dim)
	c.name = flashTypes[t]
	c.shape = source.DeltaShape{Float32: t == tensor.F32, Hopper: c.Hopper && t != tensor.F32, Dim: dim}
	_, need := c.shape.Chain(c.Shared, source.DeltaColumns)
	if c.Op == "delta backward" {
		_, grads := c.shape.Grads(c.Shared)
		need = max(need, grads)
	}
	switch {
	case c.name == "":
		return "", fmt.Errorf("%s in %v: a GPU computes in float32 and 16-bit floats; use the CPU", c.Op, t)
	case dim > source.DeltaMaxDim:
		return "", fmt.Errorf("%s with dim %d: a GPU supports up to %d; use the CPU", c.Op, dim, source.DeltaMaxDim)
	case max(c.Q.Len(tensor.Batch)*min(len(c.Segments), source.DeltaSegments), c.V.Len(tensor.Heads)) > math.MaxUint16:
		return "", fmt.Errorf("%s: batch %d and %d heads are too many for a grid of a GPU", c.Op, c.Q.Len(tensor.Batch),
			c.V.Len(tensor.Heads))
	case need > c.Shared:
		return "", fmt.Errorf("%s in %v with dim %d needs %d bytes of shared memory for a block, of which this GPU has %d; "+
			"use the CPU", c.Op, t, dim, need, c.Shared)
	}
	return c.shape.Program().Name, nil
}

// Launches returns the launches of the call. Program must have returned no error.
func (c *Delta) Launches() ([]DeltaLaunch, error) {
	c.setParams()
	if err := c.place(); err != nil {
		return nil, err
	}
	c.launches = nil
	for lo, hi := 0, 0; lo < len(c.waves); lo = hi { // the waves of a segment that needs several, or one
		for hi = lo + 1; !c.waves[hi-1].ends; hi++ {
		}
		c.run(c.waves[lo:hi])
	}
	return c.launches, nil
}

func (c *Delta) setParams() {
	p, views := &c.p, c.Views()
	for i, to := range []*source.Strided{&p.Q, &p.K, &p.V, &p.G, &p.Beta, &p.Dout} {
		*to = Strided(*views[i])
	}
	for i, to := range []*source.Strided{&p.O, &p.DQ, &p.DK, &p.DV, &p.DG, &p.Dbeta} {
		*to = Strided(*views[10+i])
	}
	p.Batch, p.Heads, p.KeyHeads = Length(c.Q, tensor.Batch), Length(c.V, tensor.Heads), Length(c.Q, tensor.Heads)
	p.Dim, p.DimV, p.Scale = Length(c.Q, tensor.Dim), Length(c.V, tensor.Dim), float32(c.Scale)
	p.WideV = (p.DimV + 2*source.DeltaColumns - 1) &^ (2*source.DeltaColumns - 1)
	for i, x := range []View{c.Q, c.K, c.V, c.DO} {
		if InPieces(16/c.Q.DType().Size(), x) {
			p.Flags |= source.DeltaAligned << i
		}
	}
	for i, x := range []View{c.O, c.DQ, c.DK, c.DV} {
		if !x.IsZero() && x.DType() == c.Q.DType() && InPieces(16/c.Q.DType().Size(), x) {
			p.Flags |= source.DeltaPieces << i
		}
	}
	for i, x := range []View{c.DO, c.O, c.DQ, c.DK, c.DV} {
		if x.DType() != c.Q.DType() {
			p.Flags |= source.DeltaWide << i
		}
	}
}

// place divides the chunks into waves and sets the addresses of the workspace.
func (c *Delta) place() error {
	p := &c.p
	size := int64(c.Q.DType().Size())
	products := int64(p.Batch) * int64(p.Heads) // of a chunk
	pairs, wide := size*delta.Chunk*delta.Chunk, size*int64(p.WideV)
	sizes := []int64{source.DeltaFactors, pairs, pairs, 0, 0, 0, 0}
	if c.Op == "delta backward" {
		states := wide * int64(c.shape.Rows())
		sizes = append(sizes[:3], wide*delta.Chunk, wide*delta.Chunk, states, states)
	}
	total := int64(0)
	for i := range sizes {
		sizes[i] *= products
		total += sizes[i]
	}
	chunks := int(max(1, c.Most/max(1, total)))
	c.cut(chunks)
	most, bytes := int64(0), int64(0)
	for _, w := range c.waves {
		most = max(most, int64(w.chunks))
		if !w.ends {
			bytes = int64(len(c.waves)+1) * c.stateBytes()
		}
	}
	at, err := c.Alloc(bytes + total*most)
	c.states = at
	at += uint64(bytes)
	for i, to := range []*uint64{&p.Factors, &p.T, &p.P, &p.E, &p.X, &p.S, &p.DS} {
		*to = at
		at += uint64(sizes[i] * most)
	}
	return err
}

// cut sets the waves, of so many chunks at most.
func (c *Delta) cut(most int) {
	c.waves = nil
	add := func(first int, s source.DeltaSegment, begins, ends bool) {
		n, last := (int(s.Hi-s.Lo)+delta.Chunk-1)/delta.Chunk, len(c.waves)-1
		if last >= 0 && begins && ends {
			if w := &c.waves[last]; w.begins && w.ends && w.chunks+n <= most && len(w.segments) < source.DeltaSegments {
				s.Chunk = int32(w.chunks)
				w.segments = append(w.segments, s)
				w.chunks += n
				return
			}
		}
		c.waves = append(c.waves, deltaWave{last + 1, first, []source.DeltaSegment{s}, n, begins, ends})
	}
	for i, s := range c.Segments {
		for lo := s.Lo; lo < s.Hi; lo += most * delta.Chunk {
			hi := min(s.Hi, lo+most*delta.Chunk)
			add(i, source.DeltaSegment{Lo: int32(lo), Hi: int32(hi)}, lo == s.Lo, hi == s.Hi)
		}
	}
}

// run adds the launches of a segment's waves, or of one wave of whole segments.
func (c *Delta) run(waves []deltaWave) {
	switch c.Op {
	case "delta forward":
		for _, w := range waves {
			c.prepare(w)
			to := source.Strided{}
			if !w.ends {
				to = c.kept(0)
			}
			c.chain("forward", w, c.before(w, 0), to, 0)
		}
	case "delta summarize":
		for _, w := range waves {
			c.prepare(w)
			c.maps("forward", w, c.Maps, w.begins)
		}
	case "delta summarize backward":
		for _, w := range slices.Backward(waves) {
			c.prepare(w)
			c.maps("reverse", w, c.DMaps, w.ends)
		}
	case "delta backward":
		last := len(waves) - 1
		for _, w := range waves[:last] {
			c.prepare(w)
			c.chain("forward", w, c.before(w, w.number), c.kept(w.number+1), 0)
		}
		grads := c.kept(len(c.waves))
		for _, w := range slices.Backward(waves) {
			c.prepare(w)
			c.chain("forward", w, c.before(w, w.number), source.Strided{}, source.DeltaKeep)
			from, to := deltaFrom{grads, []int{w.first}}, grads
			if w.ends {
				from = deltaFrom{c.state(c.DState, 0), c.Followed}
			}
			if w.begins {
				to = source.Strided{}
			}
			c.chain("reverse", w, from, to, source.DeltaKeep)
			buffers, shared := c.shape.Grads(c.Shared)
			c.add("grads_"+c.name, w, [3]int{w.chunks, int(c.p.KeyHeads), int(c.p.Batch)}, buffers, shared, c.p)
		}
	}
}

// A deltaFrom is the states that the listed segments begin with. Others begin with 0, or as maps with I | 0.
type deltaFrom struct {
	source.Strided
	segments []int
}

// state returns the states or maps of a view since the i-th, as the kernels take them: rows along Seq.
func (c *Delta) state(v View, i int) source.Strided {
	batch := v.Stride(tensor.Batch)
	return source.Strided{At: v.Addr() + uint64(int64(i)*int64(c.p.Batch)*batch*4), Batch: batch,
		Head: v.Stride(tensor.Seq), Seq: v.Stride(tensor.Heads)}
}

// stateBytes returns the bytes of a state of every sample and head, in aligned pieces.
func (c *Delta) stateBytes() int64 {
	return (4*int64(c.p.Batch)*int64(c.p.Heads)*int64(c.p.Dim)*int64(c.p.DimV) + 255) &^ 255
}

// kept returns the i-th states in the workspace.
func (c *Delta) kept(i int) source.Strided {
	rows, dim := int64(c.p.DimV), int64(c.p.Dim)
	return source.Strided{At: c.states + uint64(int64(i)*c.stateBytes()), Batch: int64(c.p.Heads) * dim * rows,
		Head: dim * rows, Seq: rows}
}

// before returns the states before a wave: the arguments, or the i-th in the workspace.
func (c *Delta) before(w deltaWave, i int) deltaFrom {
	if w.begins {
		return deltaFrom{c.state(c.State, 0), c.Entered}
	}
	return deltaFrom{c.kept(i), []int{w.first}}
}

func (c *Delta) prepare(w deltaWave) {
	c.add("prepare_"+c.name, w, [3]int{w.chunks, int(c.p.KeyHeads), int(c.p.Batch)}, 1, c.shape.PrepareShared(), c.p)
}

// maps adds a chain of maps, which begins with I | 0 if fresh, or else with the maps of the wave before.
func (c *Delta) maps(kernel string, w deltaWave, maps View, fresh bool) {
	to := c.state(maps, w.first)
	from := deltaFrom{to, []int{w.first}}
	if fresh {
		from = deltaFrom{}
	}
	c.chain(kernel, w, from, to, source.DeltaMapped)
}

func (c *Delta) chain(kernel string, w deltaWave, from deltaFrom, to source.Strided, flags int32) {
	for i := range w.segments {
		at, found := slices.BinarySearch(from.segments, w.first+i)
		if !found {
			at = -1
		}
		w.segments[i].From = int32(at)
	}
	p := c.p
	p.From, p.To = from.Strided, to
	p.Flags |= flags
	blocks := func(columns int) int {
		n := int(p.WideV) / columns
		if flags&source.DeltaMapped != 0 {
			n += (int(p.Dim) + columns - 1) / columns
		}
		return n
	}
	chains := int(p.Heads) * len(w.segments) * int(p.Batch)
	columns := c.shape.Columns(blocks(source.DeltaColumns)*chains, c.SMs, c.Shared)
	grid := [3]int{blocks(columns), int(p.Heads), len(w.segments) * int(p.Batch)}
	buffers, shared := c.shape.Chain(c.Shared, columns)
	c.add(fmt.Sprintf("%s_%d_%d_%s", kernel, c.shape.Rows(), columns, c.name), w, grid, buffers, shared, p)
}

func (c *Delta) add(kernel string, w deltaWave, grid [3]int, buffers, shared int, p source.DeltaParams) {
	p.Stages = int32(buffers)
	p.Count = int32(copy(p.Segments[:], w.segments))
	c.launches = append(c.launches, DeltaLaunch{"delta_" + kernel, grid, shared, p})
}

// DeltaCompose returns the arguments of delta_compose, and its grid and shared memory in bytes. The caller has checked
// the views.
func DeltaCompose(dst, later, earlier View) (p source.DeltaMaps, grid [3]int, shared int) {
	const panel = 16
	of := func(v View) source.Strided {
		return source.Strided{At: v.Addr(), Batch: v.Stride(tensor.Batch), Head: v.Stride(tensor.Seq),
			Seq: v.Stride(tensor.Heads)}
	}
	dim, columns := later.Len(tensor.Heads), earlier.Len(tensor.Dim)
	p = source.DeltaMaps{To: of(dst), Later: of(later), Earlier: of(earlier), Dim: int32(dim), Columns: int32(columns),
		Begin: int32(columns - (later.Len(tensor.Dim) - dim))}
	most := dim
	if dst.Addr() == earlier.Addr() {
		most = columns
	}
	return p, [3]int{(most + panel - 1) / panel, later.Len(tensor.Seq), later.Len(tensor.Batch)}, 4 * panel * dim
}
