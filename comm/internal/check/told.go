package check

import (
	"fmt"
	"strings"

	"github.com/cprun/cprun/tensor"
)

// Told returns what a trace says of an exchange: "1024 bytes to rank 2, 1024 bytes from rank 0".
func Told[M message](send, recv []M) string {
	return strings.Join(append(told("to", send), told("from", recv)...), ", ")
}

// told sums the messages up by peer, in the order of their first messages.
func told[M message](way string, ms []M) (parts []string) {
	var peers []int
	bytes := map[int]int64{}
	for _, m := range ms {
		p := plain(m)
		if _, seen := bytes[p.Peer]; !seen {
			peers = append(peers, p.Peer)
		}
		bytes[p.Peer] += Bytes(p.View)
	}
	for _, p := range peers {
		parts = append(parts, fmt.Sprintf("%d bytes %s rank %d", bytes[p], way, p))
	}
	return parts
}

// Collective returns what a trace says of a collective on a view.
func Collective(v tensor.View, ranks int) string {
	return fmt.Sprintf("%d bytes over %d ranks", Bytes(v), ranks)
}
