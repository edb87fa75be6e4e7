package bench

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

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

// slowest returns the maximum over the ranks of each number.
func (r *Rank) slowest(ctx context.Context, xs ...float64) ([]float64, error) {
	v := tensor.FromSlice(xs, len(xs))
	if err := comm.Finish(ctx)(r.Control.AllReduce(v, comm.Max)); err != nil {
		return nil, fmt.Errorf("maximum over all ranks: %w", err)
	}
	return tensor.Data[float64](v), nil
}

// An effort tells measure how often to repeat work. The zero value repeats it for two seconds.
type effort struct {
	warmup    int     // iterations before the measured ones; at least 1
	heat      float64 // seconds of further warm-up
	iters     int     // measured iterations; 0: for the budget
	budget    float64 // seconds; 0: two
	most      int     // iterations within the budget; 0: maxIters
	tolerance float64 // ends the budget when iterations differ by less than this share; 0: unset
}

// Bounds of measurements without a given number of iterations.
const (
	budget   = 2.0 // seconds, unless the effort has another
	minIters = 3
	maxIters = 30
)

// measure returns the median time of work, in seconds, on the slowest rank, and the number of iterations, which is the
// same on every rank. With a tolerance it runs the fewest iterations that agree on every rank. Then the warm-up of work
// longer than the budget counts as an iteration: a cold start hardly matters there.
func (r *Rank) measure(ctx context.Context, e effort, work func() error) (seconds float64, n int, err error) {
	own, one, err := r.warm(ctx, max(e.warmup, 1), work)
	if err == nil && e.heat > 0 {
		own, one, err = r.warm(ctx, int(e.heat/one)+1, work)
	}
	if err != nil {
		return 0, 0, err
	}
	limit, batch := e.iters, e.iters
	if limit == 0 {
		room, most := cmp.Or(e.budget, budget), cmp.Or(e.most, maxIters)
		limit = min(max(int(math.Ceil(room/one)), minIters), most)
		switch batch = limit; {
		case e.tolerance == 0 || limit == most: // the work is short
		case one >= room:
			batch = 1
		default:
			batch = minIters
		}
	}
	if err := r.Control.Barrier(ctx); err != nil {
		return 0, 0, err
	}
	var all []float64
	for n < limit {
		took, err := r.times(ctx, min(batch, limit-n), work)
		if err != nil {
			return 0, 0, err
		}
		all, n = append(all, took...), n+len(took)
		if e.iters == 0 && n == 1 {
			all = append(all, own)
		}
		most, err := r.slowest(ctx, Median(all), spread(all))
		if err != nil {
			return 0, 0, err
		}
		seconds = most[0]
		if len(all) > 1 && most[1] <= e.tolerance {
			break
		}
	}
	return seconds, n, nil
}

// warm runs work n times, and returns the time of the last run on this rank and on the slowest one.
func (r *Rank) warm(ctx context.Context, n int, work func() error) (own, most float64, err error) {
	took, err := r.times(ctx, n, work)
	if err != nil {
		return 0, 0, err
	}
	all, err := r.slowest(ctx, took[n-1])
	if err != nil {
		return 0, 0, err
	}
	return took[n-1], max(all[0], 1e-9), nil
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

// Median returns the middle of xs, or the mean of the two in the middle; 0 of none.
func Median(xs []float64) float64 {
	if len(xs) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(xs))
	n := len(s)
	return (s[(n-1)/2] + s[n/2]) / 2
}

// spread returns the interquartile range of xs divided by the median; for fewer than 4 values, the whole range.
func spread(xs []float64) float64 {
	s := slices.Sorted(slices.Values(xs))
	if quarter := len(s) / 4; quarter > 0 {
		s = s[quarter : len(s)-quarter]
	}
	if m := Median(xs); m > 0 {
		return (s[len(s)-1] - s[0]) / m
	}
	return 0
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
		case tensor.U8: // E4M3, scaled as by Quantize
			fill(tensor.Data[uint8](block), func() uint8 { return half.ToE4M3(100 * float32(rng.NormFloat64())) })
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
