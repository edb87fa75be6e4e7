package cluster

import "testing"

// TestRegister checks the promises of an acceptor step by step.
func TestRegister(t *testing.T) {
	low, high := ballot{1, "b"}, ballot{2, "a"}
	value := func(index int, leader string) *decision {
		return &decision{Index: index, Leader: PeerAddr{Name: leader}}
	}
	r := register{index: 3}
	ask := func(index int, b ballot) *promise { yes, _ := r.prepare(&prepare{index, b}); return yes }
	offer := func(d *decision, b ballot) bool { yes, _ := r.accept(&accept{b, *d}); return yes != nil }

	if ask(3, high) != nil || ask(5, high) != nil {
		t.Error("a promise for another decision than the next")
	}
	if yes := ask(4, low); yes == nil || yes.Accepted != nil {
		t.Errorf("promise %+v", yes)
	}
	if offer(value(4, "x"), initialBallot("x")) {
		t.Error("a value was accepted below what was promised")
	}
	if !offer(value(4, "b"), low) || offer(value(5, "b"), low) || offer(value(3, "b"), high) {
		t.Error("a value for the next decision alone is accepted, at the promised ballot")
	}
	if yes := ask(4, high); yes == nil || yes.Accepted == nil || yes.Accepted.Leader.Name != "b" || yes.At != low {
		t.Errorf("promise %+v, want what was accepted before", yes)
	}
	if ask(4, low) != nil || offer(value(4, "b"), low) {
		t.Error("a lower ballot goes on after a higher one was promised")
	}
	if _, no := r.prepare(&prepare{4, low}); no.Promised != high || no.Index != 3 {
		t.Errorf("nack %+v", no)
	}
	if !offer(value(4, "a"), high) || r.accepted.Leader.Name != "a" {
		t.Error("the higher ballot is not accepted")
	}
	if r.learn(value(3, "z")) || !r.learn(value(6, "z")) || r.index != 6 || r.accepted != nil ||
		r.promised != (ballot{}) {
		t.Errorf("after a later decision: %+v", r)
	}
}

func TestBallotsAreInOrder(t *testing.T) {
	all := []ballot{{}, initialBallot("a"), initialBallot("b"), {1, "a"}, {1, "b"}, {2, "a"}}
	for i, b := range all {
		for j, c := range all {
			if got := b.compare(c); got < 0 != (i < j) || got == 0 != (i == j) {
				t.Errorf("%v and %v: %d", b, c, got)
			}
		}
	}
}
