package ring_test

import (
	"fmt"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// A schedule lists the work of a rank, hop by hop: three ranks have 12 causal positions in a zigzag ring, and this is
// rank 1 in a forward pass.
func ExampleNew() {
	causal := partition.Mask{Band: partition.Causal()}
	shape := partition.Shape{SeqQ: 12, SeqKV: 12, Size: 3, Layout: partition.Zigzag{}, Mask: causal}
	s, err := ring.New("ring", ring.Spec{Shape: shape}, 1)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, hop := range s.Forward {
		fmt.Println(hop.Label)
		for _, m := range hop.SendKV {
			b := m.Block
			fmt.Printf("  sends rows %d to %d of buffer %d to rank %d\n", b.Lo, b.Hi, b.Buf, m.Peer)
		}
		for _, m := range hop.RecvKV {
			b := m.Block
			fmt.Printf("  receives rows %d to %d of buffer %d from rank %d\n", b.Lo, b.Hi, b.Buf, m.Peer)
		}
		for _, t := range hop.Tiles {
			fmt.Printf("  computes queries %v against keys %v of buffer %d\n", t.Q, t.K, hop.Keys.Buf)
		}
	}
	// Output:
	// hop 0 owner 1
	//   sends rows 0 to 4 of buffer 0 to rank 2
	//   receives rows 0 to 2 of buffer 1 from rank 0
	//   computes queries {0 4} against keys {0 4} of buffer 0
	// hop 1 owner 0
	//   sends rows 0 to 2 of buffer 1 to rank 2
	//   receives rows 0 to 4 of buffer 2 from rank 0
	//   computes queries {0 4} against keys {0 2} of buffer 1
	// hop 2 owner 2
	//   computes queries {2 4} against keys {0 4} of buffer 2
}
