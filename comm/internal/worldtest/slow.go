package worldtest

import (
	"sync/atomic"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/internal/link"
	"github.com/cprun/cprun/comm/internal/local"
)

// A slowTeller is a transport that takes a while to tell the other ranks of a failure.
type slowTeller struct {
	link.Transport
	told atomic.Bool
}

func (s *slowTeller) AwaitTold() {
	if s.Err() != nil {
		time.Sleep(50 * time.Millisecond)
		s.told.Store(true)
	}
}

// SlowHosts returns the groups of two ranks of this process, the first of which takes a while to
// tell the other of a failure, and whether it has done so. What builds on such a group must not
// let its callers know before.
func SlowHosts(opts comm.Options) (hosts []*comm.Group, told func() bool) {
	w := local.NewWorld(2)
	first := w.Link(0)
	slow := &slowTeller{Transport: first.Transport}
	first.Transport = slow
	return []*comm.Group{comm.NewWorld(first, 0, nil, opts), comm.NewWorld(w.Link(1), 1, nil, opts)}, slow.told.Load
}
