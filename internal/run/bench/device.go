package bench

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/half"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/tensor"
)

// View is a strided window onto device memory; see package tensor.
type View = tensor.View

// Rank is one process of a benchmark.
type Rank struct {
	Device  device.Device     // with the kernel to measure
	World   comm.Communicator // moves views of the device
	Control comm.Communicator // moves views of the host; may be World
	// Transports are compared by `bench comm`.
	Transports []Transport
	// LinkGBps is the bandwidth of a link between two devices, per direction; 0: unknown.
	LinkGBps float64
	// Budget is the time in seconds of a measurement without a given number of iterations; 0: two.
	Budget float64
	// Seconds replaces Budget by a minimum time; 0: unset.
	Seconds float64
	// Tolerance ends such a measurement when its iterations differ by less than this share; 0: unset.
	Tolerance float64

	staging View // of the host, for random
}

// Transport is a communicator with the Name of its transport.
type Transport struct {
	Name     string
	Comm     comm.Communicator
	NoReduce bool // skip reductions, which use another transport
}

var types = map[string]tensor.DType{"bf16": tensor.BF16, "fp16": tensor.F16, "fp32": tensor.F32, "fp64": tensor.F64}

// DType returns the element type of a value of --dtype. GPUs do not support fp64.
func DType(name string, cpu bool) (tensor.DType, error) {
	t, ok := types[name]
	if !ok || !cpu && t == tensor.F64 {
		return tensor.Invalid, fmt.Errorf("--dtype %q: want bf16, fp16 or fp32, and on a CPU also fp64", name)
	}
	return t, nil
}

func (r *Rank) slowest(ctx context.Context, xs ...float64) ([]float64, error) {
	v := tensor.FromSlice(xs, len(xs))
	if err := comm.Finish(ctx)(r.Control.AllReduce(v, comm.Max)); err != nil {
		return nil, fmt.Errorf("maximum over all ranks: %w", err)
	}
	return tensor.Data[float64](v), nil
}

// Bounds of measurements without a given number of iterations.
const (
	budget   = 2.0 // seconds, unless the rank has another
	minIters = 3
	maxIters = 30
)

// measure returns the median time of work, in seconds, on the slowest rank. It runs iterations back to back: iters, or
// if that is 0, for the budget or r.Seconds, after half as long again.
func (r *Rank) measure(ctx context.Context, warmup, iters int, work func() error) (seconds float64, n int, err error) {
	took, err := r.times(ctx, max(warmup, 1), work)
	if err != nil {
		return 0, 0, err
	}
	if iters == 0 && r.Tolerance > 0 {
		return r.settle(ctx, took[len(took)-1], work)
	}
	if iters == 0 {
		last, err := r.slowest(ctx, took[len(took)-1])
		if err != nil {
			return 0, 0, err
		}
		one := max(last[0], 1e-9)
		iters = min(max(int(cmp.Or(r.Budget, budget)/one), minIters), maxIters)
		if r.Seconds > 0 {
			iters = max(int(math.Ceil(r.Seconds/one)), minIters)
			if _, err := r.times(ctx, iters/2, work); err != nil { // until the clock has settled
				return 0, 0, err
			}
		}
	}
	if err := r.Control.Barrier(ctx); err != nil {
		return 0, 0, err
	}
	if took, err = r.times(ctx, iters, work); err != nil {
		return 0, 0, err
	}
	most, err := r.slowest(ctx, Median(took))
	if err != nil {
		return 0, 0, err
	}
	return most[0], iters, nil
}

// fewIters is the number of iterations between two comparisons in settle.
const fewIters = 3

// settle works like measure, with the fewest iterations that agree to within the tolerance on every rank. first is the
// time of the warm-up. For work longer than the budget, where a cold start hardly matters, it counts as an iteration.
func (r *Rank) settle(ctx context.Context, first float64, work func() error) (seconds float64, n int, err error) {
	most, err := r.slowest(ctx, first)
	if err != nil {
		return 0, 0, err
	}
	room, batch := cmp.Or(r.Budget, budget), fewIters
	limit := min(max(int(room/max(most[0], 1e-9)), minIters), maxIters)
	if limit == maxIters {
		batch = maxIters // the work is short
	} else if most[0] >= room {
		batch = 1
	}
	if err := r.Control.Barrier(ctx); err != nil {
		return 0, 0, err
	}
	var all []float64
	for n < limit {
		m := min(batch, limit-n)
		took, err := r.times(ctx, m, work)
		if err != nil {
			return 0, 0, err
		}
		all, n = append(all, took...), n+m
		if batch == 1 && n == 1 {
			all = append(all, first)
		}
		if most, err = r.slowest(ctx, Median(all), Spread(all)); err != nil {
			return 0, 0, err
		}
		if len(all) > 1 && most[1] <= r.Tolerance {
			break
		}
	}
	return most[0], n, nil
}

func (r *Rank) times(ctx context.Context, n int, work func() error) ([]float64, error) {
	clock, err := r.Device.NewClock(n + 1)
	if err != nil {
		return nil, err
	}
	defer clock.Close()
	clock.Mark(0)
	for i := range n {
		if err := work(); err != nil {
			return nil, err
		}
		clock.Mark(i + 1)
	}
	if err := r.Device.Stream.Sync(ctx); err != nil {
		return nil, err
	}
	took := make([]float64, n)
	for i := range took {
		if took[i], err = clock.Between(i, i+1); err != nil {
			return nil, err
		}
	}
	return took, nil
}

// noise is the length of the block that random repeats. It is no multiple of a row, so that neighbouring rows differ.
const noise = 1<<20 + 7

// random fills dense device views with normally distributed numbers, the first of them from seed, the next from seed+1.
// The power of a GPU, and so its clock, depends on the data: zeros would run too fast.
func (r *Rank) random(ctx context.Context, seed uint64, views ...View) error {
	const words = 8
	if r.staging.IsZero() {
		mem, err := r.Device.Store.AllocHost(words * noise)
		if err != nil {
			return fmt.Errorf("random numbers: %w", err)
		}
		r.staging = tensor.Dense(mem, tensor.F64, 0, [4]int{1, 1, 1, noise})
	}
	for i, v := range views {
		rng := rand.New(rand.NewPCG(seed+uint64(i), uint64(r.World.Rank())))
		n := min(noise, v.Size())
		block := tensor.Dense(r.staging.Memory(), v.DType(), 0, [4]int{1, 1, 1, n})
		switch v.DType() {
		case tensor.F64:
			fill(tensor.Data[float64](block), func() float64 { return rng.NormFloat64() })
		case tensor.F32:
			fill(tensor.Data[float32](block), func() float32 { return float32(rng.NormFloat64()) })
		case tensor.BF16:
			fill(tensor.Data[uint16](block), func() uint16 { return half.ToBF16(float32(rng.NormFloat64())) })
		case tensor.F16:
			fill(tensor.Data[uint16](block), func() uint16 { return half.ToF16(float32(rng.NormFloat64())) })
		default:
			return fmt.Errorf("random numbers in %v", v.DType())
		}
		flat := v.Reshape([4]int{1, 1, 1, v.Size()})
		for at := 0; at < v.Size(); at += n {
			m := min(n, v.Size()-at)
			r.Device.Store.Upload(flat.Slice(tensor.Dim, at, at+m), block.Slice(tensor.Dim, 0, m))
		}
		if err := r.Device.Stream.Sync(ctx); err != nil { // before the staging memory is reused
			return err
		}
	}
	return nil
}

func fill[T any](xs []T, f func() T) {
	for i := range xs {
		xs[i] = f()
	}
}
