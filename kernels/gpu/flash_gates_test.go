//go:build cuda

package gpu

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// arrivals copies keys and values while a kernel runs, from the host with a separate stream, as copy engines do from
// other GPUs. A copy within the device could need the SMs on which the kernel waits.
type arrivals struct {
	*cudaRig
	copies *cuda.Stream
	host   *cuda.Pinned
	count  uint64
	used   int
}

// newArrivals returns arrivals with a buffer of the given size.
func (r *cudaRig) newArrivals(bytes int64) *arrivals {
	r.t.Helper()
	dev := r.loader.Device()
	s, err := dev.NewStream("arrivals", true)
	check(r.t, err)
	m, err := dev.AllocHost(bytes + 64)
	check(r.t, err)
	r.t.Cleanup(func() {
		check(r.t, s.Sync(context.Background()))
		check(r.t, s.Close())
		check(r.t, m.Free())
	})
	clear(unsafe.Slice((*uint64)(m.Host().Ptr()), 8))
	return &arrivals{cudaRig: r, copies: s, host: m}
}

func (a *arrivals) at(offset int) uint64 {
	return uint64(uintptr(a.host.Host().Ptr())) + uint64(offset)
}

// word returns the i-th counter of the gates.
func (a *arrivals) word(i int) *uint64 {
	return &unsafe.Slice((*uint64)(a.host.Host().Ptr()), 8)[i]
}

// saved copies rows to the host and returns a function that copies them back.
func (a *arrivals) saved(v View) (bring func()) {
	bytes, at := int64(v.Size()*v.DType().Size()), a.at(64+a.used)
	a.used += int(bytes)
	a.stream.Copy(at, v.Addr(), bytes)
	check(a.t, a.stream.Sync(context.Background()))
	return func() { a.copies.Copy(v.Addr(), at, bytes) }
}

// late gives two parts of a block's keys a gate each and makes them NaN. The returned function copies them back.
func (a *arrivals) late(b *attention.Block) (come func()) {
	n := b.K.Len(tensor.Seq)
	parts := []partition.Range{{Lo: n / 4, Hi: n / 2}, {Lo: n / 2, Hi: n}}
	a.count++
	a.used = 0
	b.Gates = nil
	var bring []func()
	for i, rows := range parts {
		b.Gates = append(b.Gates, attention.Gate{Rows: rows, Gate: tensor.Gate{Word: a.at(8 * i), Count: a.count}})
		for _, v := range []View{b.K, b.V} {
			v = v.Slice(tensor.Seq, rows.Lo, rows.Hi)
			bring = append(bring, a.saved(v))
			a.stream.Memset(v.Addr(), 0xff, int64(v.Size()*v.DType().Size())) // NaN
		}
	}
	check(a.t, a.stream.Sync(context.Background()))
	return func() {
		time.Sleep(2 * time.Millisecond) // the kernel has probably started
		for i := range parts {
			for _, f := range bring[2*i : 2*i+2] {
				f()
			}
			a.copies.WriteValue(a.at(8*i), a.count)
		}
	}
}

// TestFlashWaitsForKeys checks that calls that begin before their keys have arrived return the same bits, both if the
// kernel waits and if the stream waits.
func TestFlashWaitsForKeys(t *testing.T) {
	r := newCUDARig(t)
	a := r.newArrivals(32 << 20)
	fast, ordered, older := r.newFlash(false), r.newFlash(true), r.newOlderFlash(true)
	list := [][2]int{{64, 64}, {128, 128}, {192, 128}, {256, 256}}
	compileFlash(t, list, fast, ordered, older)
	for _, c := range []struct {
		name          string
		k             *Flash
		deterministic bool
	}{
		{"shapes of this GPU", fast, false}, {"deterministic", ordered, true}, {"before Hopper", older, true},
	} {
		for _, dims := range list {
			for _, window := range []int{-1, 900} {
				t.Run(fmt.Sprintf("%s, %d and %d, window %d", c.name, dims[0], dims[1], window), func(t *testing.T) {
					r := r.within(t)
					f := r.masked(3000, window, dims)
					want := r.attend(c.k, tensor.BF16, f) // also loads the programs, which may wait for running kernels
					got := r.attendLate(c.k, tensor.BF16, f, a.late)
					if !c.deterministic {
						for i, x := range got.dq {
							if d := x - want.dq[i]; !(d < 1e-2 && d > -1e-2) {
								t.Fatalf("element %d of dq is %g, want %g", i, x, want.dq[i])
							}
						}
						got.dq = want.dq // its order of sums is not fixed
					}
					sameBits(t, got, want)
				})
			}
		}
	}
}

// TestOpenGatesEndWaits checks that a waiting kernel ends if its gates are opened without keys, as after a failure of
// the group.
func TestOpenGatesEndWaits(t *testing.T) {
	r := newCUDARig(t)
	a, k := r.newArrivals(32<<20), r.newFlash(false)
	f := r.masked(1000, -1, usualDims)
	r.attend(k, tensor.BF16, f)
	r.attendLate(k, tensor.BF16, f, func(b *attention.Block) func() {
		a.late(b)
		return func() {
			for i := range b.Gates {
				atomic.StoreUint64(a.word(i), 1<<62)
			}
		}
	})
}

// BenchmarkFlashGates measures a rank's part of packed documents, MagiAttention's first pack of 16K tokens over two
// ranks, with 64:8 heads of 128. Either all keys are present, or the call waits for the other rank's keys before or
// inside of the kernel. They come from the host, which takes longer than from another GPU.
func BenchmarkFlashGates(b *testing.B) {
	g, rows := packShare(b, 2)
	x := newFlashBenchOf(b, tensor.BF16, packTokens, 64, 8, 128, 128)
	mine, keys := span(0, rows), span(0, g.Rows)
	q, o := seqRows(x.q, mine), seqRows(x.o, mine)
	acc := attention.Partial{O: seqRows(x.acc.O, mine), LSE: seqRows(x.acc.LSE, mine)}
	block := attention.Block{K: seqRows(x.k, keys), V: seqRows(x.v, keys), Tiles: g.Tiles, First: true, Last: true}
	a := x.newArrivals(64 << 20)
	var bring []func()
	bytes := 0
	for _, run := range g.Runs {
		if at := (partition.Range{Lo: run.At, Hi: run.At + run.Rows.Len()}); run.Owner != 0 {
			block.Gates = append(block.Gates, attention.Gate{Rows: at, Gate: tensor.Gate{Word: a.at(0)}})
			for _, v := range []View{block.K, block.V} {
				v = v.Slice(tensor.Seq, at.Lo, at.Hi)
				bring, bytes = append(bring, a.saved(v)), bytes+v.Size()*v.DType().Size()
			}
		}
	}
	saved, grads := attention.Saved{O: o, LSE: acc.LSE, Delta: seqRows(x.delta, mine)}, x.keyGrads().Rows(0, g.Rows)
	do, dq := seqRows(x.do, mine), seqRows(x.grads.DQ, mine)
	forward := func(block attention.Block) {
		pass, err := x.fast.Forward(o, acc, q, x.p)
		check(b, err)
		check(b, pass.Block(block))
		check(b, pass.End())
	}
	backward := func(block attention.Block) {
		pass, err := x.fast.Backward(dq, do, q, saved, x.p)
		check(b, err)
		check(b, pass.Block(attention.GradBlock{Block: block, KeyGrads: grads, Fresh: keys}))
		check(b, pass.End())
	}
	for _, c := range []struct {
		name            string
		brings, awaited bool
	}{{"there", false, false}, {"waited for before", true, true}, {"waited for within", true, false}} {
		call := func(f func(attention.Block)) func() error {
			return func() error {
				block := block
				if block.Gates = slices.Clone(block.Gates); !c.brings {
					block.Gates = nil
				} else {
					a.count++
					a.copies.Wait(x.stream.Record()) // after the previous call
					for _, f := range bring {
						f()
					}
					a.copies.WriteValue(a.at(0), a.count)
				}
				for i := range block.Gates {
					block.Gates[i].Count = a.count
				}
				if c.awaited {
					x.stream.Wait(a.copies.Record())
					block.Gates = nil
				}
				f(block)
				return nil
			}
		}
		x.tiles = g.Tiles
		b.Run("forward/"+c.name, func(b *testing.B) { x.time(b, 2, 2, call(forward)) })
		b.Run("backward/"+c.name, func(b *testing.B) { x.time(b, 6, 4, call(backward)) })
	}
	b.Logf("%.1f MB of %d rows come", float64(bytes)/1e6, g.Rows)
}
