package launch

import "runtime"

// A spawner is a goroutine that keeps one OS thread. The kernel sends the parent death signal
// when the THREAD that forked ends, not the process, so all workers are forked from a thread
// that lives as long as they do.
type spawner struct {
	calls chan func()
	done  chan struct{}
}

func newSpawner() *spawner {
	s := &spawner{make(chan func()), make(chan struct{})}
	go func() { // ended and awaited by close
		defer close(s.done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for call := range s.calls {
			call()
		}
	}()
	return s
}

// do runs f on the thread.
func (s *spawner) do(f func() error) error {
	result := make(chan error)
	s.calls <- func() { result <- f() }
	return <-result
}

func (s *spawner) close() {
	close(s.calls)
	<-s.done
}
