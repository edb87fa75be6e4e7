package commtest

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

var (
	allTypes    = []tensor.DType{tensor.F64, tensor.F32, tensor.F16, tensor.BF16, tensor.I64, tensor.I32, tensor.U8}
	reduceTypes = []tensor.DType{tensor.F64, tensor.F32, tensor.I64, tensor.I32}
	// Elements: nothing, less than a rank each, odd, enough for each rank.
	sizes = []int{0, 1, 5, 1003}
)

// testCalls runs every data call on one world of n ranks.
func (s suite) testCalls(t *testing.T, n int) {
	s.run(t, n, comm.Options{}, func(r *rank) error {
		for _, f := range []func(*rank) error{
			(*rank).allReduces, (*rank).someMiB, (*rank).special, (*rank).determinism, (*rank).scatters,
			(*rank).gathers, (*rank).broadcasts, (*rank).ringExchange, (*rank).allPairs, (*rank).queued,
		} {
			if err := f(r); err != nil {
				return err
			}
			if err := r.Barrier(r.ctx); err != nil {
				return err
			}
		}
		return nil
	})
}

// each calls f for types and sizes, with a float32 size beyond a socket's buffer, and on three ranks beyond a frame.
// Three ranks, or the most possible, try all types in all sizes. Other numbers of ranks, with the same bytes on other
// routes, try one type for each size in turn.
func (r *rank) each(types []tensor.DType, f func(d tensor.DType, size int) error) error {
	for k, d := range types {
		for j, size := range sizes {
			if r.Size() != (suite{*r.setup}).most(3) && k != (r.Size()+j)%len(types) {
				continue
			}
			if err := f(d, size); err != nil {
				return fmt.Errorf("%d elements of %s: %w", size, d, err)
			}
		}
	}
	large := 60_001
	if r.Size() == 3 {
		large = 150_001
	}
	if err := f(tensor.F32, large); err != nil {
		return fmt.Errorf("%d elements of float32: %w", large, err)
	}
	return nil
}

func (r *rank) allReduces() error {
	return r.each(reduceTypes, func(d tensor.DType, size int) error {
		for _, op := range []comm.Op{comm.Sum, comm.Max, comm.Min} {
			v := r.fill(d, size, r.Rank(), 0)
			if err := r.do(r.AllReduce(v, op)); err != nil {
				return err
			}
			if err := r.expect("all-reduce "+op.String(), v,
				func(i int) int { return reduced(op, r.Size(), i) }); err != nil {
				return err
			}
		}
		return nil
	})
}

// someMiB reduces more than is done in one piece.
func (r *rank) someMiB() error {
	if r.Size() != 3 {
		return nil
	}
	data := make([]float64, 700_001)
	for i := range data {
		data[i] = float64(i ^ r.Rank())
	}
	v := r.put(tensor.FromSlice(data, len(data)))
	if err := r.do(r.AllReduce(v, comm.Sum)); err != nil {
		return err
	}
	got, err := r.get(v)
	if err != nil {
		return err
	}
	for i, x := range tensor.Data[float64](got) {
		if want := float64(i) + float64(i^1) + float64(i^2); x != want {
			return fmt.Errorf("element %d of %d is %v, want %v", i, len(data), x, want)
		}
	}
	return nil
}

// special checks that a NaN of one rank reaches all, in every reduction and size, and that
// infinities survive.
func (r *rank) special() error {
	for _, size := range []int{3, 9000} {
		for _, op := range []comm.Op{comm.Sum, comm.Max, comm.Min} {
			data := make([]float32, size)
			if r.Rank() == r.Size()-1 {
				data[0] = float32(math.NaN())
			}
			data[1] = float32(math.Inf(1))
			v := r.put(tensor.FromSlice(data, size))
			if err := r.do(r.AllReduce(v, op)); err != nil {
				return err
			}
			got, err := r.get(v)
			if err != nil {
				return err
			}
			data = tensor.Data[float32](got)
			if x := data[0]; x == x && (op == comm.Sum || !r.setup.NaNPassedOver) {
				return fmt.Errorf("%s of a NaN over %d elements is %v", op, size, x)
			}
			if !math.IsInf(float64(data[1]), 1) {
				return fmt.Errorf("%s of infinities is %v", op, data[1])
			}
		}
	}
	return nil
}

// determinism reduces numbers whose sum depends on the order, twice, and compares the bits between runs and ranks.
func (r *rank) determinism() error {
	for _, size := range []int{7, 33_333} {
		rng := rand.New(rand.NewPCG(uint64(r.Rank()), 7))
		var runs [2]tensor.View // of the host
		xs := make([]float32, size)
		for i := range xs {
			xs[i] = float32(rng.NormFloat64() * math.Exp(20*rng.Float64()))
		}
		for k := range runs {
			v := r.put(tensor.FromSlice(xs, size))
			if err := r.do(r.AllReduce(v, comm.Sum)); err != nil {
				return err
			}
			var err error
			if runs[k], err = r.get(v); err != nil {
				return err
			}
		}
		if !bytes.Equal(tensor.Bytes(runs[0]), tensor.Bytes(runs[1])) {
			return fmt.Errorf("two sums of the same %d numbers differ", size)
		}
		v := r.new(tensor.F32, r.Size(), size)
		if err := r.do(r.AllGather(v, r.put(runs[0]))); err != nil {
			return err
		}
		all, err := r.get(v)
		if err != nil {
			return err
		}
		for p := range r.Size() {
			if !bytes.Equal(tensor.Bytes(all)[p*4*size:(p+1)*4*size], tensor.Bytes(runs[0])) {
				return fmt.Errorf("the sum of %d numbers on rank %d differs from rank %d's", size, p, r.Rank())
			}
		}
	}
	return nil
}

func (r *rank) scatters() error {
	return r.each(reduceTypes, func(d tensor.DType, size int) error {
		part := size / r.Size()
		for _, op := range []comm.Op{comm.Sum, comm.Max, comm.Min} {
			src, dst := r.fill(d, part*r.Size(), r.Rank(), 0), r.new(d, part)
			if op == comm.Max { // the own part of src is allowed as dst
				dst = src.Slice(tensor.Dim, r.Rank()*part, (r.Rank()+1)*part)
			}
			if err := r.do(r.ReduceScatter(dst, src, op)); err != nil {
				return err
			}
			err := r.expect("reduce-scatter "+op.String(), dst,
				func(i int) int { return reduced(op, r.Size(), r.Rank()*part+i) })
			if err != nil {
				return err
			}
		}
		return nil
	})
}

func (r *rank) gathers() error {
	n := r.Size()
	return r.each(allTypes, func(d tensor.DType, size int) error {
		part := size / n
		dst, src := r.new(d, n*part), r.fill(d, part, r.Rank(), 0)
		if err := r.do(r.AllGather(dst, src)); err != nil {
			return err
		}
		if err := r.expectParts("all-gather", dst, n, number); err != nil {
			return err
		}
		dst = r.new(d, n*part) // the own part of dst is allowed as src
		src = dst.Slice(tensor.Dim, r.Rank()*part, (r.Rank()+1)*part)
		own := tensor.New(d, part)
		fillWith(own, func(i int) int { return number(r.Rank(), i) })
		if part > 0 {
			r.dev.Upload(src, own)
		}
		if err := r.do(r.AllGather(dst, src)); err != nil {
			return err
		}
		return r.expectParts("all-gather in place", dst, n, number)
	})
}

func (r *rank) broadcasts() error {
	for root := range r.Size() {
		for _, size := range []int{0, 1, 1000, 50_000} {
			v := r.fill(tensor.F32, size, r.Rank(), 0)
			if err := r.do(r.Broadcast(v, root)); err != nil {
				return err
			}
			if err := r.expect(fmt.Sprintf("broadcast from %d", root), v,
				func(i int) int { return number(root, i) }); err != nil {
				return err
			}
		}
	}
	return nil
}

// ringExchange sends k and v to the next rank and receives the previous rank's, as a hop of
// ring attention does, on every size; with one rank the peer is itself.
func (r *rank) ringExchange() error {
	n := r.Size()
	next, prev := (r.Rank()+1)%n, (r.Rank()+n-1)%n
	return r.each(allTypes, func(d tensor.DType, size int) error {
		k, v := r.fill(d, size, r.Rank(), 0), r.fill(d, size/2, r.Rank(), 1)
		k2, v2 := r.new(d, size), r.new(d, size/2)
		err := r.do(r.Exchange([]comm.Message{{Peer: next, View: k}, {Peer: next, View: v}},
			[]comm.Message{{Peer: prev, View: k2}, {Peer: prev, View: v2}}))
		if err != nil {
			return err
		}
		if err := r.expect("keys", k2, func(i int) int { return number(prev, i) }); err != nil {
			return err
		}
		return r.expect("values", v2, func(i int) int { return number(prev, 1+i) })
	})
}

// allPairs sends several messages between all ranks, itself included, in one call. Each rank lists its peers in another
// order, and sizes are far beyond the buffers of sockets.
func (r *rank) allPairs() error {
	n, per := r.Size(), []int{3, 60_000, 0, 9000}
	if n > 5 {
		per = []int{3, 9000, 0, 5000}
	}
	var send, recv []comm.Message
	order := rand.New(rand.NewPCG(uint64(r.Rank()), 1))
	for _, p := range order.Perm(n) {
		for m, size := range per {
			send = append(send, comm.Message{Peer: p, View: r.fill(tensor.I64, size, r.Rank(), 100*m+p)})
		}
	}
	from := order.Perm(n)
	for _, p := range from {
		for _, size := range per {
			recv = append(recv, comm.Message{Peer: p, View: r.new(tensor.I64, size)})
		}
	}
	// Between two ranks the order counts; between pairs it must not.
	if r.Rank()%2 == 1 {
		slices.SortStableFunc(send, func(a, b comm.Message) int { return b.Peer - a.Peer })
	}
	if err := r.do(r.Exchange(send, recv)); err != nil {
		return err
	}
	for i, m := range recv {
		k := i % len(per)
		err := r.expect(fmt.Sprintf("message %d of rank %d", k, m.Peer), m.View,
			func(j int) int { return number(m.Peer, 100*k+r.Rank()+j) })
		if err != nil {
			return err
		}
	}
	return nil
}

// queued posts many calls before it waits for any, one-sided exchanges among them.
func (r *rank) queued() error {
	n := r.Size()
	var all []comm.Pending
	var views []tensor.View
	for k := range 20 {
		v := r.fill(tensor.F32, 100+500*k, r.Rank(), k)
		p, err := r.AllReduce(v, comm.Sum)
		if err != nil {
			return err
		}
		all, views = append(all, p), append(views, v)
	}
	in := r.new(tensor.F32, 40_000)
	for k := range n - 1 { // each rank passes its last receipt to the next
		var p comm.Pending
		var err error
		if r.Rank() == k {
			if k == 0 {
				in = r.fill(tensor.F32, 40_000, 9, 0)
			}
			p, err = r.Exchange(with(k+1, in), nil)
		} else if r.Rank() == k+1 {
			p, err = r.Exchange(nil, with(k, in))
		}
		if err != nil {
			return err
		}
		if p != nil {
			all = append(all, p)
		}
	}
	for i := len(all) - 1; i >= 0; i-- { // out of order
		if err := all[i].Sync(r.ctx); err != nil {
			return err
		}
	}
	for k, v := range views {
		if err := r.expect(fmt.Sprintf("queued sum %d", k), v,
			func(i int) int { return reduced(comm.Sum, n, k+i) }); err != nil {
			return err
		}
	}
	if n == 1 {
		return nil
	}
	return r.expect("handed on", in, func(i int) int { return number(9, i) })
}
