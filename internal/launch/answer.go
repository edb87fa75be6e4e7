package launch

import (
	"bytes"
	"runtime"

	"github.com/cprun/cprun/internal/launch/standing"
)

// maxStacks is the most that a worker tells of its goroutines: some hundred of them, and half a frame when
// it is quoted.
const maxStacks = 256 << 10

// OnTell has f called, on a goroutine of its own, when the launcher asks what this worker is at and waits
// for. It must not wait for anything.
func (w *Worker) OnTell(f func() standing.Standing) { w.tell.Store(&f) }

// answer says what this worker waits for, and then, where that is asked for, the stacks of its
// goroutines, for which all of them stand for a moment. That the launcher is gone is seen by receive.
func (w *Worker) answer(c command) {
	var s standing.Standing
	if f := w.tell.Load(); f != nil {
		s = (*f)()
	}
	if w.SendData(EventStanding, 0, s) != nil || !c.Stacks || !w.dumping.CompareAndSwap(false, true) {
		return
	}
	defer w.dumping.Store(false)
	buf := make([]byte, maxStacks)
	buf = buf[:runtime.Stack(buf, true)]
	_ = w.SendData(EventStacks, 0, string(bytes.ToValidUTF8(buf, nil)))
}
