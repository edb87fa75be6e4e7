package ring

import (
	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/partition"
)

// arrive makes the stream wait for the rest of a hop's transfers, and for what the hop before has left on its way. An early
// hop leaves its own to the next call, where that waits for rows by itself.
func (m *keys) arrive(hop *Hop, rest comm.Pending) {
	if m.late != nil {
		m.late.Wait()
		m.late, m.gates = nil, nil
	}
	if hop.Early {
		m.gates = m.gatesOf(hop, rest)
	}
	if m.gates != nil {
		m.late = rest
		return
	}
	rest.Wait()
}

// gatesOf returns the gates of the rows that an early hop receives; nil where the kernel or the transfer has none.
func (m *keys) gatesOf(hop *Hop, transfer comm.Pending) (gates []attention.Gate) {
	kernel, waits := m.ring.Kernel.(attention.Waiter)
	gated, has := transfer.(comm.Gated)
	if !waits || !has || !kernel.WaitsForKeys() {
		return nil
	}
	peers := gated.Gates()
	for _, move := range hop.RecvKV {
		for _, p := range peers {
			if p.Peer == move.Peer {
				gates = append(gates, attention.Gate{Rows: partition.Range{Lo: move.Block.Lo, Hi: move.Block.Hi}, Gate: p.Gate})
			}
		}
	}
	return gates
}
