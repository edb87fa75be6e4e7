package copyengine

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// The cases that every device passes, fake or real.

// amounts sets the numbers of calls, and sizes, of the cases.
type amounts struct{ ring, ringBytes, pairs, pairBytes, ahead, handOn, handBytes, groupings int }

// Cases runs all of them.
func (r *Rank) Cases(ctx context.Context, a amounts) error {
	for _, c := range []struct {
		name  string
		alone bool // also with one rank
		err   func() error
	}{
		{"ring", true, func() error { return r.Ring(ctx, a.ring, a.ringBytes) }},
		{"all pairs", true, func() error { return r.AllPairs(ctx, a.pairs, a.pairBytes) }},
		{"ahead", false, func() error { return errors.Join(r.Ahead(ctx, a.ahead, 2), r.Ahead(ctx, 5, 3*postRing+1)) }},
		{"hand on", false, func() error { return r.HandOn(ctx, a.handOn, a.handBytes) }},
		{"groupings", false, func() error { return r.Groupings(ctx, a.groupings) }},
	} {
		if !c.alone && r.Size() == 1 {
			continue
		}
		if err := c.err(); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// with returns a message to or from a rank.
func with(peer int, v tensor.View) []comm.Message { return []comm.Message{{Peer: peer, View: v}} }

// one sends or receives messages.
func (r *Rank) one(send bool, ms []comm.Message) (comm.Pending, error) {
	if send {
		return r.Exchange(ms, nil)
	}
	return r.Exchange(nil, ms)
}

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
			o := out[k].Slice(3, 0, size)
			r.rig.set(o, pattern(r.Rank(), i, k))
			send, recv = append(send, with(next, o)...), append(recv, with(prev, in[k].Slice(3, 0, size))...)
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

// AllPairs sends from every rank to every rank, itself included, in a different order on each.
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
			send = append(send, with(p, o)...)
		}
		for _, p := range order.Perm(n) {
			recv = append(recv, with(p, part(in, p, size(p, r.Rank())))...)
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

// Ahead lets the even ranks call far ahead of the odd ones, as senders and as receivers, with more messages a call than
// the board has room for.
func (r *Rank) Ahead(ctx context.Context, calls, messages int) error {
	peer := r.Rank() ^ 1
	if peer >= r.Size() {
		return nil
	}
	v, err := r.memory(calls * messages)
	if err != nil {
		return err
	}
	part := func(i int) tensor.View { return v.Slice(3, i*messages, (i+1)*messages) }
	for turn := range 2 {
		send := r.Rank()%2 == turn
		all := make([]comm.Pending, calls)
		for i := range calls {
			var ms []comm.Message
			for k := range messages {
				ms = append(ms, with(peer, part(i).Slice(3, k, k+1))...)
			}
			if send {
				r.rig.set(part(i), pattern(r.Rank(), i, 0))
			}
			if all[i], err = r.one(send, ms); err != nil {
				return err
			}
			if i == 0 && r.Rank()%2 == 1 {
				time.Sleep(20 * time.Millisecond) // the other one runs ahead
			}
		}
		for i := len(all) - 1; i >= 0; i-- {
			if err := all[i].Sync(ctx); err != nil {
				return err
			}
			if !send {
				r.rig.check(fmt.Sprintf("call %d", i), part(i), pattern(peer, i, 0))
			}
		}
		if err := r.rig.result(ctx); err != nil {
			return err
		}
	}
	return nil
}

// HandOn passes a message on from rank to rank, without a Wait between the calls.
func (r *Rank) HandOn(ctx context.Context, calls, size int) error {
	v, err := r.memory(size)
	if err != nil {
		return err
	}
	for i := range calls {
		var p comm.Pending
		if r.Rank() == 0 {
			r.rig.set(v, pattern(0, i, 0))
		} else if p, err = r.Exchange(nil, with(r.Rank()-1, v)); err != nil {
			return err
		}
		if r.Rank() < r.Size()-1 {
			if p, err = r.Exchange(with(r.Rank()+1, v), nil); err != nil {
				return err
			}
		}
		p.Wait()
		r.rig.check(fmt.Sprintf("call %d", i), v, pattern(0, i, 0))
		r.rig.set(v, 0)
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
			all = append(all, with(peer, v.Slice(3, k*size, (k+1)*size))...)
		}
		send, step := (r.Rank()+i)%2 == 0, parts
		if (r.Rank()+i/2)%2 == 0 {
			step = 1
		}
		for k := 0; k < parts; k += step {
			for j, m := range all[k : k+step] {
				if send {
					r.rig.set(m.View, pattern(r.Rank(), i, k+j))
				}
			}
			p, err := r.one(send, all[k:k+step])
			if err != nil {
				return err
			}
			p.Wait()
			for j, m := range all[k : k+step] {
				if !send {
					r.rig.check(fmt.Sprintf("call %d message %d", i, k+j), m.View, pattern(peer, i, k+j))
				}
			}
		}
	}
	return r.rig.result(ctx)
}
