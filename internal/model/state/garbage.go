package state

import (
	"runtime"
	"runtime/debug"
)

// leastGarbage is what a process on a CPU lets lie before Go collects it, unless a percent of what is in use is more. A
// step
// leaves some hundred KiB, and a collection takes some milliseconds.
const leastGarbage = 4 << 20

// Garbage returns how many bytes that nobody uses any more a process on a CPU lets lie, beside so many in use, and
// how many percent of these they are.
func Garbage(live int64) (percent int, bytes int64) {
	live = max(live, 1)
	percent = int(min(max((100*leastGarbage+live-1)/live, 1), 100))
	return percent, live * int64(percent) / 100
}

// BoundGarbage has Go collect what Garbage says, in a process on a CPU that has allocated what it works in. Otherwise
// Go
// waits until there is as much garbage as there is memory in use, of which most is weights and activations, so that
// a run of some hundred steps takes twice what it needs. Where somebody has set GOGC that holds.
func BoundGarbage() {
	runtime.GC() // what the start has left
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	percent, _ := Garbage(int64(m.HeapAlloc))
	if asked := debug.SetGCPercent(percent); asked != 100 {
		debug.SetGCPercent(asked)
	}
}
