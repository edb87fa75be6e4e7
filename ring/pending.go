package ring

import (
	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
)

// An arrival is the transfers of a hop.
type arrival struct {
	hop    *Hop
	moving comm.Pending
}

// copyRows makes a hop's copies beside its transfers.
func (b *buffers) copyRows(hop *Hop) error {
	if len(hop.CopyKV)+len(hop.CopyGrad) > 0 && b.Mover == nil {
		return errNoMover
	}
	b.copy(b.kv, hop.CopyKV)
	b.copy(b.grads, hop.CopyGrad)
	return nil
}

func (b *buffers) copy(bufs []kv, list []Copy) {
	for _, c := range list {
		dst, src := c.Dst.of(bufs), c.Src.of(bufs)
		b.Mover.Copy(dst.k, src.k)
		b.Mover.Copy(dst.v, src.v)
	}
}

// await makes the stream wait for the transfers that must have ended before the next hop begins. These are the hop's
// own, with two exceptions. The first hop of the next pass waits for late ones. If the next call waits for its rows by
// itself, the stream waits for them only after that call.
func (b *buffers) await(hop *Hop, moving comm.Pending) {
	if b.gated != nil { // their call is queued by now
		b.gated.Wait()
		b.gated, b.gates = nil, nil
	}
	if hop.Late {
		b.late = &arrival{hop, moving}
		return
	}
	came := arrival{hop, moving}
	if hop.Begins && b.late != nil {
		came, b.late = *b.late, nil
	}
	if hop.Gated {
		if b.gates = b.gatesOf(came); b.gates != nil {
			b.gated = came.moving
			return
		}
	}
	came.moving.Wait()
}

// gatesOf returns the gates of the rows that a hop receives; nil if the kernel or the transfer has none.
func (b *buffers) gatesOf(a arrival) (gates []attention.Gate) {
	kernel, waits := b.Kernel.(attention.Waiter)
	gated, has := a.moving.(comm.Gated)
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
