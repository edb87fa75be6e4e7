package wire

import (
	"runtime"
	"testing"
	"time"

	"github.com/cprun/cprun/comm/internal/link"
)

// sends returns posted transfers of one round.
func sends(n, bytes int, first uint64) []*link.Transfer {
	buf, r := make([]byte, bytes), link.NewRound()
	r.Begin(n)
	all := make([]*link.Transfer, n)
	for i := range all {
		all[i] = &link.Transfer{}
		all[i].Prepare(r, link.MsgID{Seq: first + uint64(i)}, 1, true, buf)
	}
	return all
}

// TestSleepingReceiver sends more and more to a rank whose host reads nothing. The bytes queued beside the caller's
// views stay within bounds, whatever the receiver accepted before.
func TestSleepingReceiver(t *testing.T) {
	for name, c := range map[string]struct {
		n, bytes int
		accepted bool
	}{
		"small": {4000, maxEager, false}, "empty": {20000, 0, false}, "large": {64, 4 << 20, false}, "large and accepted": {64, 4 << 20, true},
	} {
		here, there := tcpPair(t)
		s := newSockets(0, 2, "", defaultPairs)
		s.peer(1).reserve()
		ch := plainChannel(here, 1, "pid 1")
		ch.out = writerOf(t, here)
		s.attach(ch)
		p, all := s.peer(1), sends(c.n, c.bytes, 0)
		before := heap()
		for i, x := range all {
			if c.accepted {
				if err := p.onAccept(header{kind: frameAccept, id: link.MsgID{Seq: uint64(i)}, size: uint64(c.bytes)}); err != nil {
					t.Fatal(err)
				}
			}
			s.Post(x)
		}
		awaitStall(p)
		// Lists of what waits, and a batch of frames that is being written.
		if grown, most := heap()-before, 4*maxPayload+200*c.n; grown > most {
			t.Errorf(
				"%s: %d messages of %d bytes take %d bytes of the sender, above %d",
				name,
				c.n,
				c.bytes,
				grown,
				most,
			)
		}
		p.mu.Lock()
		onWire := 0
		for _, x := range all {
			onWire += x.Moved
		}
		p.mu.Unlock()
		if most := eagerWindow + 4<<20; onWire > most { // and the buffers of the two systems
			t.Errorf("%s: %d bytes are on their way, above %d", name, onWire, most)
		}
		there.Close()
		s.Close()
	}
}

// awaitStall returns when the writer has stopped.
func awaitStall(p *peer) {
	for last, same := -1, 0; same < 5; time.Sleep(20 * time.Millisecond) {
		p.mu.Lock()
		now := len(p.ctrl) + len(p.small)
		for _, t := range p.large {
			now += t.Moved
		}
		p.mu.Unlock()
		if now != last {
			same = 0
		}
		last, same = now, same+1
	}
}

// heap returns the bytes of live objects.
func heap() int {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}
