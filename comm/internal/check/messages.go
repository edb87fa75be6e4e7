package check

import "fmt"

// A message is a view to or from a rank. It is comm.Message, which is made of the same fields.
type message interface {
	~struct {
		Peer int
		View View
	}
}

// A plain is a message whose fields can be used here.
type plain struct {
	Peer int
	View View
}

// Exchange checks the messages of a call: that each peer is of the group and each view can be
// moved, and that the messages of the rank to itself pair up, in number and in size.
func Exchange[M message](r Rules, send, recv []M) error {
	if err := side(r, "send", send); err != nil {
		return err
	}
	if err := side(r, "receive", recv); err != nil {
		return err
	}
	to, from := own(r.Rank, send), own(r.Rank, recv)
	if to != from {
		return fmt.Errorf("%d messages to the own rank, %d from it", to, from)
	}
	for i, s, d := 0, 0, 0; i < to; i, s, d = i+1, s+1, d+1 {
		s, d = next(r.Rank, send, s), next(r.Rank, recv, d)
		if a, b := Bytes(plain(send[s]).View), Bytes(plain(recv[d]).View); a != b {
			return fmt.Errorf("message %d to the own rank has %d bytes, it is received into %d", i, a, b)
		}
	}
	return nil
}

// side checks the messages one by one.
func side[M message](r Rules, verb string, ms []M) error {
	for i := range ms {
		m := plain(ms[i])
		if m.Peer < 0 || m.Peer >= r.Size {
			return fmt.Errorf("%s %d names rank %d of a group of %d", verb, i, m.Peer, r.Size)
		}
		if err := r.view(m.View); err != nil {
			return fmt.Errorf("the view of %s %d (rank %d) %w", verb, i, m.Peer, err)
		}
	}
	return nil
}

// own counts the messages of the rank to or from itself.
func own[M message](rank int, ms []M) (n int) {
	for i := range ms {
		if plain(ms[i]).Peer == rank {
			n++
		}
	}
	return n
}

// next returns the index of the first message of the rank to or from itself, from i on.
func next[M message](rank int, ms []M, i int) int {
	for plain(ms[i]).Peer != rank {
		i++
	}
	return i
}
