package train

import (
	"context"
	"runtime"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/internal/base/half"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/state"
	"github.com/cprun/cprun/tensor"
)

// A stage is a double-buffered host staging area for uploads and downloads of state.
type stage struct {
	dev   *Device
	piece [2]View         // float32
	busy  [2]tensor.Event // end of the piece's use; nil: never used
	// direct: the state is in host memory itself, and no queued work uses it.
	direct bool
}

// stagePiece counts the elements of a piece, enough for copies at the link's speed.
const stagePiece = 8 << 20

// hostPiece replaces it on a CPU.
const hostPiece = 256 << 10

func newStage(dev *Device, most int, direct bool) (*stage, error) {
	s, piece := &stage{dev: dev, direct: direct}, stagePiece
	if dev.Machine.IsCPU() {
		piece = hostPiece
	}
	for i := range s.piece {
		var err error
		if s.piece[i], err = dev.HostVector("staging memory", tensor.F32, max(1, min(most, piece))); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// indirect calls f for state on the device in any case.
func (s *stage) indirect(f func() error) error {
	direct := s.direct
	s.direct = false
	defer func() { s.direct = direct }()
	return f()
}

// write fills dst, a vector on the device, piece by piece. Several goroutines call fill, which sets data to the
// elements from index lo; write rounds them to the type of dst.
func (s *stage) write(ctx context.Context, dst View, fill func(lo int, data []float32) error) error {
	if s.direct {
		return inChunks(dst, fill)
	}
	return s.each(ctx, dst, func(i, lo int, host, part View) error {
		if err := s.free(ctx, i); err != nil {
			return err
		}
		host = tensor.Dense(host.Memory(), part.DType(), 0, host.Shape())
		err := inChunks(host, func(at int, data []float32) error { return fill(lo+at, data) })
		if err != nil {
			return err
		}
		s.dev.Store.Upload(part, host)
		s.busy[i] = s.dev.Stream.Record()
		return nil
	})
}

// A goroutine fills stageChunk elements at once. Most parameters begin at a multiple of it, so that no block of random
// values is drawn twice.
const stageChunk = 2 * model.InitBlock

var chunks = sync.Pool{New: func() any { return new([stageChunk]float32) }}

// inChunks sets v, a vector on the host, on all cores. It rounds a chunk to a 16-bit type while a core's cache has it.
func inChunks(v View, fill func(lo int, data []float32) error) error {
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for lo := 0; lo < v.Size(); lo += stageChunk {
		part := state.Part(v, lo, min(lo+stageChunk, v.Size()))
		g.Go(func() error {
			if part.DType() == tensor.F32 {
				return fill(lo, tensor.Data[float32](part))
			}
			chunk := chunks.Get().(*[stageChunk]float32)
			defer chunks.Put(chunk)
			data, dst := chunk[:part.Size()], tensor.Data[uint16](part)
			err := fill(lo, data)
			if part.DType() == tensor.F16 {
				for i, x := range data {
					dst[i] = half.ToF16(x)
				}
				return err
			}
			for i, x := range data {
				dst[i] = half.ToBF16(x)
			}
			return err
		})
	}
	return g.Wait()
}

func (s *stage) read(ctx context.Context, dst []float32, src View) error {
	if s.direct {
		copy(dst, tensor.Data[float32](src))
		return ctx.Err()
	}
	var flush [2]func()
	take := func(i int) error {
		if flush[i] == nil {
			return nil
		}
		err := s.free(ctx, i)
		if err == nil {
			flush[i]()
		}
		flush[i] = nil
		return err
	}
	last := 0
	err := s.each(ctx, src, func(i, lo int, host, part View) error {
		if err := take(i); err != nil {
			return err
		}
		if err := s.free(ctx, i); err != nil {
			return err
		}
		s.dev.Store.Download(host, part)
		s.busy[i] = s.dev.Stream.Record()
		flush[i] = func() { copy(dst[lo:], tensor.Data[float32](host)) }
		last = i
		return nil
	})
	for _, i := range []int{1 - last, last} {
		if err == nil {
			err = take(i)
		}
	}
	return err
}

// each calls f for each part of v, with a host view of the same length in piece i.
func (s *stage) each(ctx context.Context, v View, f func(i, lo int, host, part View) error) error {
	n := s.piece[0].Size()
	for lo, i := 0, 0; lo < v.Size(); lo, i = lo+n, 1-i {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		hi := min(lo+n, v.Size())
		if err := f(i, lo, state.Part(s.piece[i], 0, hi-lo), state.Part(v, lo, hi)); err != nil {
			return err
		}
	}
	return nil
}

func (s *stage) free(ctx context.Context, i int) error {
	if s.busy[i] == nil {
		return nil
	}
	return s.busy[i].Sync(ctx)
}
