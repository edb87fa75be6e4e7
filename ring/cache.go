package ring

import (
	"container/list"
	"sync"
	"unsafe"

	"github.com/cprun/cprun/partition"
)

// Cache keeps the schedules that were used last, so that a batch of a known shape costs a look-up. Packed documents
// make a new shape with nearly every batch, so a Cache is bounded. Goroutines may share it. Callers must not change
// its schedules.
type Cache struct {
	limit int64

	mu    sync.Mutex
	size  int64
	known map[cacheKey]*list.Element
	order list.List // of *cached, the latest used first
}

// CacheBytes is a bound for a Cache, in bytes: room for some hundred schedules of 64 ranks and 100 documents.
const CacheBytes = 64 << 20

type cacheKey struct {
	algorithm, shape, when              string
	heads, kvHeads, inner, gather, rank int
	positions, split                    bool
}

type cached struct {
	key      cacheKey
	schedule *Schedule
	size     int64
}

// NewCache returns a cache of about that many bytes. It always keeps the latest schedule.
func NewCache(bytes int64) *Cache {
	return &Cache{limit: bytes, known: map[cacheKey]*list.Element{}}
}

// New returns the same as the function New.
func (c *Cache) New(algorithm string, s Spec, rank int) (*Schedule, error) {
	key := cacheKey{algorithm, s.Key(), s.Gather, s.Heads, s.KVHeads, s.Inner, s.GatherHeads, rank, s.Positions,
		s.Split}
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.known[key]; e != nil {
		c.order.MoveToFront(e)
		return e.Value.(*cached).schedule, nil
	}
	made, err := New(algorithm, s, rank)
	if err != nil {
		return nil, err
	}
	e := &cached{key: key, schedule: made, size: made.bytes() + int64(len(key.shape))}
	c.known[key] = c.order.PushFront(e)
	for c.size += e.size; c.size > c.limit && c.order.Len() > 1; {
		old := c.order.Remove(c.order.Back()).(*cached)
		delete(c.known, old.key)
		c.size -= old.size
	}
	return made, nil
}

// bytes estimates the memory of a schedule. Forward shares the lists of Backward.
func (s *Schedule) bytes() int64 {
	n := int64(len(s.Forward)+len(s.Backward)) * int64(unsafe.Sizeof(Hop{}))
	for i := range s.Backward {
		h := &s.Backward[i]
		moves := len(h.SendKV) + len(h.RecvKV) + len(h.SendGrad) + len(h.RecvGrad)
		moves += 2 * (len(h.CopyKV) + len(h.CopyGrad) + len(h.Fold))
		n += int64(len(h.Tiles))*int64(unsafe.Sizeof(partition.Tile{})) + 8*int64(len(h.Columns))
		n += int64(moves) * int64(unsafe.Sizeof(Move{}))
	}
	for _, x := range []*Exchange{s.Q, s.KV} {
		if x != nil {
			n += int64(len(x.Send)+len(x.Recv)) * int64(unsafe.Sizeof(headMove{}))
		}
	}
	return n
}
