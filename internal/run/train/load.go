package train

import (
	"slices"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/partition"
)

// load is the attention of a step for the ranks that share its sequences.
type load struct {
	// slowest and mean are visible pairs of all heads: of the rank with most and of the mean rank,
	// over the layers and sequences, after each of which the ranks wait for each other.
	slowest, mean float64
	sent          int64 // bytes of keys, values, their gradients and exchanged heads that this rank sends
}

// add adds the work of another load that many times.
func (l *load) add(o load, times int) {
	l.slowest += float64(times) * o.slowest
	l.mean += float64(times) * o.mean
}

// imbalance returns the work of the slowest rank over that of the mean, or 1 without work.
func (l *load) imbalance() float64 {
	if l.mean == 0 {
		return 1
	}
	return l.slowest / l.mean
}

// loadOf returns the work of one layer for one sequence, where that many ranks trade that many heads with each other.
func loadOf(shape partition.Shape, traders, heads int) (l load) {
	work := partition.WorkOfHeads(partition.Work(shape), traders, heads)
	l.slowest = float64(slices.Max(work))
	for _, n := range work {
		l.mean += float64(n) / float64(len(work))
	}
	return l
}

// tally counts the bytes that a ring sends.
type tally struct {
	comm.Exchanger
	sent int64
}

// Exchange implements comm.Exchanger.
func (t *tally) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	for i := range send {
		t.sent += int64(send[i].View.Size()) * int64(send[i].View.DType().Size())
	}
	return t.Exchanger.Exchange(send, recv)
}
