// Package pace times callers that look again and again at what others are about to do.
package pace

import (
	"runtime"
	"time"
)

// Backoff paces a caller that looks again and again at what another process is about to do:
// at once at first, for a peer that is only microseconds behind. The zero value is usable.
type Backoff struct {
	Spin  time.Duration // look without a pause for so long, at least
	begun time.Time
	looks int
	pause time.Duration
}

// Wait blocks until the caller should look again.
func (b *Backoff) Wait() {
	const looks, first, most = 100, 20 * time.Microsecond, 500 * time.Microsecond
	if b.looks++; b.looks == 1 {
		b.begun = time.Now()
	}
	if b.looks < looks || b.Spin > 0 && time.Since(b.begun) < b.Spin {
		runtime.Gosched()
		return
	}
	// A quarter more each time: what comes to pass in a pause is seen late by a fifth of the
	// whole wait at most.
	b.pause = min(max(b.pause+b.pause/4, first), most)
	sleep(b.pause)
}
