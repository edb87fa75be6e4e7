//go:build netns

package comm_test

import (
	"fmt"
	"testing"
	"time"
)

// BenchmarkNetwork moves 64 MiB in both directions over a network that is long, narrow, lossy, or none of these,
// by one connection and by several.
func BenchmarkNetwork(b *testing.B) {
	const mbit = 1e6 / 8
	for _, net := range []struct {
		name string
		terms
	}{
		{"free", terms{}},
		{"1G-0.1ms", terms{rate: 1000 * mbit, delay: 50 * time.Microsecond, queue: 1 << 20}},
		{"1G-20ms", terms{rate: 1000 * mbit, delay: 10 * time.Millisecond, queue: 2 << 20}},
		{"1G-40ms", terms{rate: 1000 * mbit, delay: 20 * time.Millisecond, queue: 2 << 20}},
		{"1G-40ms-loss", terms{rate: 1000 * mbit, delay: 20 * time.Millisecond, queue: 2 << 20, loss: 1e-3}},
	} {
		for _, streams := range []int{1, 2, 4, 8} {
			b.Run(fmt.Sprintf("%s/%d", net.name, streams), func(b *testing.B) {
				ranks := newLab(b, net.terms).start(b, "huge", streams, false)
				go func() {
					for range ranks[1].lines {
					}
				}()
				var n, first int
				var at, begun float64
				for end := time.Now().Add(8 * time.Second); n < 3 || time.Now().Before(end); {
					line := ranks[0].next(b, "moved", time.Minute)
					if _, err := fmt.Sscanf(line, "moved %d %g", &n, &at); err != nil {
						b.Fatalf("%q: %v", line, err)
					}
					if first == 0 { // the first finds its pace
						first, begun = n, at
					}
				}
				b.ReportMetric(float64(n-first)*(64<<20)/(at-begun)/1e6, "MB/s")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
