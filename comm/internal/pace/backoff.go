// Package pace paces polling: a loop calls Backoff.Wait between two checks of another process's progress.
package pace

import (
	"runtime"
	"time"
)

// Backoff paces a polling caller. It does not sleep at first, since a peer may be only microseconds behind. The zero
// value is usable.
type Backoff struct {
	Spin  time.Duration // the least time without a pause
	begun time.Time
	looks int
	pause time.Duration
}

// Wait blocks until the next check.
func (b *Backoff) Wait() {
	const looks, first, most = 100, 20 * time.Microsecond, 500 * time.Microsecond
	if b.looks++; b.looks == 1 {
		b.begun = time.Now()
	}
	if b.looks < looks || b.Spin > 0 && time.Since(b.begun) < b.Spin {
		runtime.Gosched()
		return
	}
	// The pause grows by a quarter each time, so that an event is noticed late by at most a fifth of the whole wait.
	b.pause = min(max(b.pause+b.pause/4, first), most)
	sleep(b.pause)
}
