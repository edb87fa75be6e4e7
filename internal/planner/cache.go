package planner

import (
	"container/list"
	"encoding/binary"
	"fmt"
	"sync"
)

// Cache keeps the choices that were made last, so that a packing which comes again costs a look-up. What it
// keeps is bounded. Goroutines may share it. Callers must not change a choice that comes from it.
type Cache struct {
	costs Costs
	limit int // choices

	mu    sync.Mutex
	known map[string]*list.Element
	order list.List // of *kept, the latest used first
}

type kept struct {
	key    string
	choice *Choice
}

// CacheChoices is a bound for a Cache: what some epochs of a small corpus have in packings.
const CacheChoices = 4096

// NewCache returns a cache of that many choices, made by those costs.
func NewCache(costs Costs, limit int) *Cache {
	return &Cache{costs: costs, limit: max(1, limit), known: map[string]*list.Element{}}
}

// Quick returns what the function Quick returns.
func (c *Cache) Quick(x Case, ways []Way) (*Choice, error) {
	key := keyOf(x, ways)
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.known[key]; e != nil {
		c.order.MoveToFront(e)
		return e.Value.(*kept).choice, nil
	}
	made, err := Quick(x, ways, c.costs)
	if err != nil {
		return nil, err
	}
	c.known[key] = c.order.PushFront(&kept{key, &made})
	if c.order.Len() > c.limit {
		delete(c.known, c.order.Remove(c.order.Back()).(*kept).key)
	}
	return &made, nil
}

// keyOf is equal for equal cases and ways. It is not for reading.
func keyOf(x Case, ways []Way) string {
	b := make([]byte, 0, 128+3*len(x.Docs))
	for _, n := range x.Docs {
		b = binary.AppendVarint(b, int64(n))
	}
	return string(fmt.Appendf(b, "|%v %d %v %d %v %t %v", x.Attention, x.Tokens, x.Kinds, x.Ranks, x.At, x.Recompute, ways))
}
