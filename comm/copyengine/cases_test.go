package copyengine

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// The cases that every device passes, fake or real.

// pattern returns the byte that rank r fills message k of call i with.
func pattern(r, i, k int) byte { return byte(1 + (r*97+i*31+k*13)%251) }

// memory returns n bytes of the device, the same in every case.
func (r *Rank) memory(n int) (v tensor.View, err error) {
	if r.mem.IsZero() || r.mem.Size() < n {
		if r.mem, err = r.rig.bytes(n); err != nil {
			return tensor.View{}, err
		}
	}
	return r.mem.Slice(3, 0, n), nil
}

// Ring passes two messages a call around a ring, over and over, in buffers that are used
// again as soon as Wait allows it. The sizes change from call to call; hosts fall behind and
// run ahead.
func (r *Rank) Ring(ctx context.Context, calls, most int) error {
	n, sizes, late := r.Size(), rand.New(rand.NewPCG(1, 2)), rand.New(rand.NewPCG(uint64(r.Rank()), 3))
	next, prev := (r.Rank()+1)%n, (r.Rank()+n-1)%n
	var out, in [2]tensor.View
	all, err := r.memory(4 * most)
	if err != nil {
		return err
	}
	for k := range out {
		out[k], in[k] = all.Slice(3, 2*k*most, (2*k+1)*most), all.Slice(3, (2*k+1)*most, (2*k+2)*most)
	}
	for i := range calls {
		var send, recv []comm.Message
		for k := range out {
			size := sizes.IntN(most + 1)
			if sizes.IntN(8) == 0 {
				size = 0
			}
			o, v := out[k].Slice(3, 0, size), in[k].Slice(3, 0, size)
			r.rig.set(o, pattern(r.Rank(), i, k))
			send, recv = append(
				send,
				comm.Message{Peer: next, View: o},
			), append(
				recv,
				comm.Message{Peer: prev, View: v},
			)
		}
		p, err := r.Exchange(send, recv)
		if err != nil {
			return err
		}
		if late.IntN(50) == 0 {
			time.Sleep(time.Duration(late.IntN(300)) * time.Microsecond)
		}
		var gates []comm.PeerGate
		if i%2 == 0 {
			gates = p.(comm.Gated).Gates()
		}
		for _, g := range gates { // of one peer, after all its messages
			r.rig.await(g.Gate)
			for k := range in {
				r.rig.check(fmt.Sprintf("call %d message %d, by its gate", i, k), recv[k].View, pattern(prev, i, k))
			}
		}
		p.Wait()
		for k := range out {
			r.rig.set(out[k], 0)
			r.rig.check(fmt.Sprintf("call %d message %d", i, k), recv[k].View, pattern(prev, i, k))
			r.rig.set(in[k], 255)
		}
		if late.IntN(100) == 0 {
			if err := r.rig.result(ctx); err != nil {
				return err
			}
		}
	}
	return r.rig.result(ctx)
}

// AllPairs has every rank send to every rank, itself included, in an order of its own.
func (r *Rank) AllPairs(ctx context.Context, calls, most int) error {
	n, order := r.Size(), rand.New(rand.NewPCG(uint64(r.Rank()), 5))
	all, err := r.memory(2 * n * most)
	if err != nil {
		return err
	}
	out, in := all.Slice(3, 0, n*most), all.Slice(3, n*most, 2*n*most)
	part := func(v tensor.View, p, size int) tensor.View { return v.Slice(3, p*most, p*most+size) }
	for i := range calls {
		size := func(from, to int) int { return (i*7919 + from*104729 + to*1299709) % (most + 1) }
		var send, recv []comm.Message
		for _, p := range order.Perm(n) {
			o := part(out, p, size(r.Rank(), p))
			r.rig.set(o, pattern(r.Rank(), i, p))
			send = append(send, comm.Message{Peer: p, View: o})
		}
		for _, p := range order.Perm(n) {
			recv = append(recv, comm.Message{Peer: p, View: part(in, p, size(p, r.Rank()))})
		}
		p, err := r.Exchange(send, recv)
		if err != nil {
			return err
		}
		p.Wait()
		for _, m := range recv {
			r.rig.check(fmt.Sprintf("call %d from rank %d", i, m.Peer), m.View, pattern(m.Peer, i, r.Rank()))
		}
		r.rig.set(out, 0)
		r.rig.set(in, 255)
	}
	return r.rig.result(ctx)
}

// Ahead has the even ranks call far ahead of the odd ones, as senders and as receivers, with
// more messages a call than the board has room for.
func (r *Rank) Ahead(ctx context.Context, calls, messages int) error {
	peer := r.Rank() ^ 1
	if peer >= r.Size() {
		return nil
	}
	send := r.Rank()%2 == 0
	for range 2 {
		v, err := r.memory(calls * messages)
		if err != nil {
			return err
		}
		var all []comm.Pending
		for i := range calls {
			var ms []comm.Message
			for k := range messages {
				at := i*messages + k
				ms = append(ms, comm.Message{Peer: peer, View: v.Slice(3, at, at+1)})
			}
			p := comm.Pending(nil)
			if send {
				r.rig.set(v.Slice(3, i*messages, (i+1)*messages), pattern(r.Rank(), i, 0))
				p, err = r.Exchange(ms, nil)
			} else {
				p, err = r.Exchange(nil, ms)
			}
			if err != nil {
				return err
			}
			all = append(all, p)
			if i == 0 && r.Rank()%2 == 1 {
				time.Sleep(20 * time.Millisecond) // the other one runs ahead
			}
		}
		for i := len(all) - 1; i >= 0; i-- {
			if err := all[i].Sync(ctx); err != nil {
				return err
			}
		}
		if !send {
			for i := range calls {
				r.rig.check(fmt.Sprintf("call %d", i), v.Slice(3, i*messages, (i+1)*messages), pattern(peer, i, 0))
			}
		}
		if err := r.rig.result(ctx); err != nil {
			return err
		}
		send = !send
	}
	return nil
}

// HandOn passes a message on from rank to rank, without a Wait between the calls.
func (r *Rank) HandOn(ctx context.Context, calls, size int) error {
	v, err := r.memory(size)
	if err != nil {
		return err
	}
	last := r.Size() - 1
	for i := range calls {
		if r.Rank() == 0 {
			r.rig.set(v, pattern(0, i, 0))
		}
		var p comm.Pending
		if r.Rank() > 0 {
			if p, err = r.Exchange(nil, []comm.Message{{Peer: r.Rank() - 1, View: v}}); err != nil {
				return err
			}
		}
		if r.Rank() < last {
			if p, err = r.Exchange([]comm.Message{{Peer: r.Rank() + 1, View: v}}, nil); err != nil {
				return err
			}
		}
		if p != nil {
			p.Wait()
			r.rig.check(fmt.Sprintf("call %d", i), v, pattern(0, i, 0))
			r.rig.set(v, 0)
		}
	}
	return r.rig.result(ctx)
}

// Groupings makes one rank send in one call what the other receives in several calls, each of which depends on the data
// of the call before; and the other way round.
func (r *Rank) Groupings(ctx context.Context, calls int) error {
	const parts, size = 4, 500
	if r.Rank() > 1 {
		return nil
	}
	peer := 1 - r.Rank()
	v, err := r.memory(parts * size)
	if err != nil {
		return err
	}
	for i := range calls {
		var all []comm.Message
		for k := range parts {
			all = append(all, comm.Message{Peer: peer, View: v.Slice(3, k*size, (k+1)*size)})
		}
		split := (r.Rank()+i/2)%2 == 0
		send := (r.Rank()+i)%2 == 0
		for k := 0; k < parts; {
			step := parts
			if split {
				step = 1
			}
			ms := all[k : k+step]
			var p comm.Pending
			if send {
				for j, m := range ms {
					r.rig.set(m.View, pattern(r.Rank(), i, k+j))
				}
				p, err = r.Exchange(ms, nil)
			} else {
				p, err = r.Exchange(nil, ms)
			}
			if err != nil {
				return err
			}
			p.Wait()
			for j, m := range ms {
				if !send {
					r.rig.check(fmt.Sprintf("call %d message %d", i, k+j), m.View, pattern(peer, i, k+j))
				}
			}
			k += step
		}
	}
	return r.rig.result(ctx)
}
