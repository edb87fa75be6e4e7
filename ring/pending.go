package ring

import (
	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
)

// pending holds the transfers that outlast their hop.
type pending struct {
	next  *arrival     // of a Late hop; nil: none
	gated comm.Pending // with gates for the present call; nil: none
}

// An arrival waits for a hop's transfers, or for late ones in their place.
type arrival struct {
	comm.Pending
	hop  *Hop
	bufs *buffers
}

// exchangeMore makes a hop's copies beside its transfers, and lets transfers be late.
func (b *buffers) exchangeMore(hop *Hop, moving comm.Pending) (comm.Pending, error) {
	if len(hop.CopyKV)+len(hop.CopyGrad) > 0 && b.Mover == nil {
		return nil, errNoMover
	}
	b.copy(b.kv, hop.CopyKV)
	b.copy(b.grads, hop.CopyGrad)
	if b.pending == nil && !hop.Late && !hop.Gated {
		return moving, nil
	}
	if b.pending == nil {
		b.pending = &pending{}
	}
	return arrival{moving, hop, b}, nil
}

func (b *buffers) copy(bufs []kv, list []Copy) {
	for _, c := range list {
		dst, src := c.Dst.of(bufs), c.Src.of(bufs)
		b.Mover.Copy(dst.k, src.k)
		b.Mover.Copy(dst.v, src.v)
	}
}

// Wait waits for the transfers that must have ended before the next hop begins.
func (a arrival) Wait() {
	b, l := a.bufs, a.bufs.pending
	if l.gated != nil { // by now the call is queued
		l.gated.Wait()
		l.gated, b.gates = nil, nil
	}
	if a.hop.Late {
		l.next = &a
		return
	}
	came := a
	if a.hop.Begins && l.next != nil {
		came, l.next = *l.next, nil
	}
	if a.hop.Gated {
		b.gates = b.gatesOf(came)
	}
	if b.gates != nil {
		l.gated = came.Pending
		return
	}
	came.Pending.Wait()
}

// gatesOf returns the gates of the rows that a hop receives; nil if the kernel or the transfer has none.
func (b *buffers) gatesOf(a arrival) (gates []attention.Gate) {
	kernel, waits := b.Kernel.(attention.Waiter)
	gated, has := a.Pending.(comm.Gated)
	if !waits || !has || !kernel.WaitsForKeys() {
		return nil
	}
	peers := gated.Gates()
	for _, move := range a.hop.RecvKV {
		for _, p := range peers {
			if p.Peer == move.Peer {
				gates = append(gates, attention.Gate{Rows: move.Block.rows(), Gate: p.Gate})
			}
		}
	}
	return gates
}
