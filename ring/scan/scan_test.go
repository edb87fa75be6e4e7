package scan_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring/scan"
	"github.com/cprun/cprun/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const batch, heads, dim, dimV = 2, 2, 4, 3

// A composer composes maps of float64.
type composer struct {
	delta.Kernel
	stream *tensor.HostStream
}

func (k composer) Compose(dst, later, earlier tensor.View) error {
	n, m := later.Len(tensor.Batch)*later.Len(tensor.Seq), later.Len(tensor.Heads)
	wide, cols := later.Len(tensor.Dim), earlier.Len(tensor.Dim)
	if dst.Len(tensor.Dim) != cols || earlier.Len(tensor.Batch) != later.Len(tensor.Batch) {
		return fmt.Errorf("composed %v of %v and %v", dst, later, earlier)
	}
	k.stream.Do("compose", func() error {
		y, a, b := tensor.Data[float64](dst), tensor.Data[float64](later), slices.Clone(tensor.Data[float64](earlier))
		a = slices.Clone(a)
		for i := range n * m {
			for c := range cols {
				sum := 0.0
				for j := range m {
					sum += a[i*wide+j] * b[(i/m*m+j)*cols+c]
				}
				if at := c + wide - cols; at >= m { // a column of R
					sum += a[i*wide+at]
				}
				y[i*cols+c] = sum
			}
		}
		return nil
	})
	return nil
}

// A transport counts the sent bytes, and delays transfers.
type transport struct {
	comm.Exchanger
	stream *tensor.HostStream
	late   func(transfer int) bool
	made   int
	sent   int64
}

func (x *transport) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	for _, m := range send {
		x.sent += int64(m.View.Size() * m.View.DType().Size())
	}
	if len(send)+len(recv) == 0 {
		return nil, errors.New("an exchange of nothing")
	}
	x.made++
	if !x.late(x.made - 1) {
		return x.Exchanger.Exchange(send, recv)
	}
	for _, m := range recv {
		x.stream.Do("spoil", func() error { fill(m.View, math.NaN()); return nil })
	}
	return &lateTransfer{x, send, recv}, nil
}

// A lateTransfer reads and writes nothing before the stream waits for it. Until then the receivers are not numbers.
type lateTransfer struct {
	x          *transport
	send, recv []comm.Message
}

func (l *lateTransfer) Wait() {
	p, err := l.x.Exchanger.Exchange(l.send, l.recv)
	if err != nil {
		l.x.stream.Fail(err)
		return
	}
	p.Wait()
}

func (l *lateTransfer) Sync(context.Context) error { panic("the loops never block the host") }

func fill(v tensor.View, x float64) {
	d := tensor.Data[float64](v)
	for i := range d {
		d[i] = x
	}
}

func never(int, int) bool { return false }

// onRanks runs a function on each rank of a world in process, and returns the transports.
func onRanks(t *testing.T, n int, late func(rank, transfer int) bool,
	f func(rank int, s *scan.Scan) error) []*transport {
	t.Helper()
	streams, compute := make([]*tensor.HostStream, n), make([]tensor.Stream, n)
	for r := range n {
		streams[r] = tensor.NewHostStream("compute")
		compute[r] = streams[r]
	}
	world, sent := comm.NewLocal(n, compute, comm.Options{}), make([]*transport, n)
	var g errgroup.Group
	for r := range n {
		g.Go(func() error {
			defer streams[r].Close()
			sent[r] = &transport{Exchanger: world[r], stream: streams[r], late: func(i int) bool { return late(r, i) }}
			s := &scan.Scan{Kernel: composer{stream: streams[r]}, Comm: sent[r], Mover: cpu.New(streams[r]), Stream: streams[r],
				Arena: tensor.NewHostArena(0)}
			if err := f(r, s); err != nil {
				return err
			}
			if err := streams[r].Sync(context.Background()); err != nil {
				return err
			}
			return world[r].Close()
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	return sent
}

// random returns numbers around 0 of that size.
func random(rng *rand.Rand, size float64, shape ...int) tensor.View {
	v := tensor.New(tensor.F64, shape...)
	d := tensor.Data[float64](v)
	for i := range d {
		d[i] = size * rng.NormFloat64()
	}
	return v
}

// of returns the samples of segment i.
func of(v tensor.View, i int) tensor.View { return v.Slice(tensor.Batch, i*batch, (i+1)*batch) }

// equal compares bits.
func equal(a, b tensor.View) bool { return slices.Equal(tensor.Bytes(a), tensor.Bytes(b)) }

// runStates returns the states of all segments, and the transports, given the maps of all segments.
func runStates(t *testing.T, x *partition.Segments, maps tensor.View, backward bool,
	late func(rank, transfer int) bool) (tensor.View, []*transport) {
	t.Helper()
	all := tensor.New(tensor.F64, len(x.All)*batch, heads, dim, dimV)
	sent := onRanks(t, len(x.Own), late, func(rank int, s *scan.Scan) error {
		p := passesOf(schedules(x), backward)[rank]
		own := tensor.New(tensor.F64, len(p.Maps)*batch, heads, dim, dim+dimV)
		for i, place := range p.Maps {
			tensor.Copy(of(own, i), of(maps, x.Own[rank][place]))
		}
		states := tensor.New(tensor.F64, len(p.States)*batch, heads, dim, dimV)
		fill(states, math.NaN())
		moving, err := s.Begin(states, own, p)
		if err == nil {
			err = moving.Finish()
		}
		if err == nil {
			err = s.Stream.Sync(context.Background())
		}
		for slot, place := range p.States {
			tensor.Copy(of(all, x.Own[rank][place]), of(states, slot))
		}
		return err
	})
	return all, sent
}

// wantStates applies the maps one by one.
func wantStates(x *partition.Segments, maps tensor.View, backward bool) tensor.View {
	states := tensor.New(tensor.F64, len(x.All)*batch, heads, dim, dimV)
	m, s := tensor.Data[float64](maps), tensor.Data[float64](states)
	const n = batch * heads * dim
	for _, doc := range x.Docs {
		for k := range doc.Len() - 1 {
			from, to := doc.Lo+k, doc.Lo+k+1
			if backward {
				from, to = doc.Hi-1-k, doc.Hi-2-k
			}
			for i := range n {
				for c := range dimV {
					sum := m[(from*n+i)*(dim+dimV)+dim+c]
					for j := range dim {
						sum += m[(from*n+i)*(dim+dimV)+j] * s[(from*n+i/dim*dim+j)*dimV+c]
					}
					s[(to*n+i)*dimV+c] = sum
				}
			}
		}
	}
	return states
}

// predicted returns the maps and the states that a rank sends: in the first round to the next segment, in the others
// 1, 2, 4, ... segments on.
func predicted(x *partition.Segments, rank int, backward bool) (maps, states int64) {
	for _, doc := range x.Docs {
		n := doc.Len()
		owner := func(i int) int {
			if backward {
				return x.All[doc.Hi-1-i].Rank
			}
			return x.All[doc.Lo+i].Rank
		}
		count := func(from, to, reach int) {
			switch {
			case to >= n || owner(from) != rank || owner(to) == rank:
			case from <= reach:
				states++
			default:
				maps++
			}
		}
		for i := range n {
			count(i, i+1, 0)
			for d := 1; i > 0 && d < n; d *= 2 {
				count(i, i+d, d)
			}
		}
	}
	return maps, states
}

// cases returns sequences over several numbers of ranks.
func cases(t *testing.T, draws int) (list []*partition.Segments) {
	rng := rand.New(rand.NewPCG(73, 74))
	for _, size := range []int{1, 2, 3, 4, 8} {
		for _, l := range []partition.Layout{partition.Contiguous{}, partition.Zigzag{}} {
			list = append(list, segmentsOf(t, partition.Shape{SeqQ: 64, SeqKV: 64, Size: size, Layout: l}))
		}
		for range draws {
			list = append(list, segmentsOf(t, randomCase(rng, size)))
		}
	}
	return list
}

func TestStatesOverRanks(t *testing.T) {
	rng := rand.New(rand.NewPCG(75, 76))
	for _, x := range cases(t, 6) {
		maps := random(rng, 0.5, len(x.All)*batch, heads, dim, dim+dimV)
		for _, backward := range []bool{false, true} {
			got, sent := runStates(t, x, maps, backward, never)
			want := wantStates(x, maps, backward)
			for i, w := range tensor.Data[float64](want) {
				if g := tensor.Data[float64](got)[i]; !(math.Abs(g-w) <= 1e-11*max(1, math.Abs(w))) {
					t.Fatalf("%+v, backward %t: element %d is %v, want %v", x, backward, i, g, w)
				}
			}
			for rank := range sent {
				maps, states := predicted(x, rank, backward)
				if want := 8 * batch * heads * dim * (maps*(dim+dimV) + states*dimV); sent[rank].sent != want {
					t.Errorf("%+v, backward %t: rank %d sends %d bytes, want %d", x, backward, rank, sent[rank].sent,
						want)
				}
			}
		}
	}
}

// Each transfer in turn, and all together, begin when the loop waits for them. The bits stay.
func TestLateStates(t *testing.T) {
	rng := rand.New(rand.NewPCG(77, 78))
	for _, x := range cases(t, 1) {
		maps := random(rng, 0.5, len(x.All)*batch, heads, dim, dim+dimV)
		for _, backward := range []bool{false, true} {
			want, sent := runStates(t, x, maps, backward, never)
			delayed := []func(rank, transfer int) bool{func(int, int) bool { return true }}
			for r := range sent {
				for i := range sent[r].made {
					delayed = append(delayed, func(rank, transfer int) bool { return rank == r && transfer == i })
				}
			}
			for i, late := range delayed {
				if got, _ := runStates(t, x, maps, backward, late); !equal(got, want) {
					t.Fatalf("%+v, backward %t: delay %d changes the states", x, backward, i)
				}
			}
		}
	}
}

// A counter counts the bytes of transfers, which move nothing.
type counter struct{ sent int64 }

func (c *counter) Exchange(send, _ []comm.Message) (comm.Pending, error) {
	for _, m := range send {
		c.sent += int64(m.View.Size() * m.View.DType().Size())
	}
	return c, nil
}

func (*counter) Wait()                      {}
func (*counter) Sync(context.Context) error { return nil }

// An idler does nothing.
type idler struct{ delta.Idle }

func (idler) Copy(_, _ tensor.View) {}
func (idler) Add(_, _ tensor.View)  {}
func (idler) Zero(...tensor.View)   {}

// The traffic and the memory of one sample of a layer of 32 heads of 128, over a zigzag of 8 ranks.
func TestTrafficOfAZigzag(t *testing.T) {
	x := segmentsOf(t, partition.Shape{SeqQ: 1 << 17, SeqKV: 1 << 17, Size: 8, Layout: partition.Zigzag{}})
	const state = 32 * 128 * 128 * 4 // bytes
	stream := tensor.NewHostStream("compute")
	defer stream.Close()
	total, most, workspace := int64(0), int64(0), int64(0)
	for rank, s := range schedules(x) {
		p, sent, meter := &s.Forward, &counter{}, tensor.NewMeter()
		loop := scan.Scan{Kernel: idler{}, Comm: sent, Mover: idler{}, Stream: stream, Arena: meter}
		own := tensor.NewMeter()
		moving, err := loop.Begin(own.Alloc(tensor.F32, len(p.States), 32, 128, 128),
			own.Alloc(tensor.F32, len(p.Maps), 32, 128, 256), p)
		if err == nil {
			err = moving.Finish()
		}
		if err != nil {
			t.Fatal(err)
		}
		maps, states := predicted(x, rank, false)
		if want := 2*maps*state + states*state; sent.sent != want {
			t.Errorf("rank %d sends %d bytes, want %d", rank, sent.sent, want)
		}
		total, most, workspace = total+sent.sent, max(most, sent.sent), max(workspace, meter.Peak())
	}
	// An all-gather of the maps of 14 segments moves 14*7 = 98 of 4 MiB.
	if total != 91*state || most != 16*state || workspace != 2*2*state {
		t.Errorf("%d bytes in all, %d of the rank that sends most; workspace %d", total, most, workspace)
	}
}

// A faulty device fails in one call, after others.
type faulty struct {
	delta.Idle
	counter
	left int
}

var errFaulty = errors.New("faulty")

func (f *faulty) next() error {
	if f.left--; f.left == -1 {
		return errFaulty
	}
	return nil
}

func (f *faulty) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	return &f.counter, f.next()
}
func (f *faulty) Compose(_, _, _ tensor.View) error { return f.next() }

// Every failing call ends the loop with its error, and the stream has its label back.
func TestErrors(t *testing.T) {
	segs := segmentsOf(t, partition.Shape{SeqQ: 64, SeqKV: 64, Size: 4, Layout: partition.Zigzag{}})
	const rank = 1
	p := &scan.NewStates(segs, rank).Forward
	stream := tensor.NewHostStream("compute")
	defer stream.Close()
	states, maps := tensor.New(tensor.F64, 2, heads, dim, dimV), tensor.New(tensor.F64, 2, heads, dim, dim+dimV)
	run := func(f *faulty) error {
		s := scan.Scan{Kernel: f, Comm: f, Mover: idler{}, Stream: stream, Arena: tensor.NewHostArena(0),
			Label: "layer 3"}
		rows := func(n int) tensor.View { return tensor.New(tensor.F64, n, 3, 1, cols) }
		h, x := scan.NewHalo(segs, rank, 3), tensor.New(tensor.F64, 1, 16, 1, cols)
		if err := s.Halo(rows(2), x, h); err != nil {
			return err
		}
		if err := s.HaloBackward(x, rows(2), h); err != nil {
			return err
		}
		moving, err := s.Begin(states, maps, p)
		if err != nil {
			return err
		}
		return moving.Finish()
	}
	calls := 2
	for _, r := range p.Rounds {
		calls += min(1, len(r.Send)+len(r.Recv)) + len(r.Compose)
	}
	for left := range calls + 1 {
		if err := run(&faulty{left: left}); (left < calls) != errors.Is(err, errFaulty) {
			t.Errorf("after %d of %d calls: %v", left, calls, err)
		}
		if stream.Labelled() != "layer 3" {
			t.Errorf("after %d calls the stream's label is %q", left, stream.Labelled())
		}
	}
	s := scan.Scan{}
	for _, n := range [][2]int{{3, 2}, {2, 3}} {
		states, maps := tensor.New(tensor.F64, n[0], heads, dim, dimV), tensor.New(tensor.F64, n[1], heads, dim, dim+dimV)
		if _, err := s.Begin(states, maps, p); err == nil {
			t.Errorf("%d states and %d maps of a pass with 2 and 2: no error", n[0], n[1])
		}
	}
}
