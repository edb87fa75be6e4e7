package ring_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// packed returns documents of a sequence with a long tail: many short ones, and one of a third.
func packed(rng *rand.Rand, n int) []int {
	docs := []int{n / 3}
	for left := n - n/3; left > 0; left -= docs[len(docs)-1] {
		docs = append(docs, min(left, 1+rng.IntN(1+rng.IntN(1+n/5))))
	}
	rng.Shuffle(len(docs), func(i, j int) { docs[i], docs[j] = docs[j], docs[i] })
	return docs
}

// Packed documents over any number of ranks are one device's attention, under every mask and with
// shared heads of keys. Some ranks have a handful of positions, or none. Heads meet a third of the numbers of ranks with each
// mask, and all of them with some.
func TestDocumentsEqualOneDevice(t *testing.T) {
	rng := rand.New(rand.NewPCG(71, 72))
	for turn, c := range []struct {
		causal bool
		window int
	}{{true, -1}, {true, 6}, {false, -1}} {
		for _, n := range []int{5, 61} {
			docs := packed(rng, n)
			mask := ring.Must(partition.NewMask(c.causal, c.window, n, n, docs))
			for h, heads := range [][2]int{{2, 2}, {4, 2}, {3, 1}} {
				p := newProblem(rng, tensor.F64, 1, partition.Shape{SeqQ: n, SeqKV: n, Mask: mask,
					Layout: partition.Document{Docs: docs, Bands: []partition.Band{mask.Band}}}, heads, 4, 3)
				want := whole(p)
				for s, size := range [][]int{{1, 4}, {2, 6}, {3, 8}}[(turn+h)%3] {
					p.shape.Size = size
					for k, algorithm := range ring.Variants {
						if testing.Short() && (s+k+turn+n/5)%2 != 0 {
							continue
						}
						what := fmt.Sprintf("documents %v, causal %t, window %d, heads %v, %s, %d ranks", docs,
							c.causal, c.window, heads, algorithm, p.shape.Size)
						compare(t, what, run(t, p, algorithm, onCPU), want, 1e-11)
					}
				}
			}
		}
	}
}

// What an all-gather sends of packed documents is the rows that others read, each once for each reader,
// forward and in the backward pass, and gradients of as many come home.
func TestOnlyRowsThatAreReadTravel(t *testing.T) {
	rng := rand.New(rand.NewPCG(73, 74))
	several := 0
	for _, layout := range []partition.LayoutName{"document", "document-zigzag"} {
		for _, size := range []int{2, 3, 4, 8} {
			n := 300 * size
			docs := packed(rng, n)
			l := layout.Layout(docs)
			mask := ring.Must(partition.NewMask(true, 40, n, n, docs))
			shape := partition.Shape{SeqQ: n, SeqKV: n, Size: size, Layout: l, Mask: mask}
			all := ring.All("allgather", ring.Spec{Shape: shape, Heads: 1, KVHeads: 1, Inner: 1})
			for owner, s := range all {
				read, reads := int64(0), int64(0) // by others of its rows, and by it of others'
				for rank := range size {
					if rank != owner {
						read += rowsRead(shape, rank, owner)
						reads += rowsRead(shape, owner, rank)
					}
				}
				const kv, grad = 1, 1000
				if forward, backward := s.Bytes(kv, grad); forward != read*kv || backward != read*kv+reads*grad {
					t.Errorf("%s over %d: rank %d sends %d and %d; %d of its rows are read, and it reads %d", layout,
						size, owner, forward, backward, read, reads)
				}
				peers := map[int]int{}
				for _, m := range s.Backward[0].SendKV {
					if peers[m.Peer]++; peers[m.Peer] > 1 {
						several++
					}
				}
			}
		}
	}
	if several == 0 {
		t.Error("no pair of ranks has several moves")
	}
}

// rowsRead counts the rows of owner's keys that tiles of rank hold.
func rowsRead(shape partition.Shape, rank, owner int) int64 {
	keys := map[int]bool{}
	for _, tile := range partition.Plan(shape, rank, owner) {
		for j := tile.K.Lo; j < tile.K.Hi; j++ {
			keys[j] = true
		}
	}
	return int64(len(keys))
}
