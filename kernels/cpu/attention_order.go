package cpu

import (
	"slices"
	"sync"
)

// cell is a block of queries and one of keys, and the cells, by number, that add to the gradients of either last before
// it: -1 where it is the first.
type cell struct{ i, j, row, column int }

// order is the visible cells of a grid of nq by nk blocks, round by round.
func (f *backwardCall[T]) order(nq, nk int) []cell {
	n := max(nq, nk)
	last := slices.Repeat([]int{-1}, nq+nk)
	var cells []cell
	for round := range n {
		for i := range nq {
			if j := (round - i + n) % n; j < nk && f.visible(i, j) {
				cells = append(cells, cell{i, j, last[i], last[nq+j]})
				last[i], last[nq+j] = len(cells)-1, len(cells)-1
			}
		}
	}
	return cells
}

// inOrder runs do(cell, 0) to do(cell, per-1) of all cells, each when those before it have been done. Nobody waits for
// a whole round: what a cell waits for was begun before it.
func inOrder(c *Kernels, cells []cell, per int, do func(s *scratch, c cell, n int)) {
	var mu sync.Mutex
	ended := sync.NewCond(&mu)
	done := make([]bool, len(cells)*per)
	c.split(len(done), func(s *scratch, w int) {
		at, n := cells[w/per], w%per
		before := func(cell int) bool { return cell < 0 || done[cell*per+n] }
		mu.Lock()
		for !before(at.row) || !before(at.column) {
			ended.Wait()
		}
		mu.Unlock()
		do(s, at, n)
		mu.Lock()
		done[w] = true
		mu.Unlock()
		ended.Broadcast()
	})
}
