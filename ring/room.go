package ring

import "sync"

// room is memory in which a planner makes schedules for a caller that only weighs what they do.
type room struct {
	hop  pool[Hop]
	move pool[Move]
	fold pool[Fold]
	stop pool[stop]
}

// rooms is rooms that nobody works in, for their memory.
var rooms = sync.Pool{New: func() any { return &room{} }}

// Weighing makes p make schedules for a caller that only weighs what they do, and returns it: hops have no labels and no
// sources, only the rows of the own block are told of buffers, and where both passes have the same calls, Forward is the
// hops of Backward, with moves and folds of gradients that a forward pass leaves out. They hold until Release. Such a
// planner is not for several goroutines at once.
func (p *Planner) Weighing() *Planner {
	p.room = rooms.Get().(*room)
	return p
}

// Release hands back the memory of the schedules that p has made since Weighing. It makes no more.
func (p *Planner) Release() {
	p.room.hop.reset()
	p.room.move.reset()
	p.room.fold.reset()
	p.room.stop.reset()
	rooms.Put(p.room)
	p.room = nil
}

// Schedules that are kept have memory of their own: those of no room.

func (r *room) hops(n int) []Hop {
	if r == nil {
		return make([]Hop, n)
	}
	return r.hop.take(n)
}

func (r *room) moves(n int) []Move {
	if r == nil {
		return make([]Move, n)
	}
	return r.move.take(n)
}

func (r *room) folds(n int) []Fold {
	if r == nil {
		return make([]Fold, n)
	}
	return r.fold.take(n)
}

func (r *room) stops(n int) []stop {
	if r == nil {
		return make([]stop, n)
	}
	return r.stop.take(n)
}

// share is the hops of a forward pass among those of a backward pass, from the first on in which a forward pass has something to do.
func share(hops []Hop) []Hop {
	for i := range hops {
		if hops[i].forward() {
			return hops[i:]
		}
	}
	return nil
}

// pool is memory that is handed out piece by piece.
type pool[T any] struct{ all []T }

// leastPool is how many elements a pool begins with.
const leastPool = 256

// take is n elements, all zero. What was taken before from memory that is too small by now stays where it is.
func (p *pool[T]) take(n int) []T {
	at := len(p.all)
	if cap(p.all)-at < n {
		at, p.all = 0, make([]T, 0, max(2*cap(p.all), n, leastPool))
	}
	p.all = p.all[:at+n]
	return p.all[at : at+n : at+n]
}

func (p *pool[T]) reset() {
	clear(p.all)
	p.all = p.all[:0]
}
