package checkpoint

import (
	"errors"
	"maps"
	"math/rand/v2"
	"sync"
	"syscall"
)

// A server is a simulated network file system. It keeps both the state that hosts see and the state that is durable on
// its disk.
type server struct {
	mu   sync.Mutex
	root *node
}

// A node is a file or a directory.
type node struct {
	kids    map[string]*node   // nil: a file
	history []map[string]*node // of a directory: its names before each change since the last sync
	data    []byte             // of a file, as hosts read it
	durable []byte             // of a file, on the disk after a sync
	synced  bool               // data is durable
	gone    bool               // it was removed
	opens   map[*host]int      // open handles of each host
}

func newServer() *server {
	return &server{root: &node{kids: map[string]*node{}}}
}

// open adds to the handles of a host.
func (n *node) open(h *host, more int) {
	if n.opens == nil {
		n.opens = map[*host]int{}
	}
	n.opens[h] += more
}

// held reports whether a living host has the file open.
func (n *node) held() bool {
	for h, count := range n.opens {
		if count > 0 && !h.dead {
			return true
		}
	}
	return false
}

// change records the names of a directory before they change.
func (n *node) change() { n.history = append(n.history, maps.Clone(n.kids)) }

// powerLoss restarts the server with its durable state. A directory keeps its names as of some change since the last
// sync; a file keeps its synced bytes and maybe more.
func (s *server) powerLoss(r *rand.Rand) {
	s.root.lose(r)
}

func (n *node) lose(r *rand.Rand) {
	if n.kids == nil {
		if !n.synced {
			n.data = n.data[:r.IntN(len(n.data)+1)]
			if r.IntN(2) == 0 {
				n.data = n.durable
			}
			n.durable, n.synced = n.data, true
		}
		return
	}
	if i := r.IntN(len(n.history) + 1); i < len(n.history) {
		n.kids = n.history[i]
	}
	n.history = nil
	for _, k := range n.kids {
		k.gone, k.opens = false, nil
		k.lose(r)
	}
}

// A host is a client of a server. Its cache may be stale, and its calls may fail.
type host struct {
	s    *server
	r    *rand.Rand
	seen map[*node]map[string]*node // the cached names of each directory

	rate  int // one call in rate fails; 0: none
	calls int
	dies  int           // number of the call from which the host is dead; 0: never
	dead  bool          // no call reaches the server
	stops int           // number of the call that blocks; 0: none
	stood chan struct{} // closed once the call blocks
	goOn  chan struct{} // closed to continue it
}

func (s *server) host(seed uint64) *host {
	return &host{s: s, r: rand.New(rand.NewPCG(seed, 99)), seen: map[*node]map[string]*node{},
		stood: make(chan struct{}), goOn: make(chan struct{})}
}

var errDead = errors.New("this host is dead")

// call begins a call, with the server locked. It may return one of these faults.
func (h *host) call(may ...error) error {
	h.calls++
	if h.calls == h.stops {
		h.s.mu.Unlock()
		close(h.stood)
		<-h.goOn
		h.s.mu.Lock()
	}
	if h.dies > 0 && h.calls >= h.dies {
		h.dead = true
	}
	if h.dead {
		return errDead
	}
	if h.rate == 0 || len(may) == 0 || h.r.IntN(h.rate) > 0 {
		return nil
	}
	return may[h.r.IntN(len(may))]
}

// after returns a fault for a call that was executed: the reply is lost.
func (h *host) after(may ...error) error {
	if h.rate == 0 || len(may) == 0 || h.r.IntN(2*h.rate) > 0 {
		return nil
	}
	return may[h.r.IntN(len(may))]
}

// names returns the names of a directory as the host sees them: now, or from its cache.
func (h *host) names(dir *node, now bool) map[string]*node {
	old, ok := h.seen[dir]
	if !ok || now || h.rate == 0 || h.r.IntN(4) == 0 {
		old = maps.Clone(dir.kids)
		h.seen[dir] = old
	}
	return old
}

// find looks up a name.
func (h *host) find(dir *node, name string) (*node, error) {
	if dir.gone {
		return nil, syscall.ESTALE
	}
	n := h.names(dir, false)[name]
	switch {
	case n == nil:
		return nil, syscall.ENOENT
	case n.gone:
		delete(h.seen, dir)
		return nil, syscall.ESTALE
	}
	return n, nil
}
