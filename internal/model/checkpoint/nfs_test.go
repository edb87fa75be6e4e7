package checkpoint

import (
	"errors"
	"maps"
	"math/rand/v2"
	"sync"
	"syscall"
)

// server is a file system that hosts share. It has what all of them have done, and what of it is on its
// disk.
type server struct {
	mu   sync.Mutex
	root *node
}

// node is a file or a directory.
type node struct {
	kids    map[string]*node   // nil: a file
	history []map[string]*node // of a directory: its names before each change since they were last synced
	data    []byte             // of a file, as the hosts see it
	durable []byte             // of a file, on the disk
	synced  bool               // data is durable
	gone    bool               // it has no name any more
	opens   map[*host]int      // handles on it
}

func newServer() *server {
	return &server{root: &node{kids: map[string]*node{}}}
}

// open counts the handles of a host.
func (n *node) open(h *host, more int) {
	if n.opens == nil {
		n.opens = map[*host]int{}
	}
	n.opens[h] += more
}

// held says that a host that lives has it open.
func (n *node) held() bool {
	for h, count := range n.opens {
		if count > 0 && !h.dead {
			return true
		}
	}
	return false
}

// change is to be called before the names of a directory change.
func (n *node) change() { n.history = append(n.history, maps.Clone(n.kids)) }

// powerLoss has a server come back with what was on its disk: of the names in each directory those after
// some change since the last sync, of a file what was synced and maybe more.
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

// host is a client of a server: what it remembers may be old, and calls fail.
type host struct {
	s    *server
	r    *rand.Rand
	seen map[*node]map[string]*node // the names in a directory, as it has last looked

	rate  int // one call of so many fails; 0: none does
	calls int
	dies  int           // the call from which on it is dead; 0: it lives
	dead  bool          // nothing it does reaches the server
	stops int           // the call that stands still; 0: none does
	stood chan struct{} // closed when it stands
	goOn  chan struct{} // closed to let it go on
}

func (s *server) host(seed uint64) *host {
	return &host{s: s, r: rand.New(rand.NewPCG(seed, 99)), seen: map[*node]map[string]*node{},
		stood: make(chan struct{}), goOn: make(chan struct{})}
}

var errDead = errors.New("this host is dead")

// call is made at the beginning of every call, with the server locked. The error is a fault.
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

// after is a fault of a call that was done: the answer is lost.
func (h *host) after(may ...error) error {
	if h.rate == 0 || len(may) == 0 || h.r.IntN(2*h.rate) > 0 {
		return nil
	}
	return may[h.r.IntN(len(may))]
}

// names is a directory as this host sees it: as it is, or as it was.
func (h *host) names(dir *node, now bool) map[string]*node {
	old, ok := h.seen[dir]
	if !ok || now || h.rate == 0 || h.r.IntN(4) == 0 {
		old = maps.Clone(dir.kids)
		h.seen[dir] = old
	}
	return old
}

// find looks a name up.
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
