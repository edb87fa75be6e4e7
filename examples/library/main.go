// Command library runs ring attention, forward and backward, over 4 ranks in one process. It compares the result with
// attention on the whole sequence in float64.
package main

import (
	"errors"
	"log"
	"math"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/kernels/cpu"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

const ranks, seq, heads, kvHeads, dim = 4, 96, 4, 2, 16

func main() {
	shape := partition.Shape{SeqQ: seq, SeqKV: seq, Size: ranks, Layout: partition.Zigzag{},
		Mask: partition.Mask{Band: partition.Causal()}}
	softmax := attention.Softmax{Scale: 1 / math.Sqrt(dim)}
	q, k, v, do := random(heads), random(kvHeads), random(kvHeads), random(heads)
	all := newResults(seq)

	streams := make([]tensor.Stream, ranks)
	for r := range streams {
		streams[r] = tensor.NewHostStream("compute")
	}
	done := make(chan error)
	for r, group := range comm.NewLocal(ranks, streams, comm.Options{}) {
		go func() {
			rows := partition.Positions(shape.Layout.Spans(seq, ranks, r)) // rank r's part of the sequence
			part := newResults(len(rows))
			err := attend(group, streams[r].(*tensor.HostStream), shape, softmax, part,
				tensor.Gather(q, rows), tensor.Gather(k, rows), tensor.Gather(v, rows), tensor.Gather(do, rows))
			all.put(part, rows)
			done <- err
		}()
	}
	for range ranks {
		if err := <-done; err != nil {
			log.Fatal(err)
		}
	}
	acc, grads := attention.Whole[float64](q, k, v, do, shape.Mask, softmax)
	all.compare(results{acc, grads})
}

// attend runs one rank, forward and backward.
func attend(c *comm.Group, s *tensor.HostStream, shape partition.Shape, p attention.Softmax, out results,
	q, k, v, do tensor.View) error {
	schedule, err := ring.New("ring", ring.Spec{Shape: shape}, c.Rank())
	if err != nil {
		return err
	}
	loop := ring.Ring{Kernel: cpu.New(s), Comm: c, Stream: s, Arena: tensor.NewHostArena(0)}
	return errors.Join(loop.Forward(out.acc, q, k, v, schedule, p),
		loop.Backward(out.grads, do, q, k, v, out.acc, schedule, p),
		s.Close(), c.Close()) // closing a stream waits for queued work
}
