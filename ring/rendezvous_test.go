package ring

import "fmt"

// A swap holds one exchange of a rank: the peers of its messages, in order.
type swap struct{ send, recv []int }

// swaps lists the exchanges of a rank, in the order in which its loop begins them.
func swaps(s *Schedule, backward bool) []swap {
	var list []swap
	add := func(x swap) {
		if len(x.send)+len(x.recv) > 0 {
			list = append(list, x)
		}
	}
	heads := func(back bool, exchanges ...*Exchange) {
		var w swap
		for _, x := range exchanges {
			if x == nil {
				continue
			}
			for _, m := range x.Send {
				w.send = append(w.send, m.Peer)
			}
			for _, m := range x.Recv {
				w.recv = append(w.recv, m.Peer)
			}
		}
		if back {
			w.send, w.recv = w.recv, w.send
		}
		add(w)
	}
	peers := func(p []int, moves []Move) []int {
		for _, m := range moves {
			p = append(p, m.Peer)
		}
		return p
	}
	heads(false, s.Q, s.KV)
	hops := s.Forward
	if backward {
		hops = s.Backward
	}
	for _, h := range hops {
		add(swap{peers(peers(nil, h.SendKV), h.SendGrad), peers(peers(nil, h.RecvKV), h.RecvGrad)})
	}
	if backward {
		heads(true, s.Q, s.KV)
	} else {
		heads(true, s.Q)
	}
	return list
}

// rendezvous finds exchanges that wait for each other in a circle where each ends only when all
// peers of it have begun theirs, and begins only when the one before it has ended: the strictest
// that a transport may be.
func rendezvous(all []*Schedule, backward bool) error {
	lists := make([][]swap, len(all))
	sent, received := map[[2]int][]int{}, map[[2]int][]int{} // [from, to]: the exchange of each message
	for r, s := range all {
		lists[r] = swaps(s, backward)
		for i, x := range lists[r] {
			for _, p := range x.send {
				sent[[2]int{r, p}] = append(sent[[2]int{r, p}], i)
			}
			for _, p := range x.recv {
				received[[2]int{p, r}] = append(received[[2]int{p, r}], i)
			}
		}
	}
	for r := range all {
		for p := range all {
			if out, in := len(sent[[2]int{r, p}]), len(received[[2]int{r, p}]); out != in {
				return fmt.Errorf("rank %d sends %d messages to %d, which receives %d", r, out, p, in)
			}
		}
	}
	at := make([]int, len(all)) // the exchange that each rank is in
	ready := func(r int) bool {
		for way, list := range sent {
			for n, i := range list {
				j := received[way][n]
				if way[0] == r && i == at[r] && at[way[1]] < j || way[1] == r && j == at[r] && at[way[0]] < i {
					return false
				}
			}
		}
		return true
	}
	for moved := true; moved; {
		moved = false
		for r := range all {
			for at[r] < len(lists[r]) && ready(r) {
				at[r]++
				moved = true
			}
		}
	}
	for r := range all {
		if at[r] < len(lists[r]) {
			return fmt.Errorf("rank %d waits for ever in its exchange %d of %d", r, at[r], len(lists[r]))
		}
	}
	return nil
}
