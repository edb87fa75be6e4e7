// Package commtest tests implementations of comm.Communicator: all pass its conformance suite.
package commtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// TestCommunicator runs every call of the interface, in good order and in bad, with views of the host. newGroup
// makes a world of len(compute) ranks, rank r ordered against compute[r]. The suite closes the communicators, then the
// streams. A deadline of zero in opts means the default.
func TestCommunicator(
	t *testing.T, newGroup func(t *testing.T, compute []tensor.Stream, opts comm.Options) []comm.Communicator,
) {
	TestDevices(t, Setup{
		Device: func(_ *testing.T, rank int) Device {
			return &host{tensor.NewHostStream(fmt.Sprintf("compute %d", rank))}
		},
		Connect: func(t *testing.T, devices []Device, opts comm.Options) []comm.Communicator {
			compute := make([]tensor.Stream, len(devices))
			for i, d := range devices {
				compute[i] = d.Stream()
			}
			return newGroup(t, compute, opts)
		},
	})
}

// TestDevices runs the suite with views of any device.
func TestDevices(t *testing.T, setup Setup) {
	s := suite{setup}
	ranks := []int{1, 2, 3, 4, 5, 8, 9}
	if testing.Short() { // one alone, all that there are pairwise, and more than all transports connect pairwise
		ranks = []int{1, s.most(3), 8}
	}
	for _, n := range ranks {
		t.Run(fmt.Sprintf("ranks=%d", n), func(t *testing.T) { s.testCalls(t, n) })
	}
	t.Run("order", s.testStreamOrder)
	t.Run("order of copies", s.testCopyOrder)
	t.Run("split", s.testSplit)
	t.Run("concurrent groups", s.testConcurrentGroups)
	t.Run("arguments", s.testArguments)
	t.Run("abort", s.testAbort)
	t.Run("abort while idle", s.testAbortIdle)
	t.Run("compute error", s.testComputeError)
	t.Run("deadline", s.testDeadline)
	t.Run("deadline in a ring", s.testDeadlineChain)
	t.Run("deadline of a group", s.testGroupDeadline)
	t.Run("mismatch", s.testMismatch)
	t.Run("close", s.testClose)
	t.Run("cancel", s.testCancel)
}

type suite struct{ Setup }

// A rank is one rank of a world under test.
type rank struct {
	comm.Communicator
	t     *testing.T
	dev   Device
	setup *Setup
	ctx   context.Context
}

// patience ends a test that hangs. It is a watchdog and no bound that is tested.
const patience = 30 * time.Second

// run calls f on n ranks at once, fails the test with their errors, and closes everything.
func (s suite) run(t *testing.T, n int, opts comm.Options, f func(r *rank) error) {
	t.Helper()
	if s.Ranks > 0 && n > s.Ranks {
		t.Skipf("%d ranks, of which there can be %d here", n, s.Ranks)
	}
	devices := make([]Device, n)
	for i := range n {
		devices[i] = s.Device(t, i)
	}
	group := s.Connect(t, devices, opts)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			r := &rank{group[i], t, devices[i], &s.Setup, ctx}
			if r.Rank() != i || r.Size() != n {
				t.Errorf("communicator %d is rank %d of %d, want %d of %d", i, r.Rank(), r.Size(), i, n)
			}
			if err := f(r); err != nil {
				t.Errorf("rank %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	for i := range n {
		wg.Go(func() {
			if err := group[i].Close(); err != nil {
				t.Errorf("close of rank %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	for i := range n {
		devices[i].Close()
	}
}

// most returns n, or the largest possible number of ranks.
func (s suite) most(n int) int {
	if s.Ranks > 0 {
		return min(n, s.Ranks)
	}
	return n
}

// parallel lets a test run beside others, where their ranks need not share devices.
func (s suite) parallel(t *testing.T) {
	if s.Ranks == 0 {
		t.Parallel()
	}
}

// with returns a message to or from a rank.
func with(peer int, v tensor.View) []comm.Message { return []comm.Message{{Peer: peer, View: v}} }

// do ends a call: it orders the compute stream after it and waits for it.
func (r *rank) do(p comm.Pending, err error) error {
	if err != nil {
		return err
	}
	p.Wait()
	return p.Sync(r.ctx)
}

// number returns element i of rank r's data: a small integer, so that sums are exact in every type and order. It
// repeats after cycle elements, which divides no piece.
func number(r, i int) int { return (r*31+i*7)%cycle - 30 }

const cycle = 61

// fill makes a view of the device of n elements with number(rank, first+i).
func (r *rank) fill(d tensor.DType, n, rank, first int) tensor.View {
	v := tensor.New(d, n)
	fillWith(v, func(i int) int { return number(rank, first+i) })
	return r.put(v)
}

// fillWith sets element i of v to f(i), which repeats like number.
func fillWith(v tensor.View, f func(i int) int) {
	switch v.DType() {
	case tensor.F64:
		convert[float64](v, f)
	case tensor.F32:
		convert[float32](v, f)
	case tensor.F16, tensor.BF16:
		convert[uint16](v, f)
	case tensor.I64:
		convert[int64](v, f)
	case tensor.I32:
		convert[int32](v, f)
	case tensor.U8:
		convert[uint8](v, f)
	}
}

func convert[T tensor.Element](v tensor.View, f func(i int) int) {
	data := tensor.Data[T](v)
	n := min(cycle, len(data))
	for i := range n {
		data[i] = T(f(i))
	}
	for n < len(data) {
		n += copy(data[n:], data[:n])
	}
}

// expect compares v, of the device, with want(i) for each element.
func (r *rank) expect(what string, v tensor.View, want func(i int) int) error {
	return r.expectParts(what, v, 1, func(_, i int) int { return want(i) })
}

// expectParts compares v, of the device, with want for each element of each of its equal parts.
func (r *rank) expectParts(what string, v tensor.View, parts int, want func(part, i int) int) error {
	h, err := r.get(v)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return expect(what, h, parts, want)
}

// expect compares v, of the host, with want for each element of each of its equal parts.
func expect(what string, v tensor.View, parts int, want func(part, i int) int) error {
	w, n := tensor.New(v.DType(), v.Size()), v.Size()/parts
	for p := range parts {
		if n > 0 {
			fillWith(w.Slice(tensor.Dim, p*n, (p+1)*n), func(i int) int { return want(p, i) })
		}
	}
	got, all, size := tensor.Bytes(v), tensor.Bytes(w), v.DType().Size()
	if bytes.Equal(got, all) {
		return nil
	}
	for i := range v.Size() {
		if g, x := got[i*size:(i+1)*size], all[i*size:(i+1)*size]; !bytes.Equal(g, x) {
			return fmt.Errorf("%s: element %d of %d (%s) is % x, want % x", what, i, v.Size(), v.DType(), g, x)
		}
	}
	return nil
}

// reduced returns the reduction of the ranks' element i.
func reduced(op comm.Op, ranks, i int) int {
	acc := number(0, i)
	for r := 1; r < ranks; r++ {
		switch x := number(r, i); op {
		case comm.Sum:
			acc += x
		case comm.Max:
			acc = max(acc, x)
		case comm.Min:
			acc = min(acc, x)
		}
	}
	return acc
}

// remote checks that err blames the given rank.
func remote(err error, rank int, cause error) error {
	var pe *comm.PeerError
	switch {
	case err == nil:
		return errors.New("the call ended without an error")
	case !errors.As(err, &pe):
		return fmt.Errorf("got %w, want an error that names rank %d", err, rank)
	case pe.Rank != rank || !errors.Is(err, cause) || !comm.IsRemote(err):
		return fmt.Errorf("got %w, want one about rank %d with the cause %q", err, rank, cause)
	}
	return nil
}

// Setup is a kind of communicator and the devices that its views lie on.
type Setup struct {
	// Ranks is the most that there can be; 0 means any number.
	Ranks int
	// Device makes the device of a rank for one test, which closes it after the communicators.
	Device func(t *testing.T, rank int) Device
	// Connect makes a world of one rank a device. A deadline of zero in opts means the default.
	Connect func(t *testing.T, devices []Device, opts comm.Options) []comm.Communicator

	// SizesUnchecked says that ranks which disagree about the size of a message may wait for
	// each other until the deadline.
	SizesUnchecked bool
	// NaNPassedOver says that Max and Min may leave out a NaN.
	NaNPassedOver bool
}

// Device is where views of a rank lie, and its compute stream. One goroutine uses it at a time.
type Device interface {
	// Stream returns the compute stream.
	Stream() tensor.Stream
	// New returns a dense view of zeros.
	New(d tensor.DType, shape ...int) tensor.View
	// Upload queues a copy of a dense host view, which may be changed as soon as it returns.
	Upload(dst, src tensor.View)
	// Download queues a copy to a dense host view; it is there when the stream has been
	// waited for.
	Download(dst, src tensor.View)
	// Fail queues an error of the compute stream.
	Fail(err error)
	// Close gives the device back. Nothing is queued any more.
	Close() error
}

// A host is the host as a device.
type host struct{ s *tensor.HostStream }

func (h *host) Stream() tensor.Stream                        { return h.s }
func (h *host) New(d tensor.DType, shape ...int) tensor.View { return tensor.New(d, shape...) }
func (h *host) Fail(err error)                               { h.s.Do("fail", func() error { return err }) }
func (h *host) Close() error                                 { return h.s.Close() }

func (h *host) Upload(dst, src tensor.View) {
	own := tensor.New(src.DType(), src.Size())
	copy(tensor.Bytes(own), tensor.Bytes(src))
	h.Download(dst, own)
}

func (h *host) Download(dst, src tensor.View) {
	h.s.Do("copy", func() error {
		copy(tensor.Bytes(dst), tensor.Bytes(src))
		return nil
	})
}

func (r *rank) new(d tensor.DType, shape ...int) tensor.View { return r.dev.New(d, shape...) }

func (r *rank) put(v tensor.View) tensor.View {
	s := v.Shape()
	w := r.new(v.DType(), s[:]...)
	if v.Size() > 0 {
		r.dev.Upload(w, v)
	}
	return w
}

// get waits for the device and returns a copy of v on the host.
func (r *rank) get(v tensor.View) (tensor.View, error) {
	s := v.Shape()
	h := tensor.New(v.DType(), s[:]...)
	if v.Size() > 0 {
		r.dev.Download(h, v)
	}
	return h, r.dev.Stream().Sync(r.ctx)
}
