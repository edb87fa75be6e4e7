//go:build cuda

package copyengine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/worldtest"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/tensor"
)

func init() { kinds["copy-gpu"] = worldtest.ProcessKind{Open: ringOf(gpuProcess)} }

// A gpuRig holds a GPU under test.
type gpuRig struct {
	dev     *cuda.Device
	compute *cuda.Stream
	pinned  *cuda.Pinned // where views are copied to, to be looked at
	used    int
	checks  []gpuCheck
	wrong   error
}

// A gpuCheck holds a copy of a view that should contain only x.
type gpuCheck struct {
	what     string
	off, end int
	x        byte
}

const gpuPinned = 32 << 20

func newGPURig(rank int) (*gpuRig, error) {
	n, err := cuda.Count()
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, errors.New("no GPU")
	}
	g := &gpuRig{}
	if g.dev, err = cuda.Open(rank % n); err != nil {
		return nil, err
	}
	if g.compute, err = g.dev.NewStream(fmt.Sprintf("compute %d", rank), false); err != nil {
		return nil, err
	}
	g.pinned, err = g.dev.AllocHost(gpuPinned)
	return g, err
}

func (g *gpuRig) close() error {
	_ = g.compute.Close() // it may have been poisoned on purpose
	return errors.Join(g.pinned.Free(), g.dev.Close())
}

func (g *gpuRig) stream() tensor.Stream { return g.compute }

func (g *gpuRig) bytes(n int) (tensor.View, error) {
	m, err := g.dev.Alloc(int64(n))
	if err != nil {
		return tensor.View{}, err
	}
	return tensor.Dense(m, tensor.U8, 0, [4]int{1, 1, 1, n}), nil
}

func (g *gpuRig) set(v tensor.View, x byte) {
	g.compute.Memset(v.Addr(), x, int64(v.Size()))
}

// host returns the pinned memory.
func (g *gpuRig) host() *tensor.Host { return g.pinned.Host() }

func (g *gpuRig) check(what string, v tensor.View, x byte) {
	n := v.Size()
	if g.used+n > gpuPinned {
		g.wrong = errors.Join(g.wrong, g.result(context.Background()))
	}
	at := uint64(uintptr(g.host().Ptr())) + uint64(g.used)
	g.compute.Copy(at, v.Addr(), int64(n))
	g.checks = append(g.checks, gpuCheck{what, g.used, g.used + n, x})
	g.used += n
}

func (g *gpuRig) await(x tensor.Gate) { g.compute.WaitValue(x.Word, x.Count) }

func (g *gpuRig) result(ctx context.Context) error {
	if err := g.compute.Sync(ctx); err != nil {
		return err
	}
	all := unsafe.Slice((*byte)(g.host().Ptr()), gpuPinned)
	for _, c := range g.checks {
		for i, x := range all[c.off:c.end] {
			if x != c.x && g.wrong == nil {
				g.wrong = fmt.Errorf("%s: byte %d of %d is %d, want %d", c.what, i, c.end-c.off, x, c.x)
			}
		}
	}
	g.checks, g.used = g.checks[:0], 0
	return g.wrong
}

// gpuConfig returns the config of a rank's engine.
func gpuConfig(host *comm.Group, g *gpuRig) config {
	return configOf(host, &cudaCopies{dev: g.dev}, g.compute, sharedFile{})
}

// gpuProcess makes a rank with a GPU, in a process of its own.
func gpuProcess(ctx context.Context, host *comm.Group, _ string) (*Rank, error) {
	g, err := newGPURig(host.Rank())
	if err != nil {
		return nil, err
	}
	w, err := newWorld(ctx, gpuConfig(host, g))
	return &Rank{world: w, rig: g}, err
}

// gpuRanks makes n ranks of this process, on as many GPUs as there are.
func gpuRanks(t testing.TB, n int) []*Rank {
	hosts, rigs := comm.NewLocal(n, nil, comm.Options{}), make([]*gpuRig, n)
	for r := range n {
		var err error
		if rigs[r], err = newGPURig(r); err != nil {
			t.Fatal(err)
		}
	}
	worlds, errs := connectAll(func(r int) config { return gpuConfig(hosts[r], rigs[r]) }, n)
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	ranks := make([]*Rank, n)
	for r := range n {
		ranks[r] = &Rank{world: worlds[r], rig: rigs[r]}
	}
	t.Cleanup(func() {
		for _, r := range ranks {
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		}
		for _, g := range rigs {
			if err := g.close(); err != nil {
				t.Error(err)
			}
		}
	})
	return ranks
}

// With fewer GPUs than ranks, several ranks share a GPU and its queues.
func TestCopyEngineGPUCases(t *testing.T) {
	for _, n := range []int{1, 2, 3, 4} {
		t.Run(fmt.Sprintf("ranks=%d", n), func(t *testing.T) {
			ctx := testContext(t)
			eachRank(t, gpuRanks(t, n), func(r *Rank) error {
				if err := r.Ring(ctx, 100, 4<<20); err != nil {
					return fmt.Errorf("ring of large messages: %w", err)
				}
				return r.Cases(ctx, amounts{
					ring: 3000, ringBytes: 5000, pairs: 500, pairBytes: 20_000,
					ahead: 300, handOn: 300, handBytes: 100_000, groupings: 100,
				})
			})
		})
	}
}

// A rank aborts while another rank's compute stream waits for a copy that never comes.
func TestCopyEngineGPUAbort(t *testing.T) {
	ctx := testContext(t)
	ranks := gpuRanks(t, 2)
	eachRank(t, ranks, func(r *Rank) error {
		v, err := r.rig.bytes(1 << 20)
		if err != nil {
			return err
		}
		if r.Rank() == 0 {
			p, err := r.Exchange(nil, with(1, v))
			if err != nil {
				return err
			}
			// As if rank 1 had queued its copy and had died before its device came to it.
			g := r.rig.(*gpuRig)
			r.e.mu.Lock()
			r.e.end.wait(r.e.board.flag(0, 1, flagArrived), 1)
			r.e.dev.hold(g.compute, r.e.end)
			r.e.mu.Unlock()
			err = p.Sync(ctx)
			if !errors.Is(err, comm.ErrAborted) || !comm.IsRemote(err) {
				return fmt.Errorf("the receive ended with %w", err)
			}
			for !g.compute.Idle() {
				if ctx.Err() != nil {
					return errors.New("the compute stream waits for ever")
				}
				time.Sleep(time.Millisecond)
			}
			return nil
		}
		time.Sleep(20 * time.Millisecond)
		r.Abort(errBoom)
		return nil
	})
}

// BenchmarkCopyEngineRing measures the rate of a ring of neighbours in each direction, and the latency of small
// messages.
func BenchmarkCopyEngineRing(b *testing.B) {
	n, err := cuda.Count()
	if err != nil || n < 2 {
		b.Skip("needs two GPUs")
	}
	ranks := gpuRanks(b, n)
	for _, size := range []int{8, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30} {
		b.Run(fmt.Sprintf("gpus=%d/bytes=%d", n, size), func(b *testing.B) {
			b.SetBytes(int64(size))
			var wg sync.WaitGroup
			for _, r := range ranks {
				wg.Go(func() {
					g := r.rig.(*gpuRig)
					all, err := r.memory(2 << 30)
					if err != nil {
						b.Error(err)
						return
					}
					out, in := all.Slice(3, 0, size), all.Slice(3, 1<<30, 1<<30+size)
					send, recv := with((r.Rank()+1)%n, out), with((r.Rank()+n-1)%n, in)
					for range b.N {
						p, err := r.Exchange(send, recv)
						if err != nil {
							b.Error(err)
							return
						}
						p.Wait()
					}
					if err := g.compute.Sync(context.Background()); err != nil {
						b.Error(err)
					}
				})
			}
			wg.Wait()
		})
	}
}
